"""What does a step cost beside the forward passes, and is it within 0.5 ms + 0.05 ms a sequence?

Method: so many sequences decode at once, without a stop token, plainly and with speculation. After
the prompts and a warm-up, every step's wall time less the time in the models' forward passes is
host work: scheduling, building inputs and masks, drafting's bookkeeping, the acceptance rule (its
tensor operations too), moving keys and values, events. The numbers of sequences and both ways of
decoding are run in turn, round by round. Host work hardly depends on the models' size, so the demo
pair will do; the drafter is told the pass times of a larger target, or it might not draft at all,
and its clock stands still: with speculation every step has trees, whatever pays on this machine.
On a GPU forward passes are launched and not waited for, so there the figure is an upper bound that
contains the wait.

Reading it: `host` is the median of a step, `cpu` the processor time in it (smaller where other
programs use the machine), `M instr` the millions of instructions in it (the same wherever the same
is done; 0 where they cannot be counted), `bound` what it may be. A speculative step has draft
passes, each with host work of its own: `passes` counts them and the large one, `per pass` is the
host work of one.
`--bytecodes` runs every case once more and counts what Python itself carries out in a step, in the
passes too: the same on any machine, however busy it is.
`--profile` runs every case once more under cProfile and says where the processor time goes outside
the passes; cProfile makes Python look slower than it is.

    python -m benchmarks.speculation.bench_host_overhead --dtype bfloat16 --profile
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.bytecodes import BytecodeCounter
from benchmarks.shared.driving import (
    Bench,
    add_draft_options,
    blocks_for,
    build_bench,
    draft_config,
    load_runner,
    make_requests,
)
from benchmarks.shared.grown import grown_large, grown_small
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    choose_threads,
    console,
    measure_in_turn,
    milliseconds,
    prepare,
    show_table,
    start,
    variant_name,
    verdict,
    write_results,
)
from benchmarks.shared.prompts import Prompt, load_prompts, load_tokenizer
from benchmarks.shared.record import ROOT
from benchmarks.shared.step_timer import StepRecord, StepTimer
from outrider.draft.budget.budget import TreeBudget
from outrider.engine.config import EngineConfig
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.step_times import RunningStepTimes, StepTimeCurve
from outrider.verifier.params import Tier

# As pstats keys its table: file, line, name; to calls, own and total seconds, and callers.
_Function = tuple[str, int, str]
_Profile = Mapping[_Function, tuple[int, int, float, float, Mapping[_Function, tuple[Any, ...]]]]

# Of a 400 M target and a 0.7 M drafter on two cores. The demo pair's own times would let the budget
# decide now for, now against drafting, and the figures would say little.
_TARGET_PASS_S = RunningStepTimes(
    StepTimeCurve(num_rows=(1, 16, 32, 64, 128), seconds=(0.030, 0.032, 0.036, 0.060, 0.110))
)
_DRAFT_PASS_S = RunningStepTimes(
    StepTimeCurve(num_rows=(1, 16, 64, 128), seconds=(0.001, 0.0015, 0.002, 0.003))
)

_WARM_UP_STEPS = 5
_NUM_HOT_SPOTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many sequences, decoding plainly or speculatively."""

    num_sequences: int
    speculate: bool

    @property
    def name(self) -> str:
        """For tables and results."""
        return f"{'speculative' if self.speculate else 'plain'}, {self.num_sequences}"

    @property
    def bound_s(self) -> float:
        """Return what a step's host work may take."""
        return 0.5e-3 + 0.05e-3 * self.num_sequences


