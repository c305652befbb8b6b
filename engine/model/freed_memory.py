"""Give back to the system what loading has freed.

The C library keeps freed memory for itself. Tensors that are read, packed elsewhere and dropped
leave as much behind as the weights are large: measured, 1.5 GB resident for weights of .8 GB.
"""

import ctypes
import functools
from collections.abc import Callable
from contextlib import suppress


def give_back_freed_memory() -> None:
    """Give it back, where the C library can (glibc)."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    with suppress(AttributeError, OSError, TypeError):
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return found
    return None
