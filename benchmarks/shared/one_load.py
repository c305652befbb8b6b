"""A process that loads a model and prints what that took: it imports what serves, and no more."""

import json
import sys
import time
from pathlib import Path
from typing import Final

import torch

from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import DECODE, SCHEMES, Rounding

STATUS: Final = Path("/proc/self/status")


def load(folder: str, scheme: str, keep_in: str, num_threads: str) -> None:
    """Load a model in this process and print what that took, as JSON."""
    torch.set_num_threads(int(num_threads))
    torch.zeros(1)
    named = next((each for each in SCHEMES if each == scheme), None)
    rounding = None if named is None else Rounding(scheme=named, keep_in=Path(keep_in))
    way = DECODE if scheme == DECODE else rounding
    before, begin = resident("VmRSS"), time.perf_counter()
    model = load_model(folder, dtype="bfloat16", rounding=way, deterministic=None)
    found = {
        "seconds": time.perf_counter() - begin,
        "weight_bytes": model.weight_bytes,
        "final_bytes": resident("VmRSS") - before,
        "peak_bytes": resident("VmHWM") - before,
    }
    print(json.dumps(found))


def resident(name: str) -> int:
    """Return a size of this process, in bytes."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    load(*sys.argv[1:])
