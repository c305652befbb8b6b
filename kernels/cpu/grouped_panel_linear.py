"""Products of 8-bit rows with weights of 4 or 8 bits in groups, compiled (grouped.h)."""

import ctypes
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.panel_linear import (
    BYTES_PER_THREAD,
    PanelLinear,
    contiguous_f32,
    library_for,
)
from outrider.kernels.cpu.product_library import InstructionSet, Kind
from outrider.kernels.cpu.structs import GroupedStruct
from outrider.kernels.quantised.stored_weight import Number, StoredWeight
from outrider.kernels.quantised.weight import QuantisedWeight

NUMBERS: Final[dict[Number, int]] = {"int4": 0, "int8": 1, "float8": 2}
"""Kinds of numbers as the library names them (grouped.h)."""
SCALE_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Types of scales and minimums as the library names them (grouped.h)."""
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


class GroupedPanelLinear(PanelLinear):
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
        self._kind = Kind.GROUPED
        self._library, instruction_set = library_for(self._kind, instruction_set)
        if not _fits(weight):
            raise ValueError(
                f"a weight of {weight.number} in groups of {weight.group_size} cannot be "
                "multiplied with rows of 8 bits"
            )
        self.out_features, self.in_features = weight.shape
        dtype, zeros, minimums = weight.scale_dtype, weight.own_zeros, weight.minimums
        bias_f32 = None if bias is None else contiguous_f32(bias, self.out_features)
        product = GroupedStruct(
            out_features=self.out_features,
            in_features=self.in_features,
            group_size=weight.group_size,
            bias=None if bias_f32 is None else bias_f32.data_ptr(),
            number=NUMBERS[weight.number],
            scale_type=SCALE_TYPES[dtype],
            zero=weight.common_zero,
            has_zeros=zeros is not None,
            has_minimums=minimums is not None,
            has_row_groups=has_row_groups,
            instruction_set=instruction_set,
        )
        panels = self._library.pack_grouped(
            product,
            weight.codes,
            weight.scales.to(dtype),
            zeros,
            None if minimums is None else minimums.to(dtype),
        )
        product.panels = panels.data_ptr()
        self._max_threads = 1 + panels.numel() // BYTES_PER_THREAD
        self._held = (panels, bias_f32, None, None)  # the library has addresses only
        self._product = product
        self._address = ctypes.addressof(product)

    def _multiply(self, x: Tensor, y: Tensor, num_threads: int) -> None:
        self._library.multiply_grouped(self._address, x, y, num_threads)


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
