"""Limits that stop an arm, and the loop that does it."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outrider.gateway.contract.answers.outcomes import ArmRef, RequestOutcome
from outrider.gateway.contract.errors.tree import ConflictError
from outrider.gateway.experiments.controller import (
    ControllerMetrics,
    ExperimentController,
    WatchedExperiment,
)
from outrider.gateway.experiments.guardrails import breaches, guardrail_intervals
from outrider.gateway.experiments.measure_store import MeasureStore
from outrider.gateway.experiments.measures import ArmMeasures, MeasureWriter
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.settings.experiment_rules import AllocationRule, GuardrailLimits
from outrider.gateway.storage.database import Database
from tests.gateway.experiments.measuring import NOON, counted, outcome

_TTFT = GuardrailLimits(p95_ttft_ms=200.0)
_ERRORS = GuardrailLimits(error_share=0.05)
_COST = GuardrailLimits(cost_per_request_usd=0.01)


def _arm(arm: str, number: int, **changes: object) -> RequestOutcome:
    ref = ArmRef(
        experiment="budget", version=1, arm=arm, unit_bucket=random.Random(number).randrange(64)
    )
    return outcome(number, arms=(ref,), **changes)


def _totals(
    num: int,
    *,
    error_share: float = 0.0,
    ttft_s: float = 0.1,
    cost_usd: float = 0.002,
    seed: int = 1,
) -> dict[str, ArmTotals]:
    """An arm "on" of independent requests; times to first token are exponential."""
    chance = random.Random(seed)
    return counted(
        *(
            _arm(
                "on",
                number,
                ttft_s=chance.expovariate(1 / ttft_s),
                ending="failed" if chance.random() < error_share else "answered",
                cost_nanos=round(chance.uniform(0.5, 1.5) * cost_usd * 1e9),
            )
            for number in range(num)
        )
    )


@pytest.mark.parametrize(
    ("limits", "guardrail", "bad", "estimate"),
    [
        (_TTFT, "p95_ttft_ms", {"ttft_s": 0.2}, 600.0),
        (_ERRORS, "error_share", {"error_share": 0.2}, 0.2),
        (_COST, "cost_per_request_usd", {"cost_usd": 0.02}, 0.02),
    ],
)
def test_a_breached_guardrail_is_reported_with_numbers(
    limits: GuardrailLimits, guardrail: str, bad: dict[str, float], estimate: float
) -> None:
    (breach,) = breaches(_totals(1500, **bad), limits, num_arms=2, is_independent=True)
    assert (breach.arm, breach.guardrail) == ("on", guardrail)
    assert breach.limit < breach.interval.low < estimate < breach.interval.high
    assert breach.interval.estimate == pytest.approx(estimate, rel=0.2)
    assert guardrail in breach.reason
    assert f"above {breach.limit:g}" in breach.reason


@pytest.mark.parametrize(
    ("limits", "bad"), [(_TTFT, {"ttft_s": 0.2}), (_ERRORS, {"error_share": 0.2})]
)
def test_a_few_bad_requests_are_no_proof(limits: GuardrailLimits, bad: dict[str, float]) -> None:
    totals = _totals(10, **bad)
    interval = next(
        iter(guardrail_intervals(totals["on"], limits, num_arms=2, is_independent=True).values())
    )
    assert breaches(totals, limits, num_arms=2, is_independent=True) == []
    assert interval.high > interval.low


def test_an_arm_at_its_limit_is_rarely_stopped_however_often_one_looks() -> None:
    """The true error share and p95 are just what is allowed; 8 looks in each of 24 runs."""
    limits = GuardrailLimits(p95_ttft_ms=300.0, error_share=0.05, alpha=0.05)
    num_stopped = 0
    for seed in range(24):
        chance = random.Random(seed)
        measured: ArmTotals | None = None
        for look in range(8):
            more = counted(
                *(
                    _arm(
                        "on",
                        look * 40 + number,
                        ttft_s=chance.expovariate(2.9957 / 0.3),
                        ending="failed" if chance.random() < 0.05 else "answered",
                    )
                    for number in range(40)
                )
            )["on"]
            measured = more if measured is None else measured + more
            if breaches({"on": measured}, limits, num_arms=2, is_independent=True):
                num_stopped += 1
                break
    assert num_stopped <= 4  # 1.2 are expected at most


def test_no_limits_no_breaches_and_no_data_no_breaches() -> None:
    bad = _totals(500, error_share=0.9)
    assert breaches(bad, GuardrailLimits(), num_arms=2) == []
    empty = {"on": ArmTotals(experiment="budget", version=1, arm="on")}
    every = GuardrailLimits(p95_ttft_ms=1.0, error_share=0.001, cost_per_request_usd=1e-9)
    assert breaches(empty, every, num_arms=2) == []


class Control:
    """Experiments in memory, changed as the controller wants."""

    def __init__(self, *watched: WatchedExperiment) -> None:
        self.experiments = {item.name: item for item in watched}
        self.stops: list[tuple[str, int, str, str]] = []
        self.weights: list[Mapping[str, float]] = []
        self.is_gone = False
        self.has_stopped = asyncio.Event()

    def watched(self) -> Sequence[WatchedExperiment]:
        return list(self.experiments.values())

    async def stop_arm(self, name: str, version: int, arm: str, reason: str) -> None:
        if self.is_gone and name == "budget":
            raise ConflictError("gone")
        self.stops.append((name, version, arm, reason))
        before = self.experiments[name]
        weights = {other: weight for other, weight in before.weights.items() if other != arm}
        stopped_arms = before.stopped_arms | {arm}
        self.experiments[name] = replace(before, weights=weights, stopped_arms=stopped_arms)
        self.has_stopped.set()

    async def set_weights(self, name: str, version: int, weights: Mapping[str, float]) -> None:
        self.weights.append(weights)
        self.experiments[name] = replace(self.experiments[name], weights=weights)


class Bench:
    """A controller over what was counted, with a clock that stands still."""

    def __init__(self, control: Control, *, every_s: float = 60.0) -> None:
        self.control = control
        self.measures = ArmMeasures()
        self.store = MeasureStore(Database(None))
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        writer = MeasureWriter(self.measures, self.store, writer_id="w1", wall_clock=lambda: NOON)
        self.controller = ExperimentController(
            control,
            self.store,
            writer.flush,
            ControllerMetrics(self.registry),
            clock=lambda: self.now_s,
            every_s=every_s,
        )

    def observe(self, arm: str, num: int, *, num_failed: int = 0, num_late: int = 0) -> None:
        for number in range(num):
            changes = {
                "ending": "failed" if number < num_failed else "answered",
                "ttft_s": 0.9 if number < num_late else 0.1,
            }
            self.measures.observe(_arm(arm, number, **changes))

    @property
    def metrics(self) -> str:
        return generate_latest(self.registry).decode()


_WATCHED = WatchedExperiment(
    name="budget",
    version=1,
    weights={"off": 0.5, "on": 0.5},
    guardrails=GuardrailLimits(error_share=0.1),
    is_independent=True,
)


def test_a_bad_arm_is_stopped_once_and_seen(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> Bench:
        bench = Bench(Control(_WATCHED))
        bench.observe("off", 300)
        bench.observe("on", 300, num_failed=150)
        await bench.controller.check()
        await bench.controller.check()
        return bench

    bench = asyncio.run(live())
    ((name, version, arm, reason),) = bench.control.stops
    assert (name, version, arm) == ("budget", 1, "on")
    assert "error_share is above 0.1: 0.5" in reason
    labels = '{arm="on",experiment="budget",version="1"}'
    assert f"outrider_experiment_arm_stopped{labels} 1.0" in bench.metrics
    assert 'outrider_experiment_guardrail_trips_total{guardrail="error_share"} 1.0' in bench.metrics
    assert "experiment arm stopped experiment=budget version=1 arm=on" in caplog.text


def test_the_loop_does_it_by_itself_and_ends() -> None:
    async def live() -> Control:
        control = Control(_WATCHED)
        bench = Bench(control, every_s=0.001)
        bench.observe("on", 300, num_failed=200)
        await bench.controller.start()
        async with asyncio.timeout(60):
            await control.has_stopped.wait()
        await bench.controller.close()
        return control

    assert [stop[2] for stop in asyncio.run(live()).stops] == ["on"]


def test_one_experiment_that_is_gone_keeps_no_other_waiting() -> None:
    other = replace(_WATCHED, name="tiers")

    async def live() -> Control:
        control = Control(_WATCHED, other)
        control.is_gone = True
        bench = Bench(control)
        bench.observe("on", 300, num_failed=200)
        ref = ArmRef(experiment="tiers", version=1, arm="off")
        for number in range(300):
            bench.measures.observe(outcome(number, ending="failed", arms=(ref,)))
        await bench.controller.check()
        return control

    assert [stop[0] for stop in asyncio.run(live()).stops] == ["tiers"]


def test_weights_follow_attainment_at_their_pace_and_not_for_stopped_arms() -> None:
    rule = AllocationRule(kind="thompson", min_share=0.1, every_s=30.0, min_requests=50)
    adaptive = replace(_WATCHED, guardrails=GuardrailLimits(), allocation=rule)

    async def live() -> Bench:
        bench = Bench(Control(adaptive))
        bench.observe("off", 200, num_late=100)
        bench.observe("on", 200, num_late=10)
        await bench.controller.check()
        bench.observe("off", 900)
        bench.now_s = 29.0
        await bench.controller.check()
        assert len(bench.control.weights) == 1
        bench.now_s = 31.0
        await bench.controller.check()
        return bench

    bench = asyncio.run(live())
    first, second = bench.control.weights
    assert first == pytest.approx({"off": 0.1, "on": 0.9})
    assert second != first
    assert "outrider_experiment_allocations_total 2.0" in bench.metrics


def test_an_arm_that_is_stopped_now_gets_no_new_weights_in_the_same_look() -> None:
    rule = AllocationRule(kind="thompson", min_requests=1)

    async def live() -> Control:
        control = Control(replace(_WATCHED, allocation=rule))
        bench = Bench(control)
        bench.observe("off", 300)
        bench.observe("on", 300, num_failed=200)
        await bench.controller.check()
        return control

    control = asyncio.run(live())
    assert [stop[2] for stop in control.stops] == ["on"]
    assert control.weights == []
