"""Measures that a request adds to its arms, and when they are stored."""

import asyncio
import math
import threading
from collections.abc import Mapping

import pytest

from outrider.gateway.contract.answers.outcomes import ArmRef
from outrider.gateway.experiments.measure_store import ArmKey, MeasureStore
from outrider.gateway.experiments.measures import ArmMeasures, MeasureWriter
from outrider.gateway.experiments.totals import ArmTotals
from outrider.gateway.storage.database import Database, DatabaseError
from tests.gateway.experiments.measuring import NOON, assert_same, counted, outcome


class FrailStore(MeasureStore):
    """Fails when told to; either before it has stored, or only in saying so. Tells of additions."""

    fails_before = False
    fails_after = False

    def __init__(self) -> None:
        super().__init__(Database(None))
        self.has_added = threading.Event()

    def add(
        self, writer_id: str, sequence: int, batch: Mapping[ArmKey, ArmTotals], now_s: float
    ) -> None:
        if self.fails_before:
            raise DatabaseError("cut off")
        super().add(writer_id, sequence, batch, now_s)
        self.has_added.set()
        if self.fails_after:
            raise DatabaseError("cut off before the answer")


def _writer(measures: ArmMeasures, store: MeasureStore, **changes: float) -> MeasureWriter:
    return MeasureWriter(measures, store, writer_id="w1", wall_clock=lambda: NOON, **changes)


def test_an_answer_counts_for_every_metric() -> None:
    (arm,) = counted(outcome(3, is_escalated=True)).values()
    assert (arm.num_requests, arm.count("attained"), arm.count("escalated")) == (1, 1, 1)
    assert arm.metrics["cost_usd"].sum == pytest.approx(0.002)
    assert arm.metrics["ttft_s"].mean == pytest.approx(0.1)
    assert arm.metrics["inter_token_s"].mean == pytest.approx(0.01)
    assert arm.metrics["duration_s"].mean == pytest.approx(0.5)
    assert arm.metrics["completion_tokens"].sum == 40
    assert arm.requests_by_bucket.nonzero()[0].tolist() == [3]
    assert arm.sketches["ttft_s"].quantile(0.5) == pytest.approx(0.1, rel=0.01)
    assert (arm.first_at, arm.last_at) == (NOON + 3, NOON + 3)


def test_cancelled_requests_count_for_cost_and_not_for_attainment() -> None:
    gone = outcome(1, ending="cancelled", ttft_s=0.1, duration_s=0.2)
    (arm,) = counted(outcome(0), gone).values()
    assert arm.num_requests == 2
    assert (arm.metrics["attained"].n, arm.count("attained"), arm.count("cancelled")) == (1, 1, 1)
    assert (arm.metrics["failed"].n, arm.metrics["ttft_s"].n) == (1, 2)
    assert (arm.metrics["duration_s"].n, arm.metrics["cost_usd"].n) == (1, 2)


def test_refusals_and_failures_miss_and_have_no_duration() -> None:
    lost = {"ttft_s": None, "inter_token_s": None, "duration_s": 0.001}
    refused = outcome(1, ending="refused", status=429, **lost)
    failed = outcome(2, ending="failed", status=500, **lost)
    late = outcome(3, ttft_s=0.3)
    (arm,) = counted(outcome(0), refused, failed, late).values()
    assert (arm.metrics["attained"].n, arm.count("attained")) == (4, 1)
    assert (arm.count("refused"), arm.count("failed")) == (1, 1)
    assert arm.metrics["duration_s"].n == 2
    assert arm.sketches["duration_s"].quantile(0.0) == pytest.approx(0.5, rel=0.01)


def test_each_arm_of_a_request_counts_and_nobodys_does_not() -> None:
    two = (
        ArmRef(experiment="budget", version=1, arm="on", unit_bucket=5),
        ArmRef(experiment="tiers", version=4, arm="small", unit_bucket=63),
    )
    measures = ArmMeasures()
    measures.observe(outcome(0, arms=two))
    measures.observe(outcome(1, arms=()))
    taken = measures.take()
    assert set(taken) == {("budget", 1, "on"), ("tiers", 4, "small")}
    assert taken["tiers", 4, "small"].requests_by_bucket[63] == 1
    assert measures.take() == {}


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_a_latency_that_cannot_be_is_left_out(value: float) -> None:
    (arm,) = counted(outcome(0, ttft_s=value, inter_token_s=value, duration_s=value)).values()
    assert arm.num_requests == 1
    assert [arm.metrics[n].n for n in ("ttft_s", "inter_token_s", "duration_s")] == [0, 0, 0]


def test_sums_and_squares_give_mean_and_variance() -> None:
    (arm,) = counted(*(outcome(i, ttft_s=0.1 * (i + 1)) for i in range(200))).values()
    metric = arm.metrics["ttft_s"]
    assert (metric.n, metric.mean) == (200, pytest.approx(10.05))
    assert metric.variance == pytest.approx(0.01 * (200 * 201 / 12))
    assert metric.counts.tolist() == [4.0] * 8 + [3.0] * 56


def test_totals_of_other_arms_are_not_added() -> None:
    (one,) = counted(outcome(0)).values()
    other = outcome(1, arms=(ArmRef(experiment="budget", version=2, arm="on"),))
    (two,) = counted(other).values()
    with pytest.raises(ValueError, match="budget:2/on cannot be added to budget:1/on"):
        _ = one + two


def test_everything_is_stored_by_itself_and_at_the_end() -> None:
    measures, store = ArmMeasures(), FrailStore()

    async def live() -> None:
        writer = _writer(measures, store, every_s=0.005)
        await writer.start()
        measures.observe(outcome(0))
        assert await asyncio.to_thread(store.has_added.wait, 5.0)
        measures.observe(outcome(1))
        await writer.close()

    asyncio.run(live())
    (expected,) = counted(outcome(0), outcome(1)).values()
    assert_same(store.totals("budget", 1)["on"], expected)


@pytest.mark.parametrize("fault", ["fails_before", "fails_after"])
def test_a_store_that_fails_loses_nothing_and_counts_nothing_twice(fault: str) -> None:
    measures, store = ArmMeasures(), FrailStore()

    async def live() -> None:
        writer = _writer(measures, store)
        setattr(store, fault, True)
        measures.observe(outcome(0))
        for number in (1, 2):
            with pytest.raises(DatabaseError):
                await writer.flush()
            measures.observe(outcome(number))
        setattr(store, fault, False)
        await writer.flush()
        await writer.flush()

    asyncio.run(live())
    (expected,) = counted(outcome(0), outcome(1), outcome(2)).values()
    assert_same(store.totals("budget", 1)["on"], expected)


def test_a_flush_that_is_given_up_is_finished_by_the_next() -> None:
    measures, store = ArmMeasures(), FrailStore()

    async def live() -> None:
        writer = _writer(measures, store)
        measures.observe(outcome(0))
        task = asyncio.create_task(writer.flush())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        measures.observe(outcome(1))
        await writer.close()

    asyncio.run(live())
    (expected,) = counted(outcome(0), outcome(1)).values()
    assert_same(store.totals("budget", 1)["on"], expected)
