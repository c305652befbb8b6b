"""How near to the memory's bandwidth are the products of a mixture of experts on the CPU?

Question: a row of a mixture reads the weights of its chosen experts and little else, so a pass of
one row can be no faster than memory delivers them. Which share of that does the engine reach, and
what do more rows cost, which wake more experts?

Method: one layer's experts (kernels/experts/expert_mlp.py) with the shapes of Mixtral 8x7B and of
Qwen3 30B-A3B, as many as fit into --gib. Which experts a row goes to is drawn so that all are read
before one is read again: more bytes than any cache holds. Before every call as many bytes as it
will read are read from a buffer of 1 GiB in huge pages, with a sum and the same threads: both
sides meet the same moments of the machine. The router is not timed.

Reading it: `bytes` are the weights of the experts that the rows chose, each once. `share` is the
time of the sum over the time of the experts, the median of pairs; 1 is the bandwidth of reading.
`x 1 row` is the time over that of one row: what a tree of so many nodes costs this layer.

    python -m benchmarks.models.bench_experts --dtype bfloat16
    python -m benchmarks.models.bench_experts --dtype float32 --threads 1
    python -m benchmarks.models.bench_experts --dtype int8
"""

import argparse
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.shared.harness import (
    Summary,
    console,
    milliseconds,
    paired_ratio,
    progress_bar,
    show_table,
    start,
    timed,
    verdict,
    write_results,
)
from benchmarks.shared.record import RESULTS
from outrider.gateway.wiring.engine import default_num_threads
from outrider.kernels.cpu.huge_pages import HugePageMemory
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.experts.expert_mlp import ExpertMlp, ExpertWeights
from outrider.kernels.experts.route import Routed
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int4, rounded_to_int8

_GOAL_SHARE: Final = 0.7
_BUFFER_BYTES: Final = 1 << 30
_GROUP: Final = 64  # of int4
# What weights are held in, and how they come from float32; rows are float32 or bfloat16.
_HELD: Final[dict[str, Callable[[Tensor], Tensor | QuantisedWeight]]] = {
    "float32": lambda weight: weight.clone(),
    "bfloat16": lambda weight: weight.bfloat16(),
    "int8": rounded_to_int8,
    "int4": lambda weight: rounded_to_int4(weight, group_size=_GROUP),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer's experts."""

    width: int
    inner: int
    num_experts: int
    num_chosen: int

    def expert_bytes(self, dtype: str) -> int:
        """Return the bytes of an expert's three matrices, without the scales of int8."""
        bits = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4 + 16 / _GROUP}[dtype]
        return int(3 * self.width * self.inner * bits / 8)


SHAPES: Final = {
    "Mixtral 8x7B": Shape(width=4096, inner=14336, num_experts=8, num_chosen=2),
    "Qwen3 30B-A3B": Shape(width=2048, inner=768, num_experts=128, num_chosen=8),
}


# ---- the two sides ------------------------------------------------------------------------------


def make_experts(shape: Shape, count: int, dtype: str, seed: int) -> ExpertMlp:
    """Return `count` experts of random weights: the same numbers, each in memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(2 * shape.inner, shape.width, generator=generator).mul_(0.02)
    down = torch.randn(shape.width, shape.inner, generator=generator).mul_(0.02)
    held = _HELD[dtype]
    first = ExpertWeights(gate_up=held(gate_up), down=held(down))
    # Panels are copies; what is not packed must not be one tensor for all.
    each = (copy.deepcopy(first) for _ in range(count))
    return ExpertMlp(each)


def choices(count: int, shape: Shape, num_rows: int, seed: int) -> Iterator[Routed]:
    """Yield experts of n rows, all in turn; each row's are different."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.full((num_rows, shape.num_chosen), 1 / shape.num_chosen)
    waiting: list[int] = []
    while True:
        rows: list[list[int]] = []
        for _ in range(num_rows):
            if len(waiting) < shape.num_chosen:
                waiting = torch.randperm(count, generator=generator).tolist()
            rows.append(waiting[: shape.num_chosen])
            waiting = waiting[shape.num_chosen :]
        yield Routed(experts=torch.tensor(rows), weights=weights)


