"""What does a pass cost whose bits every processor has?

Method: one model in each way of computing, in turn, many rounds: ordinary, deterministic and
portable with what this processor has, and with AVX2 alone. Each in bfloat16 and in 8 bits, at 1, 8
and 32 rows. Ratios are of the fastest passes, which nothing disturbed; medians stand beside them.

How to read it: `to ordinary` is the price. With AVX2 portable numerics are the ordinary ones.

    python -m benchmarks.models.bench_portable --expand-target 400M --threads 1
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Final

import torch

from benchmarks.shared.grown import grown_large
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    measure_in_turn,
    prepare,
    show_table,
    start,
    timed,
    write_results,
)
from benchmarks.shared.record import Summary
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.cpu.product_library import product_support

ROWS: Final = (1, 8, 32)
CONTEXT: Final = 128
CPUS: Final = ("auto", "avx2")
WAYS: Final = ("ordinary", "deterministic", "portable")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass, and the fastest over the fastest ordinary one of the same processor."""

    cpu: str
    weights: str
    way: str
    rows: int
    detail: str
    seconds: Summary
    to_ordinary: float


@contextmanager
def environment(cpu: str, way: str) -> Iterator[None]:
    """Have models that are loaded meanwhile compute so."""
    wanted = {"OUTRIDER_CPU": cpu, "OUTRIDER_NUMERICS": way}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    product_support.cache_clear()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        product_support.cache_clear()


def pass_of(runner: ModelRunner, num_rows: int) -> Callable[[], float]:
    """Seconds of a pass over rows that see `CONTEXT` tokens and each other."""
    view = runner.new_view("bench-portable")
    view.reserve(CONTEXT + num_rows)
    piece = ForwardSlice(
        view=view, token_ids=[5] * num_rows, start_slot=CONTEXT, num_logit_rows=num_rows
    )
    return partial(timed, partial(runner.forward, [piece]))


def time_passes(arguments: argparse.Namespace) -> list[PassTime]:
    """Time passes of every kind, round by round."""
    folder = str(grown_large(arguments))
    cases: dict[str, Callable[[], float]] = {}
    details: dict[tuple[str, str, str], str] = {}
    for cpu, weights, way in product(CPUS, ("bfloat16", "int8"), WAYS):
        rounding = Rounding(scheme="int8") if weights == "int8" else None
        with environment(cpu, way):
            is_fixed = way != "ordinary"
            model = load_model(folder, rounding=rounding, deterministic=is_fixed)
            details[cpu, weights, way] = product_support().detail
        runner = ModelRunner(model=model, num_blocks=64, block_size=16)
        for rows in ROWS:
            cases[f"{cpu}/{weights}/{way}/{rows}"] = pass_of(runner, rows)
    times = measure_in_turn(cases, repeats=arguments.repeats, description="passes")
    found = []
    for cpu, weights, rows, way in product(CPUS, ("bfloat16", "int8"), ROWS, WAYS):
        own, first = (times[f"{cpu}/{weights}/{each}/{rows}"] for each in (way, "ordinary"))
        found.append(
            PassTime(
                cpu=cpu,
                weights=weights,
                way=way,
                rows=rows,
                detail=details[cpu, weights, way],
                seconds=Summary.of(own),
                to_ordinary=min(own) / min(first),
            )
        )
    return found


@torch.inference_mode()
def main() -> None:
    """Measure, show, write."""
    parser = argument_parser(__doc__)
    parser.set_defaults(repeats=30)
    arguments = parser.parse_args()
    prepare(arguments)
    choose_threads(arguments, arguments.large)
    times = time_passes(arguments)
    rows = [
        [
            *(each.cpu, each.weights, str(each.rows), each.way),
            f"{each.seconds.minimum * 1e3:.1f}",
            f"{each.seconds.median * 1e3:.1f}",
            f"{each.to_ordinary:.2f}",
        ]
        for each in times
    ]
    columns = ["cpu", "weights", "rows", "way", "fastest, ms", "median, ms", "to ordinary"]
    show_table("Passes", columns, rows)
    variant = arguments.variant or f"{torch.get_num_threads()}-threads"
    write_results(
        "bench_portable", variant, {"passes": [asdict(each) for each in times]}, arguments
    )


if __name__ == "__main__":
    start(main)