def run_case(
    bench: Bench,
    prompts: Sequence[Prompt],
    case: Case,
    *,
    num_steps: int,
    max_tokens: int,
    profile: cProfile.Profile | BytecodeCounter | None = None,
) -> list[StepRecord]:
    """Steady-state steps of one case; all sequences decode in each. `profile`: watches them."""
    requests = make_requests(
        prompts[: case.num_sequences], tier="large", max_tokens=max_tokens, speculate=case.speculate
    )
    for request in requests:
        bench.engine.submit(request)
    timer = StepTimer(bench)
    records: list[StepRecord] = []
    try:
        num_warm = 0
        while num_warm < _WARM_UP_STEPS:
            _, record = timer.step(case.num_sequences)
            num_warm += not record.had_prefill
        if profile is not None:
            profile.enable()
        for _ in range(num_steps):
            records.append(timer.step(case.num_sequences)[1])
            if bench.engine.scheduler.num_running < case.num_sequences:
                raise RuntimeError(f"{case.name}: an answer ended early; raise --max-tokens")
    finally:
        if profile is not None:
            profile.disable()
        for request in requests:
            bench.engine.abort(request.request_id)
        bench.engine.step()  # hands out the last events
    return records


def report(case: Case, rounds: Sequence[Sequence[StepRecord]]) -> dict[str, Any]:
    """Figures of one case over all its rounds."""
    steps = [record for records in rounds for record in records]
    host = Summary.of([step.host_s for step in steps])
    num_passes = [1 + step.num_small_passes for step in steps]
    return {
        "num_sequences": case.num_sequences,
        "speculative": case.speculate,
        "host_s": host,
        "host_cpu_s": Summary.of([step.host_cpu_s for step in steps]),
        "host_instructions": Summary.of([float(step.host_instructions) for step in steps]),
        "bound_s": case.bound_s,
        "is_within_bound": host.median <= case.bound_s,
        "step_s": Summary.of([step.wall_s for step in steps]),
        "passes_per_step": sum(num_passes) / len(steps),
        "host_instructions_per_pass": sum(step.host_instructions for step in steps)
        / sum(num_passes),
        "host_per_pass_s": sum(step.host_s for step in steps) / sum(num_passes),
        "tokens_per_step": sum(step.num_emitted for step in steps) / len(steps),
    }


def hot_spots(profile: cProfile.Profile, num_steps: int) -> dict[str, list[dict[str, Any]]]:
    """Return the host's time by function, a step: own time and, for our code, with its callees."""
    # The only table that keeps functions of one name apart; typeshed does not know it.
    raw: _Profile = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    inside = _inside_passes(raw)
    rows = []
    for function, (_, _, _, total_s, callers) in raw.items():
        if function in inside:
            continue
        outside = [numbers for caller, numbers in callers.items() if caller not in inside]
        path = Path(function[0]).resolve()
        is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
        rows.append(
            {
                "where": f"{path.relative_to(ROOT)} {function[2]}" if is_ours else function[2],
                "is_ours": is_ours,
                "calls": sum(numbers[1] for numbers in outside) / num_steps,
                "own_s": sum(numbers[2] for numbers in outside) / num_steps,
                "total_s": total_s / num_steps,
            }
        )
    ours = [row for row in rows if row["is_ours"]]
    return {
        "own": sorted(rows, key=lambda row: -row["own_s"])[:_NUM_HOT_SPOTS],
        "total": sorted(ours, key=lambda row: -row["total_s"])[: 2 * _NUM_HOT_SPOTS],
    }


def _inside_passes(raw: _Profile) -> set[_Function]:
    """`DecoderModel.forward` and everything that is called from nowhere else."""
    inside = {
        function
        for function in raw
        if function[0].endswith("model/decoder.py") and function[2] == "forward"
    }
    while True:
        more = {
            function
            for function, (*_, callers) in raw.items()
            if function not in inside and callers and callers.keys() <= inside
        }
        if not more:
            return inside
        inside |= more


