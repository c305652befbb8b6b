"""An open loop: requests go out when they are due, whatever became of those before.

A closed loop asks less of a server that is slow, and so hides its slowness; an open loop that waits
for its own sender does the same (coordinated omission; Tene 2015). So every latency counts from the
moment when the request was due, and how late it was sent is told beside it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.gateway.tools.measuring.bench.answer import RawAnswer
from outrider.gateway.tools.measuring.bench.load import LoadResult, Tracker
from outrider.gateway.tools.measuring.bench.summary import LoadTally
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest

_TURNS_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopSettings:
    """Bounds of an open loop.

    `max_in_flight`: further requests that are due wait here, and their wait counts. `drain_s`: time
    to wait for answers once everything is sent; later ones are cancelled and counted as
    unfinished.
    """

    max_in_flight: int = 1024
    drain_s: float = 60.0


class OpenLoop:
    """Runs once."""

    def __init__(
        self, tracker: Tracker, settings: OpenLoopSettings, *, clock: Callable[[], float]
    ) -> None:
        """`clock`: the event loop's own rate, seconds; rows and due times are in it."""
        self._tracker = tracker
        self._settings = settings
        self._clock = clock
        self._tasks: set[asyncio.Task[bool]] = set()
        self._num_held = 0
        self._has_room = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self, requests: Sequence[PlannedRequest], *, begin_s: float) -> LoadResult:
        """Send each request `at_s` behind `begin_s`, and wait for the answers.

        Cancelled, it cuts off what is out and passes the cancellation on.
        """
        try:
            for index, planned in enumerate(requests):
                due_s = begin_s + planned.at_s
                await self._until(due_s)
                if self._tracker.num_in_flight >= self._settings.max_in_flight and not (
                    await self._make_room(requests, index, begin_s)
                ):
                    break
                self._tracker.begin()
                task = asyncio.create_task(self._tracker.ask(index, planned, due_s))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=self._settings.drain_s)
        finally:
            await self._cut_off()
        if self._failure is not None:
            raise self._failure
        return LoadResult(
            rows=self._tracker.rows,
            tally=LoadTally(
                num_held=self._num_held,
                most_in_flight=self._tracker.most_in_flight,
                max_in_flight=self._settings.max_in_flight,
            ),
        )

    async def _until(self, due_s: float) -> None:
        """Not before it is due. Timers are exact to a millisecond: the rest is spent looking at the
        clock, in turns with whatever comes in.
        """
        wait_s = due_s - self._clock()
        if wait_s > _TURNS_S:
            await asyncio.sleep(wait_s - _TURNS_S)
        elif wait_s < -_TURNS_S:
            await asyncio.sleep(0)  # late all the time, it would never let the answers in
        while self._clock() < due_s:  # noqa: ASYNC110 - it waits for a time
            await asyncio.sleep(0)

    async def _make_room(
        self, requests: Sequence[PlannedRequest], index: int, begin_s: float
    ) -> bool:
        """Wait until one more may be sent. False: the time for it is over, and the rest is kept as
        never sent."""
        self._num_held += 1
        last_s = begin_s + requests[-1].at_s + self._settings.drain_s
        while self._tracker.num_in_flight >= self._settings.max_in_flight:
            self._has_room.clear()
            try:
                async with asyncio.timeout(max(0.0, last_s - self._clock())):
                    await self._has_room.wait()
            except TimeoutError:
                self._give_up(requests, index, begin_s)
                return False
        return True

    def _give_up(self, requests: Sequence[PlannedRequest], start: int, begin_s: float) -> None:
        for index in range(start, len(requests)):
            raw = RawAnswer(ended_s=self._clock())
            raw.fail("unfinished", "never sent: too many requests were in flight")
            self._tracker.keep(index, requests[index], begin_s + requests[index].at_s, raw)

    def _ended(self, task: asyncio.Task[bool]) -> None:
        self._tasks.discard(task)
        self._has_room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error  # ours: a failure of the target is a row

    async def _cut_off(self) -> None:
        left = list(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
