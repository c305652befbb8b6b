"""Counts what experiments' arms do: microseconds a request, stored every few seconds."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from outrider.gateway.contract.answers.outcomes import RequestOutcome
from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.experiments.assigner import PassedOver
from outrider.gateway.experiments.measure_store import PASSED_MARK, ArmKey, MeasureStore
from outrider.gateway.experiments.sketch import QuantileSketch
from outrider.gateway.experiments.totals import (
    METRIC_NAMES,
    NUM_UNIT_BUCKETS,
    SKETCH_NAMES,
    ArmTotals,
    MetricName,
    MetricTotals,
    SketchName,
)
from outrider.gateway.storage.refresh import PeriodicRefresh

logger = logging.getLogger(__name__)

_USD_PER_NANO: Final = 1e-9
_STRIDE: Final = 3 * NUM_UNIT_BUCKETS
"""A metric's numbers: counts, sums and squares, each by bucket."""
_OFFSETS: Final[Mapping[MetricName, int]] = {
    name: position * _STRIDE for position, name in enumerate(METRIC_NAMES)
}
_FLUSH_S: Final = 5.0
_FOLD_AFTER_S: Final = 86_400.0
"""Rows of a gateway that has not counted for so long are put together with others like it."""

Values = list[tuple[MetricName, float]]
_ONE_REQUEST: Final[Values] = [("cancelled", 0.0)]
"""Values of a request of which only the number counts (`ArmTotals.num_requests`)."""


class ArmMeasures:
    """Counts outcomes by arm since they were last taken. For one event loop."""

    def __init__(self) -> None:
        self._cells: dict[ArmKey, _Cell] = {}

    def observe(self, outcome: RequestOutcome) -> None:
        """Count an outcome for each of its arms, if any. Never raises."""
        if not outcome.arms:
            return
        values = _values(outcome)
        for ref in outcome.arms:
            key = (ref.experiment, ref.version, ref.arm)
            cell = self._cells.get(key)
            if cell is None:
                cell = self._cells[key] = _Cell(outcome.ended_at)
            cell.add(values, ref.unit_bucket % NUM_UNIT_BUCKETS, outcome.ended_at)

    def pass_over(self, passed: PassedOver, at_s: float) -> None:
        """Count a request that took no part in an experiment, in a row beside those of the arms."""
        key = (passed.experiment, passed.version, PASSED_MARK + passed.reason)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(at_s)
        cell.add(_ONE_REQUEST, 0, at_s)

    def take(self) -> dict[ArmKey, ArmTotals]:
        """Return the counts since the last call, and forget them."""
        cells, self._cells = self._cells, {}
        return {key: cell.totals(key) for key, cell in cells.items()}


class _Cell:
    """One arm's numbers. Lists, since single numbers of an array take three times as long."""

    __slots__ = ("_first_at", "_last_at", "_numbers", "_sketches")

    def __init__(self, now_s: float) -> None:
        self._numbers = [0.0] * (_STRIDE * len(METRIC_NAMES))
        self._sketches: dict[SketchName, QuantileSketch] = {
            name: QuantileSketch() for name in SKETCH_NAMES
        }
        self._first_at = self._last_at = now_s

    def add(self, values: Values, bucket: int, ended_at: float) -> None:
        numbers, sketches = self._numbers, self._sketches
        for name, value in values:
            place = _OFFSETS[name] + bucket
            numbers[place] += 1.0
            if value:
                numbers[place + NUM_UNIT_BUCKETS] += value
                numbers[place + 2 * NUM_UNIT_BUCKETS] += value * value
            if name in sketches:
                sketches[name].add(value)
        self._first_at = min(self._first_at, ended_at)
        self._last_at = max(self._last_at, ended_at)

    def totals(self, key: ArmKey) -> ArmTotals:
        experiment, version, arm = key
        shape = (len(METRIC_NAMES), 3, NUM_UNIT_BUCKETS)
        numbers = np.array(self._numbers, dtype=np.float64).reshape(shape)
        return ArmTotals(
            experiment=experiment,
            version=version,
            arm=arm,
            metrics={
                name: MetricTotals(counts=part[0], sums=part[1], squares=part[2])
                for name, part in zip(METRIC_NAMES, numbers, strict=True)
            },
            sketches=self._sketches,
            first_at=self._first_at,
            last_at=self._last_at,
        )


