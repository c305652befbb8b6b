"""Texts that repeat in the compiled library (text.cpp): its structure and its functions."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

from outrider.kernels.cpu.product_library import product_support

_Address, _Int32, _Int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

MAX_INDEXES: Final = 3
"""The texts in which one look is made (kMostIndexes in text.h)."""


class TextLook(ctypes.Structure):
    """A look for what follows a text (struct TextLook in text.h)."""

    _fields_ = (
        ("text", _Address),
        ("indexes", _Address * MAX_INDEXES),
        *((name, _Int64) for name in ("num_indexes", "num_new", "max_depth")),
        *((name, _Int64) for name in ("best_number", "best_position", "best_at")),
    )


def _checked(result: int | None) -> int:
    if result is None or result == -1:
        raise MemoryError("a text found no memory for its tokens")
    return result


_SIGNATURES: Final[dict[str, tuple[tuple[Any, ...], Any]]] = {
    "begin": ((), _Address),
    "end": ((_Address,), None),
    "extend": ((_Address, _Int64, _Address), _checked),
    "end_document": ((_Address,), _checked),
    "look": ((_Address, _Int64, _Address, _Int64, *(_Address,) * 4), _checked),
    "is_sure": ((_Address, _Int64, _Address), _checked),
}


class TextLibrary:
    """The functions by their names; text.cpp says what each takes and gives.

    They raise MemoryError where memory is short. Raises AttributeError for a library that does not
    have them.
    """

    def __init__(self, functions: ctypes.CDLL) -> None:
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(functions, f"outrider_text_{name}")
            function.argtypes, function.restype = arguments, result
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(f"the library has no outrider_text_{name}")


@functools.cache
def text_library() -> TextLibrary | None:
    """Return the library's texts, or None where they were not built."""
    library = product_support().library
    try:
        return None if library is None else TextLibrary(library.functions)
    except AttributeError:  # it is older than its texts
        return None
