"""Parts that both loops share: one request from its due time to its row, and progress reports."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from outrider.gateway.tools.measuring.bench.answer import RawAnswer, make_row
from outrider.gateway.tools.measuring.bench.client import BenchClient
from outrider.gateway.tools.measuring.bench.results import RequestRow
from outrider.gateway.tools.measuring.bench.summary import LoadTally
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest


class RunWatch(Protocol):
    """Sees a run as it goes: for progress. Called on the event loop, so it has to be quick."""

    def phase(self, text: str, *, num_requests: int | None, duration_s: float | None) -> None:
        """Something begins, with so many requests or for so long."""

    def in_flight(self, count: int) -> None:
        """So many requests are out."""

    def row(self, row: RequestRow) -> None:
        """A request is over."""


class SilentWatch:
    """Sees nothing."""

    def phase(self, text: str, *, num_requests: int | None, duration_s: float | None) -> None:
        """Nothing."""

    def in_flight(self, count: int) -> None:
        """Nothing."""

    def row(self, row: RequestRow) -> None:
        """Nothing."""


SILENT = SilentWatch()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Rows in the order of their ends, and what the loop counted."""

    rows: list[RequestRow]
    tally: LoadTally


@dataclass(slots=True, kw_only=True)
class Tracker:
    """Requests of one loop: the number in flight, and their rows.

    Warm-up: requests due before `warm_up_s` on the clock, and the first `num_warm_up`.
    """

    client: BenchClient
    watch: RunWatch
    clock: Callable[[], float]
    warm_up_s: float = float("-inf")
    num_warm_up: int = 0
    arm: str = ""
    first_index: int = 0
    rows: list[RequestRow] = field(default_factory=list)
    num_in_flight: int = 0
    most_in_flight: int = 0

    def begin(self) -> None:
        """Count a request that is about to be sent."""
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        self.watch.in_flight(self.num_in_flight)

    async def ask(self, index: int, planned: PlannedRequest, scheduled_s: float | None) -> bool:
        """Send it, behind `begin`. None: it is due now. Its row is kept, also when it is cancelled.

        Returns whether it got a whole answer. A cancelled request counts as unfinished; the
        cancellation is passed on.
        """
        due_s = self.clock() if scheduled_s is None else scheduled_s
        raw = RawAnswer()
        try:
            raw = await self.client.ask(planned.body)
        except asyncio.CancelledError:
            raw.sent_s = due_s
            raw.ended_s = self.clock()
            raw.fail("unfinished", "the run was over before the answer")
            raise
        finally:
            self.num_in_flight -= 1
            self.watch.in_flight(self.num_in_flight)
            row = self.keep(index, planned, due_s, raw)
        return row.is_success

    def keep(self, index: int, planned: PlannedRequest, due_s: float, raw: RawAnswer) -> RequestRow:
        """Make the row of what came."""
        row = make_row(
            raw,
            index=self.first_index + index,
            scheduled_s=due_s,
            planned=planned,
            is_stream=self.client.target.is_stream,
            is_warm_up=due_s < self.warm_up_s or index < self.num_warm_up,
            arm=self.arm,
        )
        self.rows.append(row)
        self.watch.row(row)
        return row