def trees(count: int, shape: Shape, num_rows: int, seed: int) -> Iterator[Routed]:
    """Yield experts of n rows, each row's drawn by itself, so that rows may share some."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.full((num_rows, shape.num_chosen), 1 / shape.num_chosen)
    while True:
        drawn = torch.rand(num_rows, count, generator=generator)
        yield Routed(experts=drawn.topk(shape.num_chosen).indices, weights=weights)


class Reader:
    """Reads bytes of a large buffer, further on every time."""

    def __init__(self) -> None:
        self._words = HugePageMemory().take(_BUFFER_BYTES).view(torch.float32).fill_(1.0)
        self._place = 0

    def read(self, num_bytes: int) -> Tensor:
        """Return the sum of so many bytes, at most the whole buffer's."""
        count = min(num_bytes // 4, len(self._words))
        if self._place + count > len(self._words):
            self._place = 0
        piece = self._words[self._place : self._place + count]
        self._place += count
        return piece.sum()


# ---- figures ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds of calls, and of reading as many bytes before each of them."""

    num_bytes: list[int]
    experts_s: list[float]
    read_s: list[float]


@torch.inference_mode()
def measure(
    mlp: ExpertMlp, routes: Iterator[Routed], x: Tensor, reader: Reader, expert_bytes: int, num: int
) -> Samples:
    """Time `num` calls after two that warm up."""
    samples = Samples(num_bytes=[], experts_s=[], read_s=[])
    for turn in range(num + 2):
        routed = next(routes)
        num_bytes = len(set(routed.experts.reshape(-1).tolist())) * expert_bytes
        read_bytes = min(num_bytes, _BUFFER_BYTES)
        read_s = timed(lambda: reader.read(read_bytes)) * (num_bytes / read_bytes)  # noqa: B023
        experts_s = timed(lambda: mlp(x, routed))  # noqa: B023
        if turn >= 2:
            samples.num_bytes.append(num_bytes)
            samples.experts_s.append(experts_s)
            samples.read_s.append(read_s)
    return samples


def report(samples: Samples, one_row_s: float | None) -> dict[str, Any]:
    """Return the figures of one number of rows; `one_row_s`: median of one row's."""
    experts = Summary.of(samples.experts_s)
    mean_bytes = sum(samples.num_bytes) / len(samples.num_bytes)
    return {
        "mean_bytes": mean_bytes,
        "experts_s": experts,
        "read_s": Summary.of(samples.read_s),
        "experts_bytes_per_s": mean_bytes / experts.median,
        "share": paired_ratio(samples.read_s, samples.experts_s),
        "share_of_shortest": min(samples.read_s) / min(samples.experts_s),
        "over_one_row": experts.median / (one_row_s or experts.median),
    }


def measure_shape(
    name: str, shape: Shape, reader: Reader, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Measure all numbers of rows on one shape."""
    dtype = arguments.dtype
    row_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    expert_bytes = shape.expert_bytes(dtype)
    count = max(min(shape.num_experts, int(arguments.gib * 2**30 / expert_bytes)), 2)
    count -= count % shape.num_chosen
    with console.status(f"packing {count} experts of {name}"):
        mlp = make_experts(shape, count, dtype, arguments.seed)
    reports: dict[int, dict[str, Any]] = {}
    one_row_s: float | None = None
    with progress_bar(name, len(arguments.rows)) as advance:
        for num_rows in arguments.rows:
            x = torch.randn(
                num_rows, shape.width, generator=torch.Generator().manual_seed(num_rows)
            )
            draw = choices if num_rows == 1 else trees
            routes = draw(count, shape, num_rows, arguments.seed)
            samples = measure(mlp, routes, x.to(row_dtype), reader, expert_bytes, arguments.calls)
            reports[num_rows] = report(samples, one_row_s)
            if num_rows == 1:
                one_row_s = reports[1]["experts_s"].median
            advance(f"{num_rows} rows")
    show(f"{name}, {count} experts, {shape.num_chosen} a row", reports)
    return {
        "width": shape.width,
        "inner": shape.inner,
        "num_experts": count,
        "num_chosen": shape.num_chosen,
        "expert_bytes": expert_bytes,
        "rows": reports,
    }


def show(title: str, reports: dict[int, dict[str, Any]]) -> None:
    """Print the table of a shape, and whether one row meets the goal."""
    rows = [
        [
            str(num_rows),
            f"{figures['mean_bytes'] / 1e6:.0f} MB",
            milliseconds(figures["experts_s"].median),
            f"{figures['experts_bytes_per_s'] / 1e9:.1f}",
            f"{figures['share'].median:.2f}",
            f"{figures['share_of_shortest']:.2f}",
            f"{figures['over_one_row']:.2f}",
        ]
        for num_rows, figures in reports.items()
    ]
    columns = ["rows", "bytes", "ms", "GB/s", "share", "share of shortest", "x 1 row"]
    show_table(title, columns, rows)
    if 1 in reports:
        share = reports[1]["share"].median
        console.print(f"at least {_GOAL_SHARE} at one row: {verdict(share >= _GOAL_SHARE)}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", choices=list(_HELD), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 16])
    parser.add_argument("--calls", type=int, default=60, help="timed, for each number of rows")
    parser.add_argument("--gib", type=float, default=3.0, help="memory for a shape's experts")
    parser.add_argument("--threads", type=int, help="torch's threads; default: as in serving")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", help="name of the results file's second part")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all shapes and write the results."""
    arguments = _parse(argv)
    arguments.load_before = os.getloadavg()[0]
    if arguments.threads is None:
        arguments.threads = default_num_threads(int(arguments.gib * 2**30))
    torch.set_num_threads(arguments.threads)
    console.print(f"products: {product_support().detail}; {arguments.threads} threads")
    reader = Reader()
    results = {
        "products": product_support().detail,
        "shapes": {
            name: measure_shape(name, SHAPES[name], reader, arguments) for name in arguments.shapes
        },
    }
    variant = arguments.variant or f"{arguments.dtype}-{arguments.threads}-threads"
    write_results("bench_experts", variant, results, arguments)


if __name__ == "__main__":
    start(main)
