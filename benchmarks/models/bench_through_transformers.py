"""How much slower is a model through transformers' modules than through our own decoder?

Question: a family without a description in the engine runs through transformers' own modules, over
our paged cache (engine/model/transformers_decoder.py). What does that cost a pass, and does
speculation gain as much there?

Method: one checkpoint of a family that runs both ways is loaded twice: natively, and through
transformers. Each is the target of an engine of its own, with the same small model drafting for
both, and a budget from its own pass times. Batch 1, greedy, prompt by prompt: every case answers a
prompt before the next one is asked (benchmarks/shared/turns.py).

Reading it: `time` is the seconds a token over those of the native decoder, plain against plain and
drafted against drafted: 1.2 is a fifth slower. `gain` is the rate with guesses over the same
decoder's rate without. Ratios have the prompts' time in them; 95 % intervals are a bootstrap over
prompts. `equal` compares with the native decoder's plain answers; where they part, the gap between
the two tokens' logits says whether it was a tie (benchmarks/shared/compare.py).

With one thread, ratios of processor time are given as well (`cpu`): what other programs take from
the machine is not in it, so on a busy machine `--threads 1` and these say most. The budgets learn
wrong pass times there, and choose trees by them; with `--no-budget` the trees are alike.

    python -m benchmarks.models.bench_through_transformers --dtype bfloat16 --expand-target 400M
    python -m benchmarks.models.bench_through_transformers --dtype float32 --expand-target 400M
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.shared.compare import Comparison
from benchmarks.shared.driving import (
    BLOCK_SIZE,
    Bench,
    add_draft_options,
    build_bench,
    make_requests,
)
from benchmarks.shared.harness import (
    argument_parser,
    console,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.intervals import Interval, bootstrap, ratio_of_rates
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.step_timer import ForwardCpu
from benchmarks.shared.turns import Case, Turn, Turns, engine_case
from outrider.draft.budget.budget import TreeBudget
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.transformers_decoder import TransformersModel
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.step_times import follow_step_times
from outrider.engine.request import EngineRequest

NATIVE, THROUGH = "native", "through transformers"
PLAIN, DRAFTED = "plain", "drafted"
_GOAL_TIME: Final = 1.5
_GOAL_GAIN: Final = 0.9
_SHOWN_RATIOS: Final = (
    *("time_over_native", "cpu_time_over_native"),
    *("gain", "cpu_gain"),
)
_SHOWN_ROWS: Final = (1, 2, 4, 8, 16, 32)


def name_of(side: str, kind: str) -> str:
    """Return a case's name, such as "native, plain"."""
    return f"{side}, {kind}"


# ---- the two sides ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """An engine over one form of the target; `budget`: of its trees, from its own pass times."""

    bench: Bench
    budget: TreeBudget


def build_sides(pair: Pair, *, with_budget: bool) -> dict[str, Side]:
    """Build both engines; one small model drafts for both, and its times are one curve."""
    native = Side(bench=pair.bench(with_budget=with_budget), budget=pair.budget)
    target = through_transformers(pair)
    with console.status("profiling step times through transformers"):
        budget = TreeBudget(
            target_pass_s=follow_step_times(target), draft_pass_s=pair.budget.draft_pass_s
        )
    forward_cpu = ForwardCpu()
    forward_cpu.put_around(target)
    bench = build_bench(
        {"large": target, "small": pair.runners["small"]},
        draft_config=pair.config,
        budget=budget if with_budget else None,
        forward_cpu=forward_cpu,
    )
    return {NATIVE: native, THROUGH: Side(bench=bench, budget=budget)}


def through_transformers(pair: Pair) -> ModelRunner:
    """Load the pair's large checkpoint again, through transformers' modules."""
    native = pair.runners["large"]
    with console.status("loading through transformers"):
        model = TransformersModel.load(
            pair.large_folder,
            config=read_model_config(pair.large_folder),
            dtype=native.model.dtype,
            device=native.model.device,
        )
    return ModelRunner(model=model, num_blocks=native.num_blocks, block_size=BLOCK_SIZE)


def request_for(
    question: int,
    *,
    pair: Pair,
    prompts: Sequence[Prompt],
    max_tokens: int,
    speculate: bool,
) -> EngineRequest:
    """Return the request of a question's prompt."""
    (request,) = make_requests(
        [prompts[question]],
        tier="large",
        max_tokens=max_tokens,
        stop=pair.stop,
        speculate=speculate,
    )
    return request


# ---- figures ------------------------------------------------------------------------------------


