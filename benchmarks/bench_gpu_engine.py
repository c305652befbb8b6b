"""How near to the bandwidth does a whole engine decode, and what does speculation add to it?

Method: Qwen3-8B's shape with random weights and a drafter of Qwen3-0.6B's, bfloat16, batch 1, a
context of 1,024 tokens. The floor of a step is the bytes of the weights that it reads (the table
that tokens are looked up in is not read) at the bandwidth of a device copy of the same run. Passes
go through the runner as in serving, CUDA graphs and staging included, launched one after the other
without waiting; cases in turn. Answers are decoded by the engine, step by step.

Random models agree on nothing, so acceptance is SYNTHETIC in all figures that are labelled so: all
of a step's work is done, and then a made-up path of the tree is accepted, so long that a step emits
the given number of tokens in the mean. They say what speed follows from an acceptance, not which
acceptance there is. The last part has the bundled pair's real one, of its small models on its own
tasks, whose speed says nothing.

Reading it: `of ceiling` is tokens per second over those of plain decoding at the bandwidth.

    python3 -m benchmarks.bench_gpu_engine
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_engine_cases import Answering, Context, draft_levels, make_runner, rate
from benchmarks.gpu_models import (
    QWEN3_06B,
    QWEN3_8B,
    TINY_LARGE,
    TINY_SMALL,
    bytes_per_step,
    random_model,
)
from benchmarks.gpu_pair import pair_acceptance
from benchmarks.gpu_report import Report, chosen_device, gpu_parser, say, show_rows, start
from benchmarks.gpu_timing import Ceilings, measure_ceilings
from benchmarks.record import Summary, paired_ratio
from engine.model.config import ModelConfig
from engine.passes.runner import ModelRunner

PLAIN_GOAL = 0.85
VERIFY_GOAL = 1.15
LEVEL_GOAL = 1.2
LEVEL_EXTRA_S = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that are measured. A dry run is the same program on sizes that mean nothing."""

    large: ModelConfig = QWEN3_8B
    small: ModelConfig = QWEN3_06B
    dtype: torch.dtype = torch.bfloat16
    context: int = 1024
    cache_tokens: int = 16384
    max_rows: int = 128
    verified: tuple[int, ...] = (1, 16, 32, 64)
    width: int = 4
    branching: int = 3
    levels: int = 8
    # Levels of a tree, and means of emitted tokens that such trees may have.
    synthetic: tuple[tuple[int, tuple[float, ...]], ...] = ((4, (2, 3, 4)), (8, (3, 4, 5, 6)))
    passes: int = 20
    steps: int = 40
    warm_up: int = 12  # tokens
    prompts: int = 12
    answer_tokens: int = 96


