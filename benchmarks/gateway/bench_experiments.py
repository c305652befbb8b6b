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

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.harness import measure_in_turn, show_table, verdict, write_results
from benchmarks.shared.record import RESULTS, Summary, percentile
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


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Assignment and counting of each case."""
    count = arguments.requests
    works: dict[str, Callable[[int], object]] = {}
    for name, assigner in assigners().items():
        over = outcomes(assigner, count, arguments.seed)
        measures, recent = ArmMeasures(), RecentRequests()

        def assign(number: int, assigner: Assigner = assigner) -> object:
            return assigned(assigner, number)

        def observe(
            number: int,
            over: list[RequestOutcome] = over,
            measures: ArmMeasures = measures,
            recent: RecentRequests = recent,
        ) -> None:
            measures.observe(over[number])
            recent.observe(over[number])

        works |= {f"{name}, assignment": assign, f"{name}, counting": observe}
    cases = {name: lambda work=work: per_request_us(work, count) for name, work in works.items()}
    rounds = measure_in_turn(cases, repeats=arguments.repeats)
    return {
        name: {"mean_us": Summary.of(rounds[name]), "p99_us": slowest_us(work, count)}
        for name, work in works.items()
    }


def show(results: Mapping[str, dict[str, Any]]) -> bool:
    """A row a case; whether the goals are met."""
    rows, is_met = [], True
    for name, found in results.items():
        goal = ASSIGNMENT_GOAL_US if name.endswith("assignment") else COUNTING_GOAL_US
        mean = found["mean_us"]
        is_ok = mean.median <= goal
        is_met = is_met and is_ok
        rows.append(
            (
                name,
                f"{mean.median:.1f}",
                f"{mean.minimum:.1f}-{mean.maximum:.1f}",
                f"{found['p99_us']:.1f}",
                f"{goal:g}",
                verdict(is_ok),
            )
        )
    columns = ("case", "us a request", "rounds", "slowest", "goal", "met")
    show_table("Experiments on the event loop", columns, rows)
    return is_met


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000, help="of each case and round")
    parser.add_argument("--repeats", type=int, default=7, help="measured rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", default="cpu", help="name of the results file's second part")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the file goes")
    arguments = parser.parse_args()
    results = measure(arguments)
    is_met = show(results)
    write_results("bench_experiments", arguments.variant, results | {"is_met": is_met}, arguments)


if __name__ == "__main__":
    main()