def measure(
    pair: Pair,
    sides: Mapping[str, Side],
    prompts: Sequence[Prompt],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Answer all prompts by all cases, and report."""
    request = partial(request_for, pair=pair, prompts=prompts, max_tokens=arguments.max_new)
    cases: dict[str, Case] = {
        name_of(label, kind): engine_case(side.bench, partial(request, speculate=kind == DRAFTED))
        for label, side in sides.items()
        for kind in (PLAIN, DRAFTED)
    }
    turns = Turns.take(cases, num_questions=len(prompts), num_rounds=arguments.repeats)
    base = name_of(NATIVE, PLAIN)
    comparisons = {
        name: turns.compare(name, base, prompts, scores_of=lambda _: pair.next_logits)
        for name in cases
        if name != base
    }
    reports = {name: turns.report(name) for name in cases}
    for kind in (PLAIN, DRAFTED):
        name, other = name_of(THROUGH, kind), name_of(NATIVE, kind)
        reports[name]["time_over_native"] = turns.ratio(other, name)
        reports[name]["decode_time_over_native"] = turns.ratio(other, name, decode=True)
        reports[name]["cpu_time_over_native"] = cpu_ratio(turns, other, name)
    for side in sides:
        name = name_of(side, DRAFTED)
        reports[name]["gain"] = turns.ratio(name, name_of(side, PLAIN))
        reports[name]["decode_gain"] = turns.ratio(name, name_of(side, PLAIN), decode=True)
        reports[name]["cpu_gain"] = cpu_ratio(turns, name, name_of(side, PLAIN))
    gains = gain_ratio(turns)
    cpu_gains = gain_ratio(turns, seconds_of=_thread_s) if torch.get_num_threads() == 1 else None
    show(reports, comparisons, gains if cpu_gains is None else cpu_gains)
    return {
        "num_prompts": len(prompts),
        "num_prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        "cases": reports,
        "gain_over_native_gain": gains,
        "cpu_gain_over_native_gain": cpu_gains,
        "equality": {name: comparison.record() for name, comparison in comparisons.items()},
    }


def gain_ratio(
    turns: Turns, *, seconds_of: Callable[[Turn], float] = lambda turn: turn.wall_s
) -> Interval:
    """Return speculation's gain through transformers over its gain on the native decoder."""
    columns = {
        (side, kind): _columns(turns, name_of(side, kind), seconds_of)
        for side in (NATIVE, THROUGH)
        for kind in (PLAIN, DRAFTED)
    }

    def ratio(questions: NDArray[np.int64]) -> float:
        rates = {
            case: tokens[questions].sum() / seconds[questions].sum()
            for case, (tokens, seconds) in columns.items()
        }
        gains = [rates[side, DRAFTED] / rates[side, PLAIN] for side in (THROUGH, NATIVE)]
        return float(gains[0] / gains[1])

    return bootstrap(ratio, len(turns.by_case[name_of(NATIVE, PLAIN)]))


def cpu_ratio(turns: Turns, name: str, base: str) -> Interval | None:
    """Return tokens a second of processor time over those of `base`; None with several threads."""
    if torch.get_num_threads() > 1:
        return None
    tokens, seconds = zip(*(_columns(turns, case, _thread_s) for case in (name, base)), strict=True)
    return ratio_of_rates(tokens, seconds)


def _thread_s(turn: Turn) -> float:
    return turn.thread_s


def _columns(
    turns: Turns, name: str, seconds_of: Callable[[Turn], float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a case's tokens and seconds, question by question."""
    rounds = turns.by_case[name]
    tokens = [sum(len(turn.token_ids) for turn in each) for each in rounds]
    seconds = [sum(map(seconds_of, each)) for each in rounds]
    return np.array(tokens, dtype=np.float64), np.array(seconds)


def show(
    reports: Mapping[str, Mapping[str, Any]], comparisons: Mapping[str, Comparison], gains: Interval
) -> None:
    """Print the table and the verdicts."""
    rows = [
        [
            name,
            f"{report['tokens_per_s']:.1f}",
            *(str(report.get(key) or "") for key in _SHOWN_RATIOS),
            f"{report['tokens_per_pass']:.2f}",
            str(comparisons.get(name, "")),
        ]
        for name, report in reports.items()
    ]
    columns = ["", "tok/s", "time", "cpu", "gain", "cpu", "tok/pass", "equal"]
    show_table("through transformers' modules", columns, rows)
    plain = reports[name_of(THROUGH, PLAIN)]
    time = (plain["cpu_time_over_native"] or plain["time_over_native"]).estimate
    console.print(
        f"plain within {_GOAL_TIME} of the native time: {verdict(time <= _GOAL_TIME)}; "
        f"gain at least {_GOAL_GAIN} of the native gain: {verdict(gains.estimate >= _GOAL_GAIN)} "
        f"({gains})"
    )


def pass_times(sides: Mapping[str, Side]) -> dict[str, dict[int, float]]:
    """Return what the budgets believe at the end that a pass of the target takes, by its rows."""
    return {
        label: {rows: side.budget.target_pass_s(rows) for rows in _SHOWN_ROWS}
        for label, side in sides.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and write the results."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=12)
    parser.add_argument("--no-budget", action="store_true", help="always the largest trees")
    add_draft_options(parser)
    parser.set_defaults(repeats=2)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folders = Folders.of(arguments)
    prompts = folders.task_prompts(arguments, arguments.num_prompts)
    pair = folders.load(arguments, prompts)
    sides = build_sides(pair, with_budget=not arguments.no_budget)
    results = {
        **pair.describe(),
        **measure(pair, sides, prompts, arguments),
        "target_pass_s": pass_times(sides),
    }
    write_results("bench_through_transformers", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
