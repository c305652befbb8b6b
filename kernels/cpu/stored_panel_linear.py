"""Products of bfloat16 rows with weights that stay as a checkpoint stores them (stored.h).

They are decoded in registers, in the order of sums that `PanelLinear` has: the bits are those of
a `PanelLinear` with the decoded weight, and a fraction of its bytes is read.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.grouped_panel_linear import NUMBERS as CODES
from outrider.kernels.cpu.grouped_panel_linear import SCALE_TYPES
from outrider.kernels.cpu.panel_linear import (
    BYTES_PER_THREAD,
    PanelLinear,
    contiguous_f32,
    library_for,
)
from outrider.kernels.cpu.product_library import InstructionSet, Kind
from outrider.kernels.cpu.stored_library import StoredStruct, stored_library
from outrider.kernels.quantised.stored_weight import NUMBERS, Number, StoredWeight

# Columns that groups have to be whole multiples of: what a unit of codes holds of each.
_UNIT_COLUMNS: Final[dict[Number, int]] = {"int4": 4, "int8": 2, "float8": 2}
# The bias of float32's exponent less that of float8's: where its bits are taken over.
_FLOAT8_FACTOR: Final = 2.0**120


def can_hold_stored(weight: StoredWeight) -> bool:
    """True if panels hold such a weight: its groups are whole units, its numbers tame."""
    has_whole_units = weight.group_size % _UNIT_COLUMNS[weight.number] == 0
    return has_whole_units and weight.is_tame


class StoredPanelLinear(PanelLinear):
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
        self._kind = Kind.STORED
        self._library, instruction_set = library_for(self._kind, instruction_set)
        if not can_hold_stored(weight):
            raise ValueError(
                f"a weight of {weight.number} in groups of {weight.group_size} cannot be held in "
                f"panels: groups are multiples of {_UNIT_COLUMNS[weight.number]}, and scales "
                "neither tiny nor huge"
            )
        self.out_features, self.in_features = weight.shape
        dtype, scales = weight.scale_dtype, weight.scales
        if weight.number == "float8":
            dtype, scales = torch.float32, scales * _FLOAT8_FACTOR
        zeros = weight.own_zeros
        bias_f32 = None if bias is None else contiguous_f32(bias, self.out_features)
        product = StoredStruct(
            out_features=self.out_features,
            in_features=self.in_features,
            group_size=weight.group_size,
            bias=None if bias_f32 is None else bias_f32.data_ptr(),
            number=CODES[weight.number],
            scale_type=SCALE_TYPES[dtype],
            zero=weight.common_zero,
            has_zeros=zeros is not None,
            has_minimums=weight.minimums is not None,
            is_short=_has_short_scales(weight),
            instruction_set=instruction_set,
        )
        panels = stored_library(self._library).pack(
            product,
            weight.codes,
            scales.to(dtype),
            zeros,
            None if weight.minimums is None else weight.minimums.to(dtype),
        )
        product.panels = panels.data_ptr()
        self._max_threads = 1 + panels.numel() // BYTES_PER_THREAD
        self._held = (panels, bias_f32, None, None)  # the library has addresses only
        self._product = product
        self._address = ctypes.addressof(product)

    def _multiply(self, x: Tensor, y: Tensor, num_threads: int) -> None:
        stored_library(self._library).multiply(self._address, x, y, num_threads)


def _has_short_scales(weight: StoredWeight) -> bool:
    """True if a code times a scale is exact in float32, and a zero point likewise.

    Zero points have at most 12 digits beside a code's place (stored_avx512.cpp), codes 4 or 8.
    """
    if weight.minimums is None:
        return weight.scale_dtype != torch.float32
    spare = 1 << NUMBERS[weight.number]
    return bool((weight.scales.contiguous().view(torch.int32) % spare == 0).all())
