"""Products of bfloat16 rows with weights that stay as a checkpoint stores them (stored.h).

They are decoded in registers, in the order of sums that `PanelLinear` has: the bits are those of
a `PanelLinear` with the decoded weight, and a fraction of its bytes is read.
"""

from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.panels_in_groups import PanelsInGroups
from outrider.kernels.cpu.product_library import InstructionSet
from outrider.kernels.quantised.stored_weight import NUMBERS, Number, StoredWeight

# Columns that groups have to be whole multiples of: what a unit of codes holds of each.
_UNIT_COLUMNS: Final[dict[Number, int]] = {"int4": 4, "int8": 2, "float8": 2}
# The bias of float32's exponent less that of float8's: where its bits are taken over.
_FLOAT8_FACTOR: Final = 2.0**120


def can_hold_stored(weight: StoredWeight) -> bool:
    """True if panels hold such a weight: its groups are whole units, its numbers tame."""
    has_whole_units = weight.group_size % _UNIT_COLUMNS[weight.number] == 0
    return has_whole_units and weight.is_tame


class StoredPanelLinear(PanelsInGroups):
    """`PanelLinear` of the decoded weight, to the bit, with the weight held as it is stored."""

    __slots__ = ()

    def __init__(
        self,
        weight: StoredWeight,
        bias: Tensor | None = None,
        *,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """`weight`: one that `can_hold_stored`; default: the best instruction set.

        Raises ValueError for another weight, RuntimeError where the library is not there.
        """
        if not can_hold_stored(weight):
            raise ValueError(
                f"a weight of {weight.number} in groups of {weight.group_size} cannot be held in "
                f"panels: groups are multiples of {_UNIT_COLUMNS[weight.number]}, and scales "
                "neither tiny nor huge"
            )
        is_float = weight.number == "float8"
        self._hold_groups(
            "stored",
            weight,
            bias,
            instruction_set,
            scales=weight.scales * _FLOAT8_FACTOR if is_float else None,
            is_short=_has_short_scales(weight),
        )


def _has_short_scales(weight: StoredWeight) -> bool:
    """True if a code times a scale is exact in float32, and a zero point likewise.

    Zero points have at most 12 digits beside a code's place (stored_avx512.cpp), codes 4 or 8.
    """
    if weight.minimums is None:
        return weight.scale_dtype != torch.float32
    spare = 1 << NUMBERS[weight.number]
    return bool((weight.scales.contiguous().view(torch.int32) % spare == 0).all())
