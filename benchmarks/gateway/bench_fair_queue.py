"""What does one tenant's burst do to the waiting times of another, with and without fair queueing?

Method: a steady tenant sends a short request each `--every-s` seconds, for as long as the burst
lasts. A bursting tenant sends `--burst` long requests at once, far more than run at a time
(`--max-sequences`). Cases, run in turn, each with an engine of its own over the same models:

    quiet              no burst: the steady tenant alone
    arrival order      first come, first served
    fair queue         deficit round robin on tokens, the engine's default
    urgent burst       the same, and every request of the burst asks for high priority
    heavy burst        the same, and the bursting tenant has four times the weight

Reading it: `ttft` is the time from a steady request's arrival (when it was due, whether or not the
engine had time for it) to its first token; p99 is over all steady requests of all rounds. `burst s`
is how long the whole burst took and `tok/s` what the engine wrote for both meanwhile: what fairness
costs. `over quiet` is the ratio of median waiting times, round by round. `equal`: the share of
answers that are token for token what they were in arrival order; in float32 anything below 1 is a
defect (with fewer bits, passes of other shapes may round a tie the other way).

    python -m benchmarks.gateway.bench_fair_queue --dtype float32
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.shared.driving import build_bench, make_requests
from benchmarks.shared.harness import (
    Summary,
    argument_parser,
    console,
    measure_in_turn,
    milliseconds,
    paired_ratio,
    prepare,
    show_table,
    start,
    variant_name,
    write_results,
)
from benchmarks.shared.pair import Folders, Pair
from benchmarks.shared.prompts import Prompt
from outrider.engine.config import EngineConfig
from outrider.engine.core import Engine
from outrider.engine.events import EngineEvent, Finished, TokensEmitted
from outrider.engine.queue.fair_queue import FairQueue
from outrider.engine.queue.policy import ArrivalOrder, QueuePolicy
from outrider.engine.request import HIGH, NORMAL, EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A policy of the queue, and the burst."""

    policy: Callable[[], QueuePolicy]
    has_burst: bool = True
    priority: int = NORMAL
    weight: float = 1.0


CASES: Mapping[str, Case] = {
    "quiet": Case(policy=FairQueue, has_burst=False),
    "arrival order": Case(policy=ArrivalOrder),
    "fair queue": Case(policy=FairQueue),
    "urgent burst": Case(policy=FairQueue, priority=HIGH),
    "heavy burst": Case(policy=FairQueue, weight=4.0),
}


@dataclass(slots=True, kw_only=True)
class Run:
    """The result of one case in one round. Answers are by prompt, not by request id."""

    ttft_s: list[float] = field(default_factory=list)
    burst_s: float = 0.0
    num_tokens: int = 0
    wall_s: float = 0.0
    num_preemptions: int = 0
    answers: dict[str, tuple[int, ...]] = field(default_factory=dict)


class Load:
    """Both tenants' requests, submitted when they are due."""

    def __init__(
        self, engine: Engine, burst: list[EngineRequest], steady: list[EngineRequest]
    ) -> None:
        self._engine = engine
        self._steady = steady
        self._burst_left = {request.request_id for request in burst}
        self._due_s: dict[str, float] = {}
        self._asked: dict[str, str] = {}
        self._answers: dict[str, list[int]] = {}
        self._num_sent = 0
        self.run = Run()
        self.started_s = time.perf_counter()
        for number, request in enumerate(burst):
            self._submit(request, f"burst {number}")

    def _submit(self, request: EngineRequest, asked: str) -> None:
        self._engine.submit(request)
        self._asked[request.request_id] = asked
        self._answers[request.request_id] = []

    def send_due(self, every_s: float) -> None:
        """Submit the steady requests whose time has come."""
        now_s = time.perf_counter()
        while self._num_sent < len(self._steady):
            due_s = self.started_s + self._num_sent * every_s
            if due_s > now_s:
                return
            request = self._steady[self._num_sent]
            self._due_s[request.request_id] = due_s
            self._submit(request, f"steady {self._num_sent}")
            self._num_sent += 1

    def wants_more(self, num_steady: int) -> bool:
        """Return whether the burst still lasts or fewer than so many steady requests were sent."""
        return bool(self._burst_left) or self._num_sent < num_steady

    def stop_sending(self) -> None:
        """No more steady requests."""
        del self._steady[self._num_sent :]

    def take(self, events: list[EngineEvent]) -> None:
        """Book what a step brought."""
        now_s = time.perf_counter()
        for event in events:
            name = event.request_id
            if isinstance(event, TokensEmitted):
                answer = self._answers[name]
                if not answer and name in self._due_s:
                    self.run.ttft_s.append(now_s - self._due_s[name])
                answer += event.token_ids
                self.run.num_tokens += len(event.token_ids)
            elif isinstance(event, Finished):
                self.run.answers[self._asked[name]] = tuple(self._answers[name])
                self.run.num_preemptions += event.stats.num_preemptions
                if name in self._burst_left:
                    self._burst_left.remove(name)
                    if not self._burst_left:
                        self.run.burst_s = now_s - self.started_s


