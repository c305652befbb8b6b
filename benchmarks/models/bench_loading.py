"""How much memory does loading a model take, and how long, in each number of bits?

Method: a process of its own loads the large model and prints the time, what of its memory is
resident afterwards, and the most that ever was, both without what the process had before. A scheme
is loaded twice: the first start rounds and keeps the weights, the second reads what was kept. The
same model with projections that are stored in 4 bits, and in 8, is loaded as it is, and decoded.
Goal: the peak is at most 1.3 times the final size.

    python -m benchmarks.models.bench_loading --expand-target 400M
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shared import one_load
from benchmarks.shared.grown import grown_large
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.stored_checkpoints import store_quantised
from outrider.engine.model.quantised.formats import DECODE, SCHEMES
from outrider.kernels.quantised.weight import Bits

_MOST: Final = 1.3
_STORED_BITS: Final[tuple[Bits, ...]] = (4, 8)
_GROUP: Final = 64


def measure(folder: Path, scheme: str, keep_in: str, num_threads: int) -> dict[str, Any]:
    """Load a model in another process."""
    done = subprocess.run(
        [sys.executable, "-m", one_load.__name__, str(folder), scheme, keep_in, str(num_threads)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"peak_over_final": found["peak_bytes"] / found["final_bytes"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all ways, write the results."""
    parser = argument_parser(__doc__)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    if not one_load.STATUS.is_file():
        raise SystemExit("only Linux tells what a process held at most.")
    folder = grown_large(arguments)
    choose_threads(arguments, folder)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as kept, console.status("loading"):
        found["bfloat16"] = measure(folder, "", kept, arguments.threads)
        for scheme in SCHEMES:
            for turn in ("first start", "later starts"):
                found[f"{scheme}, {turn}"] = measure(folder, scheme, kept, arguments.threads)
        for bits in _STORED_BITS:
            stored = Path(kept) / f"stored-{bits}"
            store_quantised(folder, stored, bits, group_size=_GROUP)
            name = f"stored in {bits} bits"
            found[name] = measure(stored, "", kept, arguments.threads)
            found[f"{name}, decoded"] = measure(stored, DECODE, kept, arguments.threads)
    rows = [
        [
            name,
            f"{each['weight_bytes'] / 1e6:.0f}",
            f"{each['final_bytes'] / 1e6:.0f}",
            f"{each['peak_bytes'] / 1e6:.0f}",
            f"{each['peak_over_final']:.2f}",
            f"{each['seconds']:.1f}",
        ]
        for name, each in found.items()
    ]
    columns = ["", "weights, MB", "resident, MB", "peak, MB", "peak / resident", "seconds"]
    show_table("Loading", columns, rows)
    for name, each in found.items():
        is_met = each["peak_over_final"] <= _MOST
        console.print(f"{name}, at most {_MOST} x: {verdict(is_met)}")
    write_results("bench_loading", variant_name(arguments), {"loads": found}, arguments)


if __name__ == "__main__":
    start(main)
