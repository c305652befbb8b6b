"""What does a pass cost whose bits every processor has?

Method: one model in each way of computing, in turn, many rounds: ordinary, deterministic and
portable with what this processor has, and with AVX2 alone. Each with every width of weights
(bfloat16, int8, int4, stored GGUF of 4 bits, stored AWQ), one width after the other, at 1, 8 and 32
rows. Ratios are of the fastest passes, which nothing disturbed; medians stand beside them.

How to read it: `to ordinary` is the price; deterministic passes are to take 1.07 times as long at
most. With AVX2 portable numerics are the ordinary ones.

    python -m benchmarks.models.bench_portable --expand-target 400M --threads 1
    python -m benchmarks.models.bench_portable --weights int4 awq --cpus auto
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import torch

from benchmarks.shared.gguf_files import store_gguf
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
from benchmarks.shared.stored_checkpoints import store_awq
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import Rounding
from outrider.engine.model.read_config import read_model_config
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.cpu.product_library import product_support

ROWS: Final = (1, 8, 32)
CONTEXT: Final = 128
CPUS: Final = ("auto", "avx2")
WEIGHTS: Final = ("bfloat16", "int8", "int4", "gguf", "awq")
ROUNDINGS: Final = {"int8": Rounding(scheme="int8"), "int4": Rounding(scheme="int4")}
_GROUP_SIZES: Final = (128, 64, 32)
"""Of AWQ, the usual one first."""
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


def stored_folder(plain: Path, weights: str, folder: Path) -> str:
    """Return the checkpoint with these weights, which are written where they are stored ones."""
    match weights:
        case "gguf":
            return str(store_gguf(plain, folder / "gguf"))
        case "awq":
            widths = config_widths(plain)
            group_size = next(size for size in _GROUP_SIZES if not any(w % size for w in widths))
            store_awq(plain, folder / "awq", group_size=group_size)
            return str(folder / "awq")
    return str(plain)


def config_widths(folder: Path) -> tuple[int, ...]:
    """Return how many numbers the projections' rows have."""
    config = read_model_config(folder)
    heads = config.num_query_heads * config.head_dim
    return config.hidden_size, config.intermediate_size, heads


def time_passes(folder: str, weights: str, arguments: argparse.Namespace) -> list[PassTime]:
    """Time passes of every kind with one width of weights, round by round."""
    cases: dict[str, Callable[[], float]] = {}
    details: dict[tuple[str, str], str] = {}
    cpus = arguments.cpus
    rounding = ROUNDINGS.get(weights)
    for cpu, way in product(cpus, WAYS):
        with environment(cpu, way):
            model = load_model(folder, rounding=rounding, deterministic=way != "ordinary")
            details[cpu, way] = product_support().detail
        runner = ModelRunner(model=model, num_blocks=64, block_size=16)
        for rows in ROWS:
            cases[f"{cpu}/{weights}/{way}/{rows}"] = pass_of(runner, rows)
    times = measure_in_turn(cases, repeats=arguments.repeats, description=f"passes, {weights}")
    found = []
    for cpu, rows, way in product(cpus, ROWS, WAYS):
        own, first = (times[f"{cpu}/{weights}/{each}/{rows}"] for each in (way, "ordinary"))
        found.append(
            PassTime(
                cpu=cpu,
                weights=weights,
                way=way,
                rows=rows,
                detail=details[cpu, way],
                seconds=Summary.of(own),
                to_ordinary=min(own) / min(first),
            )
        )
    return found


def time_all(arguments: argparse.Namespace) -> list[PassTime]:
    """Time all widths, one after the other: their models would not fit into memory together."""
    plain = grown_large(arguments)
    found: list[PassTime] = []
    for weights in arguments.weights:
        with tempfile.TemporaryDirectory() as folder:
            stored = stored_folder(plain, weights, Path(folder))
            found += time_passes(stored, weights, arguments)
    return found


@torch.inference_mode()
def main() -> None:
    """Measure, show, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--cpus", nargs="+", choices=CPUS, default=CPUS)
    parser.set_defaults(repeats=30)
    arguments = parser.parse_args()
    prepare(arguments)
    choose_threads(arguments, arguments.large)
    times = time_all(arguments)
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
