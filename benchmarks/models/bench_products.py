"""How near do products come to the time that reading their weights takes, and passes likewise?

Method: one weight of a layer, in as many copies as do not fit into any cache; every call takes the
next copy, so its weight comes from memory. In turn, many rounds: torch reads the same bytes (the
faster of a sum and a maximum), then each product at each number of rows. Where other programs run,
the fastest calls are the ones that were not disturbed, so ratios are of the fastest; medians stand
beside them. "stored" products hold weights as quantised checkpoints do, with a scale (float16) for
each group of columns, and multiply them with rows in 8 bits; "stored exact" ones multiply what they
decode to. With --expand-target, whole passes of that
model too: ordinary and deterministic, with the compiled products and attention, and with torch's;
and with weights in 8 and 4 bits.

How to read it: `bandwidth` is the time of reading over that of the product. Up to some 16 rows it
should stay near 1: memory is what takes time. Beyond, arithmetic does.

    python -m benchmarks.models.bench_products --expand-target 400M --threads 2
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shared.grown import grown_large
from benchmarks.shared.harness import (
    argument_parser,
    choose_threads,
    console,
    measure_in_turn,
    prepare,
    show_table,
    start,
    timed,
    write_results,
)
from benchmarks.shared.record import Summary
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.formats import INT4_GROUP_SIZES, SCHEMES, Rounding
from outrider.engine.passes.runner import ForwardSlice, ModelRunner
from outrider.kernels.cpu.grouped_panel_linear import GroupedPanelLinear, Int4PanelLinear
from outrider.kernels.cpu.panel_linear import Int8PanelLinear, PanelLinear
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.cpu.stored_panel_linear import StoredPanelLinear
from outrider.kernels.layers.linear import Linear
from outrider.kernels.quantised.stored_weight import NUMBERS, Number, StoredWeight
from outrider.kernels.quantised.weight import rounded_to_int4, rounded_to_int8
from outrider.kernels.triton_support import KernelChoice, use_kernels

ROWS = (1, 2, 4, 8, 16, 32, 64)
PASS_ROWS = (1, 8, 16, 64, 256)
# Larger than the last-level caches of most processors, in copies of one weight.
COPIES_BYTES = 160 << 20
PASS_CONTEXT = 128
_GROUP = INT4_GROUP_SIZES[0]
# Of a weight and its share of a scale, by the ends of products' names.
BITS = {"bfloat16": 16.0, "int8": 8.0, "int4": 4 + 16 / _GROUP, "float8": 8.0}

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """Seconds of one product, and of reading its bytes over them: the fastest, and medians."""

    product: str
    rows: int
    seconds: Summary
    bandwidth: float
    median_bandwidth: float
    to_one_row: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass of one kind of model, over those of the ordinary bfloat16 one.

    `bandwidth`: the time in which its weights' bytes are read, over the fastest pass.
    """

    model: str
    rows: int
    seconds: Summary
    to_first: float
    bandwidth: float


# ---- products ---------------------------------------------------------------------------------


def calls_in_turn(works: list[Callable[[], object]]) -> Callable[[], float]:
    """Seconds of the next of several works that differ in where their data are."""
    turns: Iterator[Callable[[], object]] = cycle(works)
    return lambda: timed(next(turns))


def products_of(weights: list[Tensor]) -> dict[str, list[Product]]:
    """Every kind of product over the same weights."""
    return {
        "compiled bfloat16": [PanelLinear(weight) for weight in weights],
        "oneDNN bfloat16": [Linear(weight) for weight in weights],
        "F.linear bfloat16": [partial(F.linear, weight=weight) for weight in weights],
        "compiled int8": [Int8PanelLinear(rounded_to_int8(weight)) for weight in weights],
        "compiled int4": [
            Int4PanelLinear(rounded_to_int4(weight, group_size=_GROUP)) for weight in weights
        ],
        **{
            f"stored {number}": [
                GroupedPanelLinear(stored_weight(number, seed, weight.shape))
                for seed, weight in enumerate(weights)
            ]
            for number in NUMBERS
            if number != "float8"
        },
        **{
            f"stored exact {number}": [
                StoredPanelLinear(stored_weight(number, seed, weight.shape))
                for seed, weight in enumerate(weights)
            ]
            for number in NUMBERS
        },
    }


