"""The compiled products of stored weights (stored.cpp), as functions of the library."""

import ctypes
import functools

import torch
from torch import Tensor

from outrider.kernels.cpu.product_library import ProductLibrary

_Address, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class StoredStruct(ctypes.Structure):
    """A packed stored weight as the library reads it (struct StoredProduct in stored.h)."""

    _fields_ = (
        ("out_features", _Int64),
        ("in_features", _Int64),
        ("group_size", _Int64),
        ("panels", _Address),
        ("bias", _Address),
        ("number", _Int32),
        ("scale_type", _Int32),
        ("zero", _Int32),
        ("has_zeros", _Int32),
        ("has_minimums", _Int32),
        ("is_short", _Int32),
        ("instruction_set", _Int32),
    )


class StoredLibrary:
    """What the library does with stored weights."""

    def __init__(self, library: ProductLibrary) -> None:
        self._take = library.memory.take
        functions = library.functions
        self._bytes = functions.outrider_stored_bytes
        self._pack = functions.outrider_stored_pack
        self._multiply = functions.outrider_stored_multiply
        self._bytes.argtypes, self._bytes.restype = (_Address,), _Int64
        self._pack.argtypes, self._pack.restype = (*(_Address,) * 6, _Int32), None
        self._multiply.argtypes = (_Address, _Address, _Int64, _Address, _Int32)
        self._multiply.restype = _Int32

    def pack(
        self,
        product: StoredStruct,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        minimums: Tensor | None,
    ) -> Tensor:
        """Return the panels, uint8 [bytes], of a weight whose sizes and types a struct names.

        `codes`: uint8 [out, in]; `scales`, `minimums`: of the struct's type, [out, groups];
        `zeros`: int16.
        """
        address = ctypes.addressof(product)
        panels = self._take(self._bytes(address))
        parts = [
            None if part is None else part.contiguous() for part in (codes, scales, zeros, minimums)
        ]
        self._pack(
            address,
            *(None if part is None else part.data_ptr() for part in parts),
            panels.data_ptr(),
            torch.get_num_threads(),
        )
        return panels

    def multiply(self, product: int, x: Tensor, y: Tensor, num_threads: int) -> None:
        """Write y = x @ weight.T + bias. `product`: address of its `StoredStruct`."""
        if self._multiply(product, x.data_ptr(), x.shape[0], y.data_ptr(), num_threads):
            raise MemoryError(f"a product of {x.shape[0]} rows found no memory for its rows")


@functools.cache
def stored_library(library: ProductLibrary) -> StoredLibrary:
    """Return the functions of a library, found once."""
    return StoredLibrary(library)
