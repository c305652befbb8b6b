"""What does an experiment cost a request: to be put into its arms, and to be counted?

Method: everything that happens on the event loop, without the rest of the gateway. A request is
described (`Subject`) and assigned, its options are laid over its arms', and its outcome is given to
those who count: quantile sketches, sums by unit bucket, the memory for feedback. Every request is
of another user. In turn (A B A B): no experiments, one, sixteen experiments in one layer (a request
is in one of them), and four layers that cross, with four arms each (a request is in four). Each
round is many requests of each case; the garbage collector runs as it does in serving.

Reading it: microseconds of processor time a request, which others on the machine do not change
much. `assignment` has a goal of 20, `counting` of 50. `slowest` is the 99th percentile of single
requests by the clock on the wall, with the timer's own cost in it.

    python -m benchmarks.gateway.bench_experiments
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from benchmarks.shared import benchmark
from benchmarks.shared.benchmark import Benchmark, Results, Table, figure, option
from benchmarks.shared.harness import measure_in_turn
from benchmarks.shared.record import Summary, percentile
from outrider.gateway.contract.answers.outcomes import RequestOutcome
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.experiments.assigner import Assigner, Assignment, NullAssigner, Subject
from outrider.gateway.experiments.assignment import HashAssigner
from outrider.gateway.experiments.lifecycle import created, started
from outrider.gateway.experiments.measures import ArmMeasures
from outrider.gateway.experiments.recent import RecentRequests
from outrider.gateway.experiments.records import ExperimentRecord
from outrider.gateway.settings.experiments import ExperimentSpec

ASSIGNMENT_GOAL_US: Final = 20.0
COUNTING_GOAL_US: Final = 50.0
_US: Final = 1e6
_SECRET: Final = b"of this benchmark"
_OWN: Final = OutriderOptions(deadline_ms=60_000.0)
_OVERLAYS: Final[Sequence[str]] = ("max_draft_nodes", "min_quality", "sources", "service_tier")
_VALUES: Final[Mapping[str, Sequence[Any]]] = {
    "max_draft_nodes": (4, 8, 16, 32),
    "min_quality": (0.8, 0.9, 0.95, 1.0),
    "sources": (["model"], ["suffix"], ["model", "suffix"], ["prediction"]),
    "service_tier": ("auto", "default", "flex", "priority"),
}


@dataclass(frozen=True, kw_only=True)
class Options(benchmark.Options):
    """Flags of the command line."""

    requests: int = option(20_000, "of each case and round")
    repeats: int = option(7, "measured rounds")
    seed: int = option(0)


def experiment(
    name: str, others: Sequence[ExperimentRecord], *, sets: str, layer: str, share: float = 1.0
) -> ExperimentRecord:
    """A running experiment with four arms."""
    arms = {f"arm-{i}": {"set": {sets: value}} for i, value in enumerate(_VALUES[sets])}
    headers = {"x-app": "*"}
    spec = ExperimentSpec.model_validate(
        {"arms": arms, "layer": layer, "eligible": {"headers": headers}}
    )
    return started(created(name, spec, share=share, now_s=0.0), others, 0.0)


def crossed() -> list[ExperimentRecord]:
    """Four layers: every request is in four experiments."""
    return [experiment(f"e{i}", [], sets=sets, layer=f"l{i}") for i, sets in enumerate(_OVERLAYS)]


def side_by_side() -> list[ExperimentRecord]:
    """Sixteen experiments of one layer: every request is in one of them."""
    records: list[ExperimentRecord] = []
    for i in range(16):
        one = experiment(f"e{i}", records, sets="max_draft_nodes", layer="l", share=1 / 16)
        records.append(one)
    return records


def assigners() -> dict[str, Assigner]:
    """The cases."""
    return {
        "none": NullAssigner(),
        "one": HashAssigner([experiment("e", [], sets="max_draft_nodes", layer="l")], _SECRET),
        "16 in a layer": HashAssigner(side_by_side(), _SECRET),
        "4 crossed": HashAssigner(crossed(), _SECRET),
    }


def assigned(assigner: Assigner, number: int) -> Assignment | None:
    """Return what the gateway does with a request before it is answered."""
    subject = Subject(
        key_id="k1234567",
        team_id="team-a",
        user=f"user-{number}",
        request_id=f"req-{number}",
        model="auto",
        endpoint="chat",
        headers={"x-app": "bench", "content-type": "application/json"},
        own_fields=frozenset(("deadline_ms",)),
    )
    assignment = assigner.assign(subject)
    if assignment is not None:
        assignment.overlay.merge(_OWN)
        assignment.overlay.merge_service_tier(None)
    return assignment


def outcomes(assigner: Assigner, count: int, seed: int) -> list[RequestOutcome]:
    """Requests that are over, each of another user."""
    draws = random.Random(seed)
    made = []
    for number in range(count):
        found = assigned(assigner, number)
        made.append(
            RequestOutcome(
                request_id=f"req-{number}",
                client_request_id=f"client-{number}",
                answer_id=f"chatcmpl-{number}",
                key_id="k1234567",
                team_id="team-a",
                endpoint="chat",
                model="auto",
                tier="large",
                status=200,
                ended_at=1.7e9 + number,
                ttft_s=draws.lognormvariate(-1.5, 0.6),
                inter_token_s=draws.lognormvariate(-3.5, 0.3),
                duration_s=draws.lognormvariate(0.5, 0.7),
                num_completion_tokens=draws.randrange(1, 500),
                cost_nanos=draws.randrange(1_000_000),
                slo_ttft_s=0.5,
                arms=() if found is None else found.measured,
            )
        )
    return made


def per_request_us(work: Callable[[int], object], count: int) -> float:
    """The mean of a round, in microseconds of this thread's processor time."""
    started_s = time.thread_time()
    for number in range(count):
        work(number)
    return (time.thread_time() - started_s) / count * _US


