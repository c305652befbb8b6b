"""The compiled library of another architecture, function by function, in an emulator.

It stands where ctypes would load the library: the product's own Python runs above it. A call takes
all memory that its arguments lead to into the emulator, and what became of it back.
"""

import ctypes
import functools
import gc
import inspect
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    address: int
    size: int
    holds_addresses: bool

    def __contains__(self, address: object) -> bool:
        return isinstance(address, int) and 0 <= address - self.address < self.size


class EmulatedLibrary:
    """Has the library's functions as attributes, as `ctypes.CDLL` has."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: runs caller.cpp with the library."""
        self._command = command

    def __getattr__(self, name: str) -> "_Function":
        if not name.startswith("outrider_"):
            raise AttributeError(name)
        function = _Function(self._command, name)
        setattr(self, name, function)
        return function


class _Function:
    """One function; its types are set as those of a function of ctypes."""

    def __init__(self, command: Sequence[str], name: str) -> None:
        self._command, self._name = command, name
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = ctypes.c_int32

    def __call__(self, *arguments: Any) -> int | None:
        given = [_number(each) for each in arguments]
        blocks = _reached(given)
        sent = [_packed(len(self._name)), self._name.encode(), _packed(len(given), *given)]
        sent.append(_packed(len(blocks)))
        for block in blocks:
            sent.append(_packed(block.address, block.size, block.holds_addresses))
            sent.append(ctypes.string_at(block.address, block.size))
        done = subprocess.run(
            self._command, input=b"".join(sent), capture_output=True, check=False, timeout=300
        )
        assert done.returncode == 0, f"{self._name}: {done.returncode} {done.stderr.decode()}"
        start = 8
        for block in blocks:
            ctypes.memmove(block.address, done.stdout[start : start + block.size], block.size)
            start += block.size
        if self.restype is None:
            return None
        return int(self.restype(*struct.unpack_from("<q", done.stdout)).value)


def _number(argument: Any) -> int:
    return 0 if argument is None else int(argument)


def _packed(*numbers: int) -> bytes:
    return b"".join(struct.pack("<Q", number & (1 << 64) - 1) for number in numbers)


def _reached(given: Sequence[int]) -> list[_Block]:
    """Return the memory that numbers lead to, if they are addresses, and what that leads to."""
    known, found, wanted = list(_known_blocks()), list[_Block](), [*given]
    while wanted:
        address = wanted.pop()
        if any(address in block for block in found):
            continue
        here = [block for block in known if address in block]
        if not here:
            continue
        block = max(here, key=lambda block: block.size)
        found.append(block)
        if block.holds_addresses:
            content = ctypes.string_at(block.address, block.size // 8 * 8)
            wanted += struct.unpack(f"<{block.size // 8}Q", content)
    return found


def _known_blocks() -> Iterator[_Block]:
    """List the memory of what is alive: tensors, structures, and what both and callers hold."""
    held = [each for each in gc.get_objects() if _lister(type(each)) is not None]
    for each in held + _locals_of_callers():
        list_blocks = _lister(type(each))
        if list_blocks is not None:
            yield from list_blocks(each)


@functools.cache
def _lister(kind: type) -> Callable[[Any], Iterable[_Block]] | None:
    if issubclass(kind, torch.Tensor):
        return _of_tensor
    if issubclass(kind, np.ndarray):
        return _of_array
    if issubclass(kind, ctypes.Structure | ctypes.Array):
        return _of_structure
    return _of_arrays_held if str(kind.__module__).startswith("outrider.") else None


def _of_tensor(tensor: torch.Tensor) -> Iterator[_Block]:
    if tensor.device.type == "cpu" and tensor.numel():
        storage = tensor.untyped_storage()
        yield _block(storage.data_ptr(), storage.nbytes())


def _of_array(array: NDArray[Any]) -> Iterator[_Block]:
    yield _block(array.__array_interface__["data"][0], array.nbytes)


def _of_arrays_held(owner: object) -> Iterator[_Block]:
    for held in gc.get_referents(owner):  # the collector itself does not list arrays
        if isinstance(held, np.ndarray):
            yield from _of_array(held)


def _of_structure(structure: Any) -> Iterator[_Block]:
    yield _block(ctypes.addressof(structure), ctypes.sizeof(structure), holds_addresses=True)
    for held in gc.get_referents(structure):
        for value in held.values() if isinstance(held, dict) else [held]:
            if isinstance(value, bytes):
                yield _block(ctypes.cast(value, ctypes.c_void_p).value or 0, len(value))


def _block(address: int, size: int, *, holds_addresses: bool = False) -> _Block:
    return _Block(address=address, size=size, holds_addresses=holds_addresses)


def _locals_of_callers() -> list[object]:
    """Return what the product's functions that are running hold."""
    found: list[object] = []
    for caller in inspect.stack(context=0):
        if caller.frame.f_globals["__name__"].startswith("outrider."):
            found += caller.frame.f_locals.values()
    return found
