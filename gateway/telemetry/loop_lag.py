"""The event loop's lag: the delay that every stream in this process waits for."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.gateway.telemetry.histograms import ThreadHistogram

_LAG_S: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
_HELD_S: Final = (0.0001, 0.00025, *_LAG_S)
_INTERVAL_S: Final = 0.05
_KEPT_S: Final = 300.0
_KEPT_OF_STAGES: Final = 4096

PlanningStage = Literal["route", "prompt"]
"""route: the router's decision. prompt: rendering and tokenising, where no thread does it."""


class StageTimes:
    """Observes for how long stages of a request's work hold the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        held = ThreadHistogram(
            "outrider_event_loop_held_seconds",
            "Time for which one stage of a request's work held the event loop, so that all other "
            "requests waited. route: the router's decision. prompt: rendering and tokenising a "
            "short prompt; threads do it for long ones.",
            "stage",
            buckets=_HELD_S,
            registry=registry,
        )
        self._histograms = {stage: held.labels(stage) for stage in get_args(PlanningStage)}
        self._recent: dict[PlanningStage, deque[float]] = {
            stage: deque(maxlen=_KEPT_OF_STAGES) for stage in get_args(PlanningStage)
        }

    def observe(self, stage: PlanningStage, held_s: float) -> None:
        """Note that a stage of a request has ended."""
        self._histograms[stage].observe(held_s)
        self._recent[stage].append(held_s)

    def quantiles_s(self, share: float) -> dict[str, float]:
        """Return what this share of each stage's last 4,096 times did not exceed.

        Stages without any are left out.
        """
        return {
            stage: _quantile(sorted(times), share) for stage, times in self._recent.items() if times
        }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class ProcessTime(Collector):
    """The processor time of this process, read at each scrape."""

    def collect(self) -> Iterator[Metric]:
        """Yield the counter."""
        yield CounterMetricFamily(
            "outrider_gateway_cpu_seconds",
            "Processor time of the gateway's process, on all cores.",
            value=time.process_time(),
        )


class LoopLag:
    """Sleeps a fixed time again and again, and observes by how much longer it took.

    Timers of event loops have a resolution of a millisecond, so a smaller lag does not show.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._lag = Histogram(
            "outrider_event_loop_lag_seconds",
            "Delay between the due time of a callback and its run on the event loop; every stream "
            "waits for it.",
            buckets=_LAG_S,
            registry=registry,
        )
        self._tasks = Gauge(
            "outrider_event_loop_tasks",
            "Tasks of the gateway's event loop: a few that always run, and those of requests. More "
            "from day to day at rest means that some never end.",
            registry=registry,
        )
        self._recent: deque[float] = deque(maxlen=max(round(_KEPT_S / interval_s), 1))

    def quantile_s(self, share: float) -> float | None:
        """Return the lag that this share of the last five minutes' measurements did not exceed.

        None before the first one.
        """
        lags = sorted(self._recent)
        return _quantile(lags, share) if lags else None

    async def run(self) -> None:
        """Measure until cancelled: a task for as long as the application lives."""
        loop = asyncio.get_running_loop()
        self._tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        while True:
            due_s = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            lag_s = max(0.0, self._clock() - due_s)
            self._lag.observe(lag_s)
            self._recent.append(lag_s)
