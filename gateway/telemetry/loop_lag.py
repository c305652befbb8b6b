"""The event loop's lag: the delay that every stream in this process waits for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import CollectorRegistry, Histogram

_LAG_S: Final = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
_INTERVAL_S: Final = 0.05


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
            "Delay between the due time of a callback and its run on the event loop.",
            buckets=_LAG_S,
            registry=registry,
        )

    async def run(self) -> None:
        """Measure until cancelled: a task for as long as the application lives."""
        while True:
            due_s = self._clock() + self._interval_s
            await self._sleep(self._interval_s)
            self._lag.observe(max(0.0, self._clock() - due_s))
