"""Counts the bytecodes that Python carries out for this thread.

They are the same wherever the same is done, also where a machine is busy or its processor does not
count instructions. What compiled code does is not in them.
"""

import sys
from types import FrameType
from typing import Any


class BytecodeCounter:
    """Counts between `enable` and `disable`, as cProfile's profiler is switched."""

    def __init__(self) -> None:
        self.total = 0

    def enable(self) -> None:
        """Begin to count what functions called from now on do."""
        sys.settrace(self._enter)

    def disable(self) -> None:
        """Count no further."""
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._count

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.total += event == "opcode"
        return self._count
