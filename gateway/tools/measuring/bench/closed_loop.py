"""A closed loop: a number of users, each sending its next request after an answer."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outrider.gateway.tools.measuring.bench.load import LoadResult, Tracker
from outrider.gateway.tools.measuring.bench.summary import LoadTally
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest

# A target that refuses at once must not be asked a hundred thousand times a second.
_PAUSE_AFTER_FAILURE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopSettings:
    """At least one of `duration_s` and `num_requests` is given."""

    concurrency: int
    duration_s: float | None
    num_requests: int | None
    drain_s: float = 60.0
    """As in an open loop."""


class ClosedLoop:
    """Runs once."""

    def __init__(
        self, tracker: Tracker, settings: ClosedLoopSettings, *, clock: Callable[[], float]
    ) -> None:
        self._tracker = tracker
        self._settings = settings
        self._clock = clock

    async def run(self, requests: Sequence[PlannedRequest], *, begin_s: float) -> LoadResult:
        """Ask until the time or the requests are at an end; they begin anew before that.

        Cancelled, it cuts off what is out and passes the cancellation on.
        """
        settings = self._settings
        end_s = None if settings.duration_s is None else begin_s + settings.duration_s
        numbers = iter(
            range(settings.num_requests) if settings.num_requests is not None else _forever()
        )
        users = [
            asyncio.create_task(self._ask_on(requests, numbers, end_s))
            for _ in range(settings.concurrency)
        ]
        try:
            limit_s = None
            if end_s is not None:
                limit_s = max(0.0, end_s - self._clock()) + settings.drain_s
            await asyncio.wait(users, timeout=limit_s)
        finally:
            for user in users:
                user.cancel()
            await asyncio.wait(users)
        for user in users:
            if not user.cancelled() and (error := user.exception()) is not None:
                raise error
        return LoadResult(
            rows=self._tracker.rows,
            tally=LoadTally(most_in_flight=self._tracker.most_in_flight),
        )

    async def _ask_on(
        self, requests: Sequence[PlannedRequest], numbers: Iterator[int], end_s: float | None
    ) -> None:
        while end_s is None or self._clock() < end_s:
            index = next(numbers, None)
            if index is None:
                return
            self._tracker.begin()
            if not await self._tracker.ask(index, requests[index % len(requests)], None):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)


def _forever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1