def slowest_us(work: Callable[[int], object], count: int) -> float:
    """The 99th percentile of single requests, in microseconds."""
    samples = []
    for number in range(count):
        started_s = time.perf_counter()
        work(number)
        samples.append(time.perf_counter() - started_s)
    return percentile(samples, 99.0) * _US


def measure(options: Options) -> Results:
    """Assignment and counting of each case."""
    works: dict[str, Callable[[int], object]] = {}
    for name, assigner in assigners().items():
        works[f"{name}, assignment"] = partial(assigned, assigner)
        works[f"{name}, counting"] = _counting(outcomes(assigner, options.requests, options.seed))
    rounds = measure_in_turn(
        {name: partial(per_request_us, work, options.requests) for name, work in works.items()},
        repeats=options.repeats,
    )
    found: Results = {
        name: {"mean_us": Summary.of(rounds[name]), "p99_us": slowest_us(work, options.requests)}
        for name, work in works.items()
    }
    return found | {
        "is_met": all(entry["mean_us"].median <= _goal(n) for n, entry in found.items())
    }


def _counting(over: Sequence[RequestOutcome]) -> Callable[[int], object]:
    measures, recent = ArmMeasures(), RecentRequests()

    def observe(number: int) -> None:
        measures.observe(over[number])
        recent.observe(over[number])

    return observe


def _goal(name: str) -> float:
    return ASSIGNMENT_GOAL_US if name.endswith("assignment") else COUNTING_GOAL_US


def tables(options: Options, results: Results) -> Iterator[Table]:
    """A row a case."""
    entries = {
        name: entry | {"goal": _goal(name), "met": entry["mean_us"].median <= _goal(name)}
        for name, entry in results.items()
        if name != "is_met"
    }
    columns = (
        ("us a request", figure("mean_us", ".1f")),
        ("least", figure("mean_us", ".1f", part="minimum")),
        ("most", figure("mean_us", ".1f", part="maximum")),
        ("slowest", figure("p99_us", ".1f")),
        ("goal", figure("goal", "g")),
        ("met", figure("met")),
    )
    title = "Experiments on the event loop"
    yield Table(title=title, columns=columns, entries=entries, first="case")


BENCHMARK: Final = Benchmark(options=Options, measure=measure, tables=tables, variant="cpu")

if __name__ == "__main__":
    BENCHMARK.start()