def run_case(
    pair: Pair, prompts: Sequence[Prompt], case: Case, arguments: argparse.Namespace
) -> Run:
    """One burst, and steady requests for as long as it lasts."""
    bench = build_bench(
        pair.runners,
        draft_config=pair.config,
        budget=pair.budget,
        config=EngineConfig(max_sequences=arguments.max_sequences),
        policy=case.policy(),
    )
    engine = bench.engine
    asked = [prompts[number % len(prompts)] for number in range(arguments.burst)]
    burst = [
        replace(request, tenant="bursting", priority=case.priority, weight=case.weight)
        for request in make_requests(asked, tier="large", max_tokens=arguments.max_new)
        if case.has_burst
    ]
    asked = [prompts[-1 - number % len(prompts)] for number in range(arguments.most_steady)]
    steady = [
        replace(request, tenant="steady")
        for request in make_requests(asked, tier="large", max_tokens=arguments.max_steady)
    ]
    load = Load(engine, burst, steady)
    while load.wants_more(arguments.steady):
        load.send_due(arguments.every_s)
        if engine.has_work:
            load.take(engine.step())
        else:
            time.sleep(1e-4)
    load.stop_sending()
    while engine.has_work:
        load.take(engine.step())
    load.run.wall_s = time.perf_counter() - load.started_s
    return load.run


def report(rounds: Sequence[Run], quiet: Sequence[Run], order: Sequence[Run]) -> dict[str, Any]:
    """Figures of one case."""
    medians = [Summary.of(run.ttft_s).median for run in rounds]
    known = order[0].answers
    equal = [
        run.answers[asked] == known[asked]
        for run in rounds
        for asked in run.answers.keys() & known.keys()
    ]
    return {
        "ttft_s": Summary.of([sample for run in rounds for sample in run.ttft_s]),
        "over_quiet": paired_ratio(medians, [Summary.of(run.ttft_s).median for run in quiet]),
        "burst_s": Summary.of([run.burst_s for run in rounds]),
        "tokens_per_s": Summary.of([run.num_tokens / run.wall_s for run in rounds]),
        "preemptions": Summary.of([float(run.num_preemptions) for run in rounds]),
        "equal_share": sum(equal) / len(equal),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and write the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", default="tasks", help="tasks, or a JSON-lines file")
    parser.add_argument("--max-prompt", type=int, default=512, help="longest prompt in tokens")
    parser.add_argument("--burst", type=int, default=48, help="requests of the burst")
    parser.add_argument("--max-new", type=int, default=48, help="tokens of a burst's answer")
    parser.add_argument("--max-steady", type=int, default=16, help="tokens of a steady answer")
    parser.add_argument("--every-s", type=float, default=0.25, help="between steady requests")
    parser.add_argument("--steady", type=int, default=40, help="least steady requests a round")
    parser.add_argument("--most-steady", type=int, default=2000, help="most of them")
    parser.add_argument("--max-sequences", type=int, default=8, help="that run at once")
    arguments = parser.parse_args(argv)
    prepare(arguments)
    folders = Folders.of(arguments)
    prompts = folders.task_prompts(arguments, 64)
    with console.status("loading, and profiling step times"):
        pair = folders.load(arguments, prompts, num_sequences=arguments.max_sequences)
    rounds = measure_in_turn(
        {name: partial(run_case, pair, prompts, case, arguments) for name, case in CASES.items()},
        repeats=arguments.repeats,
        warm_up={
            name: partial(run_case, pair, prompts, case, _shortened(arguments))
            for name, case in CASES.items()
        },
        description="fair queue",
    )
    results = {
        name: report(rounds[name], rounds["quiet"], rounds["arrival order"]) for name in CASES
    }
    show_table(
        "a steady tenant beside a burst",
        ["", "ttft ms", "p99", "over quiet", "burst s", "tok/s", "pre-empted", "equal"],
        [
            [
                name,
                milliseconds(entry["ttft_s"].median),
                milliseconds(entry["ttft_s"].p99),
                f"{entry['over_quiet'].median:.2f}",
                f"{entry['burst_s'].median:.2f}",
                f"{entry['tokens_per_s'].median:.0f}",
                f"{entry['preemptions'].median:.0f}",
                f"{entry['equal_share']:.3f}",
            ]
            for name, entry in results.items()
        ],
        caption=f"{arguments.repeats} rounds, a burst of {arguments.burst} requests, "
        f"{arguments.max_sequences} at once",
    )
    write_results("bench_fair_queue", variant_name(arguments), results, arguments)


def _shortened(arguments: argparse.Namespace) -> argparse.Namespace:
    """For the warm-up: a small burst."""
    short = argparse.Namespace(**vars(arguments))
    short.burst, short.steady = min(arguments.burst, 16), min(arguments.steady, 5)
    return short


if __name__ == "__main__":
    start(main)
