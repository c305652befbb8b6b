"""How much does speculation gain under load on a recorded processor, and how much could it?

Question: bench_load measures 1 to 64 clients on the machine at hand. Is what it misses the
processor's doing, or that of how guesses are chosen?

Method: bench_load's clients, prompts and trained pair, but passes and the host's work take what
they took on a recorded processor (benchmarks/simulate/processors.py), by a clock of their own. So a
busy machine changes nothing, and a second takes less than one. Each pair of runs begins with an
engine that has learnt nothing, is measured from the moment when each client has got a token, and
asks other prompts than the pair before.

`at most`: the same trees and budgets, but every step may have guesses, for as long as they pay, and
no request's pace counts. Nothing that chooses kinds of steps could give more, but for chance, and
for plain decoding where guesses do not pay.

Reading it: tokens per second over plain decoding's, with a 95 % interval (bootstrap over pairs);
`p99`: a request's mean time per token, plain decoding's over its own.

    python -m benchmarks.simulate.simulate_load --pair disagreeing --processor zen4-core
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from benchmarks.shared.disagreeing import add_pair_option
from benchmarks.shared.driving import build_bench
from benchmarks.shared.harness import (
    argument_parser,
    prepare,
    progress_bar,
    show_table,
    start,
    variant_name,
    write_results,
)
from benchmarks.shared.pair import Folders, Pair, add_prompt_options
from benchmarks.shared.prompts import Prompt
from benchmarks.shared.step_timer import ForwardCpu
from benchmarks.simulate.processors import PROCESSORS, Processor
from benchmarks.speculation.bench_load import (
    OFF,
    ON,
    client_numbers,
    comparison,
    new_request,
    side_report,
)
from benchmarks.speculation.load import ClosedLoop, Window
from benchmarks.speculation.load_plot import draw
from outrider.draft import tree_drafter
from outrider.draft.budget import own_pace
from outrider.draft.budget.budget import TreeBudget
from outrider.draft.budget.group_choice import StepKind
from outrider.draft.budget.step_choice import StepChoice
from outrider.engine.events import EngineEvent, TokensEmitted
from outrider.engine.passes.runner import ForwardSlice, ModelRunner, PassOutput
from outrider.engine.passes.step_times import RunningStepTimes
from outrider.engine.sequences.sequence import Sequence as Sequence_
from outrider.verifier.params import Tier

AT_MOST: Final = "at most"
_SIDES: Final = (OFF, ON, AT_MOST)
# Passes of one size differ from each other by so much.
_NOISE: Final = 0.03
# Prompts of a pair of runs lie so far behind those of the last one.
_PROMPTS_BETWEEN: Final = 31


class Machine:
    """An engine that has learnt nothing, on a recorded processor. `now_s`: its clock."""

    def __init__(self, pair: Pair, processor: Processor, *, side: str, seed: int) -> None:
        self.now_s = 0.0
        self._processor = processor
        self._rng = np.random.default_rng(seed)
        self._num_draft_passes = 0
        tiers: tuple[Tier, ...] = ("large", "small")
        self._true_s = {tier: RunningStepTimes(processor.curve(tier)) for tier in tiers}
        self._known_s = {tier: RunningStepTimes(processor.curve(tier)) for tier in tiers}
        budget = TreeBudget(
            target_pass_s=self._known_s["large"], draft_pass_s=self._known_s["small"]
        )
        if side == AT_MOST:
            budget = replace(budget, max_stretch=inf)
        choice = _Eager if side == AT_MOST else StepChoice
        with patch.object(tree_drafter, "StepChoice", choice):
            self.bench = build_bench(
                pair.runners,
                draft_config=pair.config,
                budget=budget,
                draft_clock=lambda: self.now_s,
                forward_cpu=ForwardCpu(),
            )
        self._step = self.bench.engine.step
        self.bench.engine.step = self._timed_step  # type: ignore[assignment, method-assign]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the runners' passes take this processor's time."""
        with (
            _timed(self.bench.runners["large"], partial(self._forward, "large")),
            _timed(self.bench.runners["small"], partial(self._forward, "small")),
        ):
            yield

    def _forward(
        self,
        tier: Tier,
        forward: Callable[..., PassOutput],
        slices: Sequence[ForwardSlice],
        *others: Any,
        **options: Any,
    ) -> PassOutput:
        output = forward(slices, *others, **options)
        num_rows = sum(len(piece.token_ids) for piece in slices)
        seconds = self._true_s[tier](num_rows) * float(np.exp(self._rng.normal(0.0, _NOISE)))
        self._known_s[tier].observe(num_rows, seconds)
        self.now_s += seconds
        if tier == "small":
            self._num_draft_passes += 1
            self._work_on_trees(len(slices))
        return output

    def _work_on_trees(self, num_streams: int) -> None:
        processor = self._processor
        self.now_s += processor.tree_host_s + num_streams * processor.stream_host_s

    def _timed_step(self, *arguments: Any) -> list[EngineEvent]:
        self._num_draft_passes = 0
        events = self._step(*arguments)
        num_streams = len({e.request_id for e in events if isinstance(e, TokensEmitted)})
        self.now_s += self._processor.step_host_s + num_streams * self._processor.stream_host_s
        if self._num_draft_passes:
            self._work_on_trees(num_streams)
        return events


