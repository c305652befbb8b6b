"""Counts the instructions that this thread has carried out.

Processor time grows where other programs share a core's caches and its units; the number of
instructions in user space stays within a percent. Linux counts them (perf_event_open), where the
processor and the kernel's settings let it.
"""

import ctypes
import os
import platform
import struct
from typing import Final

_SYSCALL: Final = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES_SIZE: Final = 64  # PERF_ATTR_SIZE_VER0
_HARDWARE, _INSTRUCTIONS = 0, 1
_EXCLUDE_KERNEL: Final = 1 << 5
_EXCLUDE_HYPERVISOR: Final = 1 << 6


class InstructionCounter:
    """Counts the calling thread's instructions in user space from its making on."""

    def __init__(self) -> None:
        """Raise OSError where they cannot be counted."""
        number = _SYSCALL.get(platform.machine())
        if platform.system() != "Linux" or number is None:
            raise OSError("instructions are counted on Linux only, on x86-64 and aarch64")
        flags = _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        attributes = struct.pack("=IIQ24xQ", _HARDWARE, _ATTRIBUTES_SIZE, _INSTRUCTIONS, flags)
        libc = ctypes.CDLL(None, use_errno=True)
        packed = ctypes.create_string_buffer(attributes, _ATTRIBUTES_SIZE)
        any_cpu, no_group, this_thread = -1, -1, 0
        self._file: int = libc.syscall(number, packed, this_thread, any_cpu, no_group, 0)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "the kernel does not count instructions here")

    def read(self) -> int:
        """Return how many there were so far."""
        return int.from_bytes(os.read(self._file, 8), "little")


def count_instructions() -> InstructionCounter | None:
    """Return a counter; None where there can be none."""
    try:
        return InstructionCounter()
    except OSError:
        return None