def stored_weight(number: Number, seed: int, shape: torch.Size) -> StoredWeight:
    """A weight whose numbers lie as those of real ones do, in groups of `_GROUP` columns."""
    generator = torch.Generator().manual_seed(seed)
    numbers, bits = torch.randn(shape, generator=generator), NUMBERS[number]
    scales = torch.full((shape[0], shape[1] // _GROUP), 2.0**-7)
    if number == "float8":
        codes = (numbers * 64).to(torch.float8_e4m3fn).view(torch.uint8)
        return StoredWeight(number=number, codes=codes, scales=scales)
    middle = 1 << (bits - 1)
    codes = (numbers * (middle / 4) + middle).round_().clamp_(0, 2 * middle - 1).to(torch.uint8)
    zeros = torch.full_like(scales, middle, dtype=torch.int16)
    return StoredWeight(number=number, codes=codes, scales=scales, zeros=zeros)


def readers(weights: list[Tensor]) -> dict[str, Callable[[], float]]:
    """Readings of as many bytes as the weights have in bfloat16, in int8 and in int4.

    Each begins with another copy: what one has read, the next would find in the cache.
    """
    words = [weight.view(-1).view(torch.float32) for weight in weights]
    works: dict[str, list[Callable[[], object]]] = {}
    for kind, bits in BITS.items():
        parts = [each[: int(each.numel() * bits / 16)] for each in words]
        works[f"read {kind}, sum"] = [each.sum for each in parts]
        works[f"read {kind}, max"] = [each.max for each in parts]
    return {
        name: calls_in_turn(reads[number:] + reads[:number])
        for number, (name, reads) in enumerate(works.items())
    }


def time_products(arguments: argparse.Namespace) -> list[ProductTime]:
    """Time every kind of product at every number of rows, and reading, round by round."""
    out_features, in_features = arguments.shape
    num_copies = max(5, COPIES_BYTES // (2 * out_features * in_features))
    generator = torch.Generator().manual_seed(arguments.seed)
    weights = [
        torch.randn((out_features, in_features), generator=generator).bfloat16()
        for _ in range(num_copies)
    ]
    cases = readers(weights)
    wanted = arguments.only or [""]
    kinds = {
        name: products
        for name, products in products_of(weights).items()
        if any(each in name for each in (*wanted, "compiled bfloat16"))
    }
    for rows in ROWS:
        x = torch.randn((rows, in_features), generator=generator).bfloat16()
        for name, products in kinds.items():
            cases[f"{name}/{rows}"] = calls_in_turn([partial(each, x) for each in products])
    times = measure_in_turn(cases, repeats=arguments.repeats, description="products")
    summaries = {name: Summary.of(samples) for name, samples in times.items()}
    fastest = {name: each.minimum for name, each in summaries.items()}
    medians = {name: each.median for name, each in summaries.items()}
    return [
        ProductTime(
            product=name,
            rows=rows,
            seconds=summaries[f"{name}/{rows}"],
            bandwidth=_reading(fastest, name) / fastest[f"{name}/{rows}"],
            median_bandwidth=_reading(medians, name) / medians[f"{name}/{rows}"],
            to_one_row=fastest[f"{name}/{rows}"] / fastest[f"{name}/1"],
        )
        for name in kinds
        for rows in ROWS
    ]


def _reading(seconds: dict[str, float], product: str) -> float:
    size = f"read {product.rpartition(' ')[2]}"
    return min(value for name, value in seconds.items() if name.startswith(size))


# ---- passes -----------------------------------------------------------------------------------


def pass_of(runner: ModelRunner, choice: KernelChoice, num_rows: int) -> Callable[[], float]:
    """Seconds of a pass over rows that see `PASS_CONTEXT` tokens and each other."""
    view = runner.new_view("bench-products")
    view.reserve(PASS_CONTEXT + num_rows)
    piece = ForwardSlice(
        view=view, token_ids=[5] * num_rows, start_slot=PASS_CONTEXT, num_logit_rows=1
    )

    def run() -> float:
        with use_kernels(choice):
            return timed(partial(runner.forward, [piece]))

    return run


def runners_of(arguments: argparse.Namespace) -> dict[str, tuple[ModelRunner, KernelChoice]]:
    """The same checkpoint with each kind of products and attention, in each mode."""
    folder = str(grown_large(arguments))
    runners: dict[str, tuple[ModelRunner, KernelChoice]] = {}
    for scheme in SCHEMES:
        model = load_model(folder, rounding=Rounding(scheme=scheme), deterministic=None)
        runners[f"compiled, {scheme}"] = (
            ModelRunner(model=model, num_blocks=256, block_size=16),
            "auto",
        )
    choices: dict[str, KernelChoice] = {"compiled": "auto", "torch": "reference"}
    for products, choice in choices.items():
        for deterministic in (False, True):
            with use_kernels(choice):
                model = load_model(folder, dtype="bfloat16", deterministic=deterministic)
            name = f"{products}, {'deterministic' if deterministic else 'ordinary'}"
            runners[name] = ModelRunner(model=model, num_blocks=256, block_size=16), choice
    return runners


def time_passes(arguments: argparse.Namespace, bytes_per_s: float) -> list[PassTime]:
    """Time passes of every kind of model at every number of rows, round by round.

    `bytes_per_s`: what reading reaches.
    """
    runners = runners_of(arguments)
    cases = {
        f"{name}/{rows}": pass_of(runner, choice, rows)
        for rows in PASS_ROWS
        for name, (runner, choice) in runners.items()
    }
    times = measure_in_turn(cases, repeats=max(arguments.repeats // 4, 3), description="passes")
    first = "compiled, ordinary"
    return [
        PassTime(
            model=name,
            rows=rows,
            seconds=Summary.of(times[f"{name}/{rows}"]),
            to_first=min(times[f"{name}/{rows}"]) / min(times[f"{first}/{rows}"]),
            bandwidth=runner.model.weight_bytes / bytes_per_s / min(times[f"{name}/{rows}"]),
        )
        for name, (runner, _) in runners.items()
        for rows in PASS_ROWS
    ]


# ---- for people -------------------------------------------------------------------------------


def reading_rate(times: list[ProductTime], shape: tuple[int, int]) -> float:
    """Bytes a second that reading reached while products were measured."""
    one = next(each for each in times if each.product == "compiled bfloat16" and each.rows == 1)
    return 2 * shape[0] * shape[1] / (one.bandwidth * one.seconds.minimum)


def show_products(times: list[ProductTime]) -> None:
    """Print a row for each product and number of rows."""
    rows = [
        [
            each.product,
            str(each.rows),
            f"{each.seconds.minimum * 1e6:.0f}",
            f"{each.seconds.median * 1e6:.0f}",
            f"{each.bandwidth:.2f}",
            f"{each.median_bandwidth:.2f}",
            f"{each.to_one_row:.2f}",
        ]
        for each in times
    ]
    columns = [
        "product",
        "rows",
        "fastest, us",
        "median, us",
        "bandwidth",
        "of medians",
        "to one row",
    ]
    show_table("Products", columns, rows)


def show_passes(times: list[PassTime]) -> None:
    """Print a row for each model and number of rows."""
    rows = [
        [
            each.model,
            str(each.rows),
            f"{each.seconds.minimum * 1e3:.1f}",
            f"{each.seconds.median * 1e3:.1f}",
            f"{each.to_first:.2f}",
            f"{each.bandwidth:.2f}",
        ]
        for each in times
    ]
    show_table(
        "Passes", ["model", "rows", "fastest, ms", "median, ms", "to ordinary", "bandwidth"], rows
    )


@torch.inference_mode()
def main() -> None:
    """Measure, show, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=(2048, 5632), metavar=("OUT", "IN"))
    parser.add_argument("--only", nargs="+", metavar="WORD", help="products with one in the name")
    parser.set_defaults(repeats=100)
    arguments = parser.parse_args()
    support = product_support()
    if support.library is None:
        raise SystemExit(f"products: {support.detail}. {support.advice}")
    prepare(arguments)
    choose_threads(arguments, arguments.large)
    results: dict[str, Any] = {"compiled_for": support.instruction_set.name}
    console.print(f"products: {support.detail}; {torch.get_num_threads()} threads")
    products = time_products(arguments)
    show_products(products)
    results["products"] = [asdict(each) for each in products]
    if arguments.expand_target:
        passes = time_passes(arguments, reading_rate(products, arguments.shape))
        show_passes(passes)
        results["passes"] = [asdict(each) for each in passes]
    variant = arguments.variant or f"{torch.get_num_threads()}-threads"
    write_results("bench_products", variant, results, arguments)


if __name__ == "__main__":
    start(main)
