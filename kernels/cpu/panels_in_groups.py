"""Panels of weights in groups of columns, of the two families that the library multiplies.

grouped: with rows rounded to 8 bits (grouped.h). stored: decoded to bfloat16 first (stored.h).
"""

import ctypes
import functools
from typing import Final, Literal

import torch
from torch import Tensor

from outrider.kernels.cpu.panel_linear import (
    BYTES_PER_THREAD,
    PanelLinear,
    contiguous_f32,
)
from outrider.kernels.cpu.product_library import (
    InstructionSet,
    Kind,
    ProductLibrary,
    library_for,
)
from outrider.kernels.cpu.structs import GroupedStruct
from outrider.kernels.quantised.stored_weight import Number, StoredWeight

Family = Literal["grouped", "stored"]
_KINDS: Final[dict[Family, Kind]] = {"grouped": Kind.GROUPED, "stored": Kind.STORED}
# As in grouped.h.
_NUMBERS: Final[dict[Number, int]] = {"int4": 0, "int8": 1, "float8": 2}
_SCALE_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_Address, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Functions:
    """What the library does with the weights of a family."""

    def __init__(self, library: ProductLibrary, family: Family) -> None:
        self._take = library.memory.take
        self._bytes, self._pack, self._multiply = (
            getattr(library.functions, f"outrider_{family}_{name}")
            for name in ("bytes", "pack", "multiply")
        )
        self._bytes.argtypes, self._bytes.restype = (_Address,), _Int64
        self._pack.argtypes, self._pack.restype = (*(_Address,) * 6, _Int32), None
        self._multiply.argtypes = (_Address, _Address, _Int64, _Address, _Int32)
        self._multiply.restype = _Int32

    def pack(self, product: GroupedStruct, *parts: Tensor | None) -> Tensor:
        """Return the panels, uint8 [bytes], of a weight whose sizes and types a struct names.

        `parts`: codes uint8 [out, in]; scales of the struct's type, zeros int16 and minimums like
        scales, [out, groups] each.
        """
        address = ctypes.addressof(product)
        panels = self._take(self._bytes(address))
        held = [None if part is None else part.contiguous() for part in parts]
        self._pack(
            address,
            *(None if part is None else part.data_ptr() for part in held),
            panels.data_ptr(),
            torch.get_num_threads(),
        )
        return panels

    def multiply(self, product: int, x: Tensor, y: Tensor, num_threads: int) -> None:
        """Write y = x @ weight.T + bias. `product`: address of its `GroupedStruct`."""
        if self._multiply(product, x.data_ptr(), x.shape[0], y.data_ptr(), num_threads):
            raise MemoryError(f"a product of {x.shape[0]} rows found no memory for its rows")


_functions = functools.cache(_Functions)


class PanelsInGroups(PanelLinear):
    """A product with a stored weight, held in panels of one family."""

    __slots__ = ("_functions",)

    def _hold_groups(
        self,
        family: Family,
        weight: StoredWeight,
        bias: Tensor | None,
        instruction_set: InstructionSet | None,
        *,
        scales: Tensor | None = None,
        has_row_groups: bool = False,
        is_short: bool = False,
    ) -> None:
        """Pack a weight. `scales`: in place of its own; others as in grouped.h.

        Raises RuntimeError where the library is not there.
        """
        self._kind = _KINDS[family]
        self._library, instruction_set = library_for(instruction_set)
        self._functions = _functions(self._library, family)
        self.out_features, self.in_features = weight.shape
        dtype, zeros, minimums = weight.scale_dtype, weight.own_zeros, weight.minimums
        bias_f32 = None if bias is None else contiguous_f32(bias, self.out_features)
        product = GroupedStruct(
            out_features=self.out_features,
            in_features=self.in_features,
            group_size=weight.group_size,
            bias=None if bias_f32 is None else bias_f32.data_ptr(),
            number=_NUMBERS[weight.number],
            scale_type=_SCALE_TYPES[dtype],
            zero=weight.common_zero,
            has_zeros=zeros is not None,
            has_minimums=minimums is not None,
            has_row_groups=has_row_groups,
            is_short=is_short,
            instruction_set=instruction_set,
        )
        panels = self._functions.pack(
            product,
            weight.codes,
            (weight.scales if scales is None else scales).to(dtype),
            zeros,
            None if minimums is None else minimums.to(dtype),
        )
        product.panels = panels.data_ptr()
        self._max_threads = 1 + panels.numel() // BYTES_PER_THREAD
        self._held = (panels, bias_f32, None, None)  # the library has addresses only
        self._product = product
        self._address = ctypes.addressof(product)

    def _multiply(self, x: Tensor, y: Tensor, num_threads: int) -> None:
        self._functions.multiply(self._address, x, y, num_threads)