@contextmanager
def _timed(runner: ModelRunner, forward: Callable[..., PassOutput]) -> Iterator[None]:
    """Put a function around a runner's passes; the library runs no level of drafts by itself."""
    with (
        patch.object(runner, "forward", partial(forward, runner.forward)),
        patch.object(runner, "whole_pass", lambda: None),
        patch.object(runner, "on_pass", None),
    ):
        yield


class _Eager(StepChoice):
    """Has every step begin with guesses of the small model; learns what steps take all the same."""

    def choose(
        self, sequences: Sequence[Sequence_], offered: Sequence[StepKind], **options: Any
    ) -> StepKind:
        """Return the first kind."""
        super().choose(sequences, offered, **options)
        self._kind, self._is_plain, self.is_probe = offered[0], offered[0] == "plain", False
        return offered[0]

    def note_guesses(self, *, has_guesses: bool, is_bound: bool) -> None:
        """Go on with guesses all the same."""


def run(
    arguments: argparse.Namespace,
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    side: str,
    num_clients: int,
    number: int,
) -> Window:
    """Run one side of the pair of runs with this number."""
    first = number * _PROMPTS_BETWEEN % len(prompts)
    processor = PROCESSORS[arguments.processor]
    machine = Machine(pair, processor, side=side, seed=number)
    request = partial(
        new_request,
        pair=pair,
        prompts=[*prompts[first:], *prompts[:first]],
        max_tokens=arguments.max_new,
        speculate=side != OFF,
    )
    endless = patch.multiple(own_pace, _FIRST=inf, _MOST=inf)
    with machine.running(), endless if side == AT_MOST else nullcontext():
        loop = ClosedLoop(machine.bench, request, clock=lambda: machine.now_s)
        loop.resize(num_clients)
        loop.settle()
        window = loop.run(arguments.steps * processor.curve("large")(num_clients))
        loop.stop()
    return window


def _points(
    arguments: argparse.Namespace, pair: Pair, prompts: Sequence[Prompt]
) -> dict[str, dict[str, Any]]:
    """Run all points, side beside side."""
    done = {number: {side: list[Window]() for side in _SIDES} for number in arguments.clients}
    num_runs = arguments.pairs * len(done) * len(_SIDES)
    with progress_bar(f"load on {arguments.processor}", num_runs) as advance:
        for pair_number in range(arguments.pairs):
            for num_clients, sides in done.items():
                for side, windows in sides.items():
                    windows.append(
                        run(
                            arguments,
                            pair,
                            prompts,
                            side=side,
                            num_clients=num_clients,
                            number=pair_number,
                        )
                    )
                    advance(f"{num_clients} {side}")
    points: dict[str, dict[str, Any]] = {}
    for num_clients, sides in done.items():
        point = points[str(num_clients)] = {
            side: side_report(windows) for side, windows in sides.items()
        }
        point["ratio"] = comparison(sides[ON], sides[OFF])
        point["ratio_at_most"] = comparison(sides[AT_MOST], sides[OFF])
    return points


def _show(processor: str, points: Mapping[str, Mapping[str, Any]]) -> None:
    show_table(
        f"virtual time, {processor}",
        ["clients", "off tok/s", "on", "x", "p99", AT_MOST],
        [
            [
                number,
                f"{point[OFF]['tokens_per_s']:.0f}",
                f"{point[ON]['tokens_per_s']:.0f}",
                str(point["ratio"]["tokens_per_s"]),
                str(point["ratio"]["token_p99"] or "-"),
                str(point["ratio_at_most"]["tokens_per_s"]),
            ]
            for number, point in points.items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run all points, write the results and the plot."""
    parser = argument_parser(__doc__)
    add_prompt_options(parser, num_prompts=128, max_new=64)
    parser.add_argument("--processor", choices=sorted(PROCESSORS), default="zen4-core")
    parser.add_argument("--most", type=int, default=64, help="clients: 1, 2, 4 ... to this many")
    parser.add_argument("--pairs", type=int, default=8, help="off-on pairs at each point")
    parser.add_argument("--steps", type=int, default=300, help="length of a run, in plain steps")
    add_pair_option(parser)
    arguments = parser.parse_args(argv)
    arguments.clients = client_numbers(arguments.most)
    prepare(arguments)
    folders = Folders.of(arguments)
    prompts = folders.task_prompts(arguments, arguments.num_prompts)
    pair = folders.load(arguments, prompts, num_sequences=max(arguments.clients))
    points = _points(arguments, pair, prompts)
    _show(arguments.processor, points)
    results = {**pair.describe(), "processor": arguments.processor, "points": points}
    variant = f"{variant_name(arguments)}-{arguments.processor}"
    path = write_results("simulate_load", variant, results, arguments)
    draw(results, Path(path).with_suffix(".png"))


if __name__ == "__main__":
    start(main)
