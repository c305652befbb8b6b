"""How near to the memory's bandwidth is attention over a paged cache, and what does a tree cost?

Method: the heads of Qwen3-8B (32 over 8, 128 wide) in bfloat16, blocks of 16 slots scattered over
a cache of several gigabytes. A case is a batch of sequences with so much context, and as many nodes
of a random tree each; one node is plain decoding. Bytes are those that must move once: the
context's keys and values, the query and the output. They are compared with the bandwidth of a
device copy (read and written bytes) of the same run. Cases of a group are replayed in turn as CUDA
graphs, with inputs that the L2 cache cannot hold; plans are made before: a pass makes one for all
layers.

Reading it: `share` is bytes / time / copy bandwidth. Cases are memory-bound, compute-bound (their
products take longer at the measured matmul rate than their bytes at the measured bandwidth) or
short (a floor below 20 µs, where launches count); the goal of 0.8 is for the memory-bound ones. The
comparisons give torch's functions what they cannot do themselves: keys and values gathered into one
tensor before the clock starts (`gathered`), or within it (`with gather`).

    python3 -m benchmarks.gpu.bench_paged_attention
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.gpu_attention_cases import Cache, Problem, Shape
from benchmarks.gpu.gpu_attention_peers import against_flex, against_sdpa, show_comparison
from benchmarks.gpu.gpu_report import (
    Report,
    chosen_device,
    gpu_parser,
    microseconds,
    show_rows,
    start,
)
from benchmarks.gpu.gpu_timing import (
    Ceilings,
    largest_difference,
    measure,
    measure_ceilings,
    poison,
    ratio_of,
)
from benchmarks.shared.record import Summary

# Below this, launches are a fair part of the time and the bandwidth says little.
SHORT_S = 20e-6
SHARE_GOAL = 0.8
RATIO_GOALS = {16: 1.3, 64: 2.5}
RATIO_CONTEXT = 8192
TOLERANCE = 2e-2  # of bfloat16 attention, of the largest output

_CACHE_BYTES = 10 << 30


# ---- sections -----------------------------------------------------------------------------------


def check(cache: Cache, problems: Sequence[Problem], *, tolerance: float) -> dict[str, float]:
    """Compare with torch's attention in float32, with poisoned memory; raises where it is off."""
    found = {}
    for problem in problems:
        inputs = cache.inputs(problem)[0]
        poison(cache.device)
        output = cache.attend(inputs)
        keys, values = cache.gather(inputs)
        mask = cache.mask(inputs)
        expected = F.scaled_dot_product_attention(
            cache.pack(inputs.query, problem.batch).float(),
            keys.float(),
            values.float(),
            attn_mask=None
            if mask is None
            else mask.repeat_interleave(cache.group_size, 1)[:, None],
            scale=cache.shape.head_dim**-0.5,
        )
        found[problem.name] = largest_difference(cache.pack(output, problem.batch), expected)
        if not found[problem.name] <= tolerance:
            raise AssertionError(f"{problem.name}: off by {found[problem.name]:.3g}")
    return found


def describe(
    problem: Problem, shape: Shape, seconds: Sequence[float], ceilings: Ceilings
) -> dict[str, Any]:
    """Figures of one case."""
    num_bytes, num_flops = problem.num_bytes(shape), problem.num_flops(shape)
    time = Summary.of(seconds)
    floor_s = num_bytes / ceilings.copy_bytes_per_s
    is_memory_bound = ceilings.is_memory_bound(num_bytes, num_flops)
    kind = "compute" if not is_memory_bound else "short" if floor_s < SHORT_S else "memory"
    return {
        "batch": problem.batch,
        "context": problem.context,
        "nodes": problem.nodes,
        "seconds": time,
        "bytes": num_bytes,
        "flops": num_flops,
        "bound": kind,
        "share_of_bandwidth": floor_s / time.median,
        "share_of_matmul": num_flops / ceilings.matmul_flops_per_s / time.median,
    }


