"""Products of 8-bit rows with weights of 4 or 8 bits in groups, compiled (grouped.h)."""

from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.panels_in_groups import PanelsInGroups
from outrider.kernels.cpu.product_library import InstructionSet
from outrider.kernels.quantised.stored_weight import Number, StoredWeight
from outrider.kernels.quantised.weight import QuantisedWeight

# Of k in a unit of codes, which groups are whole multiples of.
_UNIT_K: Final[dict[Number, int]] = {"int4": 8, "int8": 4}
# Codes less zero points are below 512, rows at most 127: sums of a group fit in 32 bits.
_MAX_GROUP_SIZE: Final = 1 << 15
_MAX_ZERO: Final = 256
_INT4_ZERO: Final = 8


def can_hold_grouped(weight: StoredWeight) -> bool:
    """True if rows of 8 bits are multiplied with a stored weight: whole numbers, tame scales."""
    return _fits(weight) and weight.is_tame


def _fits(weight: StoredWeight) -> bool:
    return (
        weight.zeros is not None
        and weight.group_size % _UNIT_K[weight.number] == 0
        and weight.group_size <= _MAX_GROUP_SIZE
        and bool((weight.zeros.abs() <= _MAX_ZERO).all())
    )


class GroupedPanelLinear(PanelsInGroups):
    """`x @ weight.T + bias` in bfloat16 with the rows of x rounded to 8 bits, group by group."""

    __slots__ = ()

    def __init__(
        self,
        weight: StoredWeight,
        bias: Tensor | None = None,
        *,
        has_row_groups: bool = True,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """`has_row_groups`: rows have a scale for each group of columns, else one.

        Raises ValueError for a weight of floats or in other groups, RuntimeError where the library
        is not there.
        """
        if not _fits(weight):
            raise ValueError(
                f"a weight of {weight.number} in groups of {weight.group_size} cannot be "
                "multiplied with rows of 8 bits"
            )
        self._hold_groups("grouped", weight, bias, instruction_set, has_row_groups=has_row_groups)


class Int4PanelLinear(GroupedPanelLinear):
    """`int4_linear_reference` with the same bits; the weight is held in panels only."""

    __slots__ = ()

    def __init__(
        self,
        weight: QuantisedWeight,
        bias: Tensor | None = None,
        *,
        instruction_set: InstructionSet | None = None,
    ) -> None:
        """`weight`: of 4 bits without zero points, in groups that 8 divides.

        Raises ValueError for another weight, RuntimeError where the library is not there.
        """
        if weight.bits != 4 or weight.zeros is not None:
            raise ValueError(f"a weight of {weight.bits} bits is not one of 4 without zero points")
        stored = StoredWeight(
            number="int4",
            codes=(weight.codes + _INT4_ZERO).to(torch.uint8),
            scales=weight.scales,
            zeros=torch.full(weight.scales.shape, _INT4_ZERO, dtype=torch.int16),
        )
        super().__init__(stored, bias, has_row_groups=False, instruction_set=instruction_set)
