"""Name the processor, which decides how fast passes are and what bits they give."""

import contextlib
import platform
from pathlib import Path
from typing import Final

_CPU_INFO: Final = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Return the processor's model as the system names it."""
    model = ""
    with contextlib.suppress(OSError):
        lines = _CPU_INFO.read_text().splitlines()
        model = next((line for line in lines if line.startswith("model name")), "")
    return model or platform.processor()