def _show_hot_spots(case: Case, spots: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for order, rows in spots.items():
        show_table(
            f"{case.name}: by {order} processor time, a step",
            ["function", "calls", "own ms", "total ms"],
            [
                [
                    row["where"],
                    f"{row['calls']:.1f}",
                    f"{row['own_s'] * 1e3:.3f}",
                    f"{row['total_s'] * 1e3:.3f}",
                ]
                for row in rows
            ],
        )


def build(arguments: argparse.Namespace) -> tuple[Bench, list[Prompt], int]:
    """An engine that holds the largest case; its prompts; the answers' length."""
    largest = max(arguments.sequences)
    large_folder = grown_large(arguments)
    choose_threads(arguments, large_folder)
    prompts = load_prompts(
        "tasks", load_tokenizer(large_folder), num_prompts=largest, seed=arguments.seed
    )
    limits = draft_config(arguments)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    max_tokens = (arguments.steps + 2 * _WARM_UP_STEPS) * (limits.max_draft_depth + 1)
    load = partial(
        load_runner,
        dtype=arguments.dtype,
        device=arguments.device,
        num_blocks=blocks_for(num_sequences=largest, num_tokens=longest + max_tokens),
    )
    with console.status("loading, and profiling step times"):
        runners: dict[Tier, ModelRunner] = {
            "large": load(large_folder),
            "small": load(grown_small(arguments)),
        }
        bench = build_bench(
            runners,
            draft_config=limits,
            budget=TreeBudget(target_pass_s=_TARGET_PASS_S, draft_pass_s=_DRAFT_PASS_S),
            config=EngineConfig(max_sequences=largest),
            draft_clock=lambda: 0.0,
        )
    assert runners["large"].max_context is not None
    return bench, prompts, min(max_tokens, runners["large"].max_context - longest)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--steps", type=int, default=40, help="measured steps a round")
    parser.add_argument("--bytecodes", action="store_true", help="count what Python carries out")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    add_draft_options(parser)
    arguments = parser.parse_args(argv)
    prepare(arguments)
    bench, prompts, max_tokens = build(arguments)
    cases = [
        Case(num_sequences=number, speculate=speculate)
        for number in arguments.sequences
        for speculate in (False, True)
    ]
    run = partial(run_case, bench, prompts, num_steps=arguments.steps, max_tokens=max_tokens)
    rounds = measure_in_turn(
        {case.name: partial(run, case) for case in cases},
        repeats=arguments.repeats,
        warm_up={case.name: partial(run, case, num_steps=3) for case in cases},
        description="host work",
    )
    results = {case.name: report(case, rounds[case.name]) for case in cases}
    show_table(
        "host work of a step, ms",
        [
            "",
            "host",
            "p99",
            "cpu",
            "M instr",
            "bound",
            "within",
            "passes",
            "per pass",
            "tokens",
            "whole step",
        ],
        [
            [
                name,
                milliseconds(entry["host_s"].median),
                milliseconds(entry["host_s"].p99),
                milliseconds(entry["host_cpu_s"].median),
                f"{entry['host_instructions'].median / 1e6:.2f}",
                milliseconds(entry["bound_s"]),
                verdict(entry["is_within_bound"]),
                f"{entry['passes_per_step']:.1f}",
                milliseconds(entry["host_per_pass_s"]),
                f"{entry['tokens_per_step']:.1f}",
                milliseconds(entry["step_s"].median),
            ]
            for name, entry in results.items()
        ],
        caption=f"{arguments.repeats} rounds of {arguments.steps} steps",
    )
    if arguments.bytecodes:
        for case in cases:
            counter = BytecodeCounter()
            run(case, profile=counter)
            results[case.name]["bytecodes"] = counter.total / arguments.steps
            console.print(f"{case.name}: {counter.total / arguments.steps:,.0f} bytecodes a step")
    if arguments.profile:
        for case in cases:
            # Processor time: a profile is for people, and a busy machine must not mislead them.
            profile = cProfile.Profile(time.thread_time)
            run(case, profile=profile)
            spots = hot_spots(profile, arguments.steps)
            _show_hot_spots(case, spots)
            results[case.name]["hot_spots"] = spots
    write_results("bench_host_overhead", variant_name(arguments), results, arguments)


if __name__ == "__main__":
    start(main)