def _values(outcome: RequestOutcome) -> Values:
    """Return the request's values by metric.

    Requests that the client gave up say nothing on attainment and errors; their number is a metric
    of its own. A refusal's duration would look too good, so durations are of answers only.
    """
    ending = outcome.ending
    values: Values = [
        ("cancelled", float(ending == "cancelled")),
        ("cost_usd", outcome.cost_nanos * _USD_PER_NANO),
    ]
    if ending != "cancelled":
        values.append(("attained", float(outcome.is_attained)))
        values.append(("failed", float(ending == "failed")))
        values.append(("refused", float(ending == "refused")))
    latencies: Values = []
    if outcome.ttft_s is not None:
        latencies.append(("ttft_s", outcome.ttft_s))
    if outcome.inter_token_s is not None:
        latencies.append(("inter_token_s", outcome.inter_token_s))
    if ending == "answered":
        values.append(("escalated", float(outcome.is_escalated)))
        values.append(("degraded", float(outcome.is_degraded)))
        values.append(("completion_tokens", float(outcome.num_completion_tokens)))
        latencies.append(("duration_s", outcome.duration_s))
    # A clock that was set back gives no latency: better none than a wrong one.
    values.extend(pair for pair in latencies if 0.0 <= pair[1] < math.inf)
    return values


class MeasureWriter:
    """Adds counts to the store, every `every_s` and at the end. For one event loop.

    A batch that failed to be stored is tried again, unchanged and under the same number, before any
    newer one: the store skips batches that it has, so none is counted twice or lost.
    """

    def __init__(
        self,
        measures: ArmMeasures,
        store: MeasureStore,
        *,
        writer_id: str,
        wall_clock: Callable[[], float],
        every_s: float = _FLUSH_S,
    ) -> None:
        """Store the arguments. `writer_id` is of this process alone, at most 32 characters."""
        self._measures = measures
        self._store = store
        self._writer_id = writer_id
        self._wall_clock = wall_clock
        self._sequence = 0
        self._batch: dict[ArmKey, ArmTotals] = {}
        self._flushes: set[asyncio.Task[None]] = set()
        self._refresh = PeriodicRefresh(
            self._store_batch,
            name="measures of experiments",
            meanwhile="they wait in memory",
            every_s=every_s,
        )

    async def start(self) -> None:
        """Begin to store. Rows of gateways that are long gone are put together first."""
        try:
            await asyncio.to_thread(self._store.fold, self._wall_clock() - _FOLD_AFTER_S)
        except StorageError:
            logger.warning("old measures of experiments were not merged")
        self._refresh.start()

    async def flush(self) -> None:
        """Store the counts so far. Raises StorageError; counts that were not stored are kept.

        It is finished even if the caller is cancelled.
        """
        task = asyncio.create_task(self._refresh.run())
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def close(self) -> None:
        """Store the remaining counts, and stop."""
        await self._refresh.close()
        await self._refresh.attempt()
        if self._batch:
            logger.error("measures of experiments are lost arms=%d", len(self._batch))

    async def _store_batch(self) -> None:
        """Store a batch that failed before, and the counts since."""
        if self._batch:
            await self._write()
        self._batch = self._measures.take()
        if self._batch:
            self._sequence += 1
            await self._write()

    async def _write(self) -> None:
        await asyncio.to_thread(
            self._store.add, self._writer_id, self._sequence, self._batch, self._wall_clock()
        )
        self._batch = {}


def _log_failure(task: asyncio.Task[None]) -> None:
    """Drop the error of a flush without a caller; the batch is kept for the next flush."""
    if not task.cancelled():
        task.exception()