DRY = Sizes(
    large=TINY_LARGE,
    small=TINY_SMALL,
    dtype=torch.float32,
    context=20,
    cache_tokens=128,
    max_rows=8,
    verified=(1, 4),
    width=2,
    branching=2,
    levels=2,
    synthetic=((2, (2,)),),
    passes=1,
    steps=1,
    warm_up=1,
    prompts=0,
    answer_tokens=4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Both models with their caches."""

    large: ModelRunner
    small: ModelRunner


def load(sizes: Sizes, device: torch.device) -> Models:
    """Random weights, made where they are used; graphs are recorded."""
    runners = [
        make_runner(
            random_model(config, dtype=sizes.dtype, device=device),
            num_tokens=sizes.cache_tokens,
            max_rows=sizes.max_rows,
        )
        for config in (sizes.large, sizes.small)
    ]
    return Models(large=runners[0], small=runners[1])


def verify_steps(
    models: Models, sizes: Sizes, ceilings: Ceilings, report: Report
) -> dict[str, Any]:
    """Passes of the large model with trees of several sizes, in turn."""
    rng = random.Random(report.arguments.seed)
    context = Context.filled(models.large, sizes.context, rng)
    slices = {nodes: context.tree(nodes, rng) for nodes in sizes.verified}
    samples = _in_turn(
        {
            nodes: partial(models.large.forward, [piece])  # as in a step of the engine
            for nodes, piece in slices.items()
        },
        report,
        sizes,
    )
    floor_s = bytes_per_step(sizes.large, sizes.dtype) / ceilings.copy_bytes_per_s
    plain = Summary.of(samples[1])
    largest = max(sizes.verified)
    ratios = {nodes: paired_ratio(samples[nodes], samples[1]).median for nodes in samples}
    report.goal(f"pass of {largest} nodes over a plain pass", ratios[largest], at_most=VERIFY_GOAL)
    show_rows(
        f"passes of {sizes.large.model_id}, floor {floor_s * 1e3:.2f} ms",
        ["nodes", "ms", "over plain", "floor over time"],
        [
            [
                nodes,
                f"{Summary.of(seconds).median * 1e3:.3f}",
                f"{ratios[nodes]:.3f}",
                f"{floor_s / Summary.of(seconds).median:.3f}",
            ]
            for nodes, seconds in samples.items()
        ],
    )
    return {
        "floor_s": floor_s,
        "seconds": {nodes: Summary.of(seconds) for nodes, seconds in samples.items()},
        "over_plain": ratios,
        "plain_share_of_bandwidth": floor_s / plain.median,
    }


def draft_level(models: Models, sizes: Sizes, ceilings: Ceilings, report: Report) -> dict[str, Any]:
    """A level of the tree: the small model's pass and all that is around it."""
    rng = random.Random(report.arguments.seed)
    context = Context.filled(models.small, sizes.context, rng)
    levels = draft_levels(
        context, width=sizes.width, branching=sizes.branching, num_levels=sizes.levels
    )
    one = context.tree(1, rng)
    samples = _in_turn(
        {"levels": levels, "pass of one row": partial(models.small.forward, [one])}, report, sizes
    )
    level = Summary.of([seconds / sizes.levels for seconds in samples["levels"]])
    floor_s = bytes_per_step(sizes.small, sizes.dtype) / ceilings.copy_bytes_per_s
    bound_s = LEVEL_GOAL * floor_s + LEVEL_EXTRA_S
    report.goal(
        f"a draft level over its bound of {bound_s * 1e6:.0f} µs (1.2 x bandwidth time + 20 µs)",
        level.median / bound_s,
        at_most=1.0,
    )
    say(f"a draft level: {level.median * 1e6:.0f} µs; bandwidth time {floor_s * 1e6:.0f} µs")
    return {
        "level_s": level,
        "pass_of_one_row_s": Summary.of(samples["pass of one row"]),
        "floor_s": floor_s,
        "bound_s": bound_s,
        "levels": sizes.levels,
        "width": sizes.width,
        "branching": sizes.branching,
    }


def _in_turn(cases: dict[Any, Any], report: Report, sizes: Sizes) -> dict[Any, list[float]]:
    """Seconds of each case in every round, A B A B; one round before for warmth."""
    device = report.device
    rounds = max(report.arguments.rounds // 3, 3) if device.type == "cuda" else 1
    for work in cases.values():
        rate(work, device=device, count=min(sizes.passes, 3))
    samples: dict[Any, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            samples[name].append(rate(work, device=device, count=sizes.passes))
    return samples


def decode(models: Models, sizes: Sizes, ceilings: Ceilings, report: Report) -> dict[str, Any]:
    """Answers of the engine: plain, and with trees of which so much is accepted."""
    rng = random.Random(report.arguments.seed)
    ceiling = ceilings.copy_bytes_per_s / bytes_per_step(sizes.large, sizes.dtype)  # tokens/s
    rows: list[dict[str, Any]] = []
    for num_levels, means in sizes.synthetic:
        answering = Answering.of(
            models.large,
            models.small,
            num_nodes=max(sizes.verified) - 1,
            num_levels=num_levels,
            width=sizes.width,
        )
        for mean in (None, *means):
            if not report.has_time(f"decoding, {num_levels} levels, {mean} tokens", 3.0):
                continue
            prompt = tuple(rng.randrange(sizes.large.vocab_size) for _ in range(sizes.context))
            speed = answering.speed(
                prompt, mean_tokens=mean, num_steps=sizes.steps, warm_up=sizes.warm_up
            )
            rows.append(
                {
                    "levels": 0 if mean is None else num_levels,
                    "synthetic_mean_tokens": mean,
                    "speed": speed,
                    "of_ceiling": speed.tokens_per_s / ceiling,
                }
            )
    plain = [row for row in rows if row["synthetic_mean_tokens"] is None]
    if plain:
        best = max(row["of_ceiling"] for row in plain)
        report.goal("plain decoding, share of the bandwidth", best, at_least=PLAIN_GOAL)
    show_rows(
        "answers at batch 1; acceptance is SYNTHETIC (see the script's docstring)",
        ["levels, tokens a step", "emitted", "step ms", "tokens/s", "of ceiling"],
        [
            [
                "plain"
                if row["synthetic_mean_tokens"] is None
                else f"{row['levels']}, {row['synthetic_mean_tokens']}",
                f"{row['speed'].tokens_per_step:.2f}",
                f"{row['speed'].step_s * 1e3:.2f}",
                f"{row['speed'].tokens_per_s:.0f}",
                f"{row['of_ceiling']:.2f}",
            ]
            for row in rows
        ],
    )
    return {"ceiling_tokens_per_s": ceiling, "acceptance": "synthetic", "answers": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the time allows and write the results."""
    arguments = gpu_parser(__doc__, budget_s=110.0).parse_args(argv)
    device = chosen_device(arguments)
    sizes = DRY if arguments.dry else Sizes()
    report = Report(script="bench_gpu_engine", arguments=arguments, device=device)
    ceilings = report.section("ceilings", lambda: measure_ceilings(device))
    models = report.part("load", partial(load, sizes, device))
    if ceilings is not None and models is not None:
        for name, section in (
            ("verify", verify_steps),
            ("draft level", draft_level),
            ("decoding", decode),
        ):
            report.section(name, partial(section, models, sizes, ceilings, report), needed_s=5.0)
    report.section(
        "bundled pair",
        partial(
            pair_acceptance,
            device,
            num_prompts=sizes.prompts,
            max_tokens=sizes.answer_tokens,
            seed=arguments.seed,
        ),
        needed_s=15.0,
    )
    return report.finish()


if __name__ == "__main__":
    start(main)