def run_group(
    cache: Cache, problems: Sequence[Problem], ceilings: Ceilings, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Problems measured in turn: figures of each, and the samples for ratios."""
    samples = measure(
        {problem.name: cache.calls(problem) for problem in problems},
        device=cache.device,
        rounds=rounds,
    )
    figures = [
        describe(problem, cache.shape, samples[problem.name], ceilings) for problem in problems
    ]
    return figures, samples


def show_figures(title: str, figures: Sequence[dict[str, Any]]) -> None:
    """The table of a group."""
    show_rows(
        title,
        ["batch, context, nodes", "µs", "p99", "share", "of matmul", "bound"],
        [
            [
                f"{one['batch']}, {one['context']}, {one['nodes']}",
                microseconds(one["seconds"].median),
                microseconds(one["seconds"].p99),
                f"{one['share_of_bandwidth']:.2f}",
                f"{one['share_of_matmul']:.2f}",
                one["bound"],
            ]
            for one in figures
        ],
    )


def tree_ratios(cache: Cache, batch: int, context: int, ceilings: Ceilings, report: Report) -> Any:
    """Return what trees of 16 and 64 nodes cost, in plain decoding steps."""
    problems = [
        Problem(batch=batch, context=context, nodes=nodes) for nodes in (1, *RATIO_GOALS, 128)
    ]
    figures, samples = run_group(cache, problems, ceilings, report.arguments.rounds)
    ratios = {
        problem.nodes: ratio_of(samples, problem.name, problems[0].name) for problem in problems[1:]
    }
    for nodes, bound in RATIO_GOALS.items():
        name = f"tree of {nodes} over one node, context {context}, batch {batch}"
        report.goal(name, ratios[nodes], at_most=bound)
    show_figures(f"trees at context {context}", figures)
    return {"figures": figures, "over_one_node": ratios}


# ---- the run ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that are measured. A dry run is the same program on sizes that mean nothing."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    contexts: tuple[int, ...] = (8192, 1024, 32768, 2048, 4096, 16384)  # the telling ones first
    nodes: tuple[int, ...] = (1, 16, 64, 128)
    ratio_context: int = RATIO_CONTEXT
    compared: tuple[tuple[int, int, int], ...] = (
        (1, 8192, 1),
        (1, 8192, 16),
        (1, 8192, 64),
        (8, 8192, 1),
        (8, 8192, 64),
        (32, 1024, 1),
        (32, 1024, 16),
    )
    flexed: tuple[tuple[int, int, int], ...] = ((1, 8192, 64), (1, 8192, 1), (8, 8192, 64))
    shapes: tuple[Shape, ...] = (
        Shape(kv_dtype=torch.float8_e4m3fn),
        Shape(head_dim=64),
        Shape(head_dim=256, num_query_heads=16, num_kv_heads=4),
    )
    cache_bytes: int = _CACHE_BYTES


DRY = Sizes(
    batches=(1, 2),
    contexts=(48,),
    nodes=(1, 5),
    ratio_context=40,
    compared=((1, 40, 3),),
    flexed=(),
    shapes=(Shape(num_query_heads=4, num_kv_heads=2, head_dim=16, kv_dtype=torch.float8_e4m3fn),),
    cache_bytes=1 << 18,
)


def run(report: Report, sizes: Sizes, shape: Shape) -> None:
    """All sections, the ones with goals first."""
    device, rounds = report.device, report.arguments.rounds
    ceilings = report.section("ceilings", lambda: measure_ceilings(device))
    if ceilings is None:
        return
    cache = Cache(shape, num_bytes=sizes.cache_bytes, device=device, seed=report.arguments.seed)
    checked = [
        Problem(batch=batch, context=min(sizes.contexts), nodes=nodes)
        for batch in sizes.batches[:2]
        for nodes in sizes.nodes
    ]
    report.section("largest error", lambda: check(cache, checked, tolerance=TOLERANCE))
    for batch in (1, 8) if 8 in sizes.batches else (1,):
        report.section(
            f"tree ratios, batch {batch}",
            partial(tree_ratios, cache, batch, sizes.ratio_context, ceilings, report),
        )
    for context in sizes.contexts:
        report.section(
            f"grid, context {context}",
            partial(_grid, cache, context, sizes, ceilings, report),
            needed_s=5.0,
        )
    _bandwidth_goal(report)
    compared = [Problem(batch=b, context=c, nodes=n) for b, c, n in sizes.compared]
    found = report.section(
        "scaled_dot_product_attention", lambda: against_sdpa(cache, compared, rounds), needed_s=5.0
    )
    if found:
        show_comparison("scaled_dot_product_attention", found)
    for other in sizes.shapes:
        name = f"{other.num_query_heads}/{other.num_kv_heads} heads of {other.head_dim}"
        name += "" if other.kv_dtype is None else f", {str(other.kv_dtype).removeprefix('torch.')}"
        report.section(name, partial(_other_shape, other, sizes, ceilings, report), needed_s=8.0)
    for b, c, n in sizes.flexed:
        problem = Problem(batch=b, context=c, nodes=n)
        found = report.section(
            f"flex_attention, {problem.name}",
            partial(against_flex, cache, problem, rounds),
            needed_s=25.0,  # it is compiled
        )
        if found:
            show_comparison("flex_attention", [found])


def _grid(
    cache: Cache, context: int, sizes: Sizes, ceilings: Ceilings, report: Report
) -> list[dict[str, Any]]:
    """All batches and trees at one context."""
    figures: list[dict[str, Any]] = []
    for batch in sizes.batches:
        problems = [Problem(batch=batch, context=context, nodes=nodes) for nodes in sizes.nodes]
        if not report.has_time(f"context {context}, batch {batch}", 1.0):
            continue
        figures += run_group(cache, problems, ceilings, max(report.arguments.rounds // 2, 1))[0]
    show_figures(f"context {context}", figures)
    return figures


def _other_shape(
    shape: Shape, sizes: Sizes, ceilings: Ceilings, report: Report
) -> list[dict[str, Any]]:
    """Another head size or a quantised cache: checked, then one node and a tree."""
    cache = Cache(
        shape, num_bytes=sizes.cache_bytes // 4, device=report.device, seed=report.arguments.seed
    )
    context = sizes.ratio_context
    problems = [Problem(batch=8, context=context, nodes=nodes) for nodes in sizes.nodes[:3]]
    if report.arguments.dry:
        problems = [Problem(batch=1, context=context, nodes=2)]
    check(cache, problems[:2], tolerance=2 * TOLERANCE)
    figures, _ = run_group(cache, problems, ceilings, report.arguments.rounds)
    show_figures(f"heads of {shape.head_dim}, cache {shape.kv_dtype or shape.dtype}", figures)
    return figures


def _bandwidth_goal(report: Report) -> None:
    """The worst memory-bound case of the grid against its goal."""
    figures = [
        one
        for name, section in report.results.items()
        if name.startswith("grid")
        for one in section
        if one["bound"] == "memory"
    ]
    if figures:
        worst = min(figures, key=lambda one: float(one["share_of_bandwidth"]))
        where = f"batch {worst['batch']}, context {worst['context']}, nodes {worst['nodes']}"
        report.goal(
            f"least share of the bandwidth of {len(figures)} memory-bound cases ({where})",
            worst["share_of_bandwidth"],
            at_least=SHARE_GOAL,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the time allows and write the results."""
    arguments = gpu_parser(__doc__, budget_s=100.0).parse_args(argv)
    device = chosen_device(arguments)
    report = Report(script="bench_paged_attention", arguments=arguments, device=device)
    is_tiny = arguments.dry
    shape = Shape(num_query_heads=4, num_kv_heads=2, head_dim=16) if is_tiny else Shape()
    run(report, DRY if is_tiny else Sizes(), shape)
    return report.finish()


if __name__ == "__main__":
    start(main)
