"""A/B in one go: two targets, or two ways of asking one, take turns with the same requests.

Requests go out in blocks, to A then B, next time to B then A: a machine that slows down slows both,
and neither side is always the second one. Each request of a block has its pair in the other side's.
Texts that are made differ between the sides (a salt) and are of one kind and length, so that no
cache of the first turn answers the second; prompts of a file are what they are, and there the order
alone evens it out. Such a prompt has the same seed on both sides, unless the request's fields say
otherwise: two answers that were sampled with the same noise differ by what is compared, and less by
chance (docs/exactness.md).
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from outrider.gateway.tools.measuring.bench.compare import RunComparison, compare_results
from outrider.gateway.tools.measuring.bench.load import SILENT, LoadResult, RunWatch
from outrider.gateway.tools.measuring.bench.plan import BenchPlan, LoadSettings, PlanError
from outrider.gateway.tools.measuring.bench.results import BenchResult, RequestRow
from outrider.gateway.tools.measuring.bench.runner import Session, run_clock
from outrider.gateway.tools.measuring.bench.summary import LoadTally
from outrider.gateway.tools.measuring.bench.workloads import PlannedRequest

_NUM_BLOCKS: Final = 10
"""Turns of a side where there are requests enough."""
_MIN_BLOCK: Final = 8
_BLOCK_A_USER: Final = 4
"""Requests of a block for each that a closed loop keeps in flight."""


@dataclass(slots=True, kw_only=True)
class _Side:
    """One of the two. `spent_s`: how long its turns took so far."""

    session: Session
    requests: Sequence[PlannedRequest]
    rows: list[RequestRow] = field(default_factory=list)
    tallies: list[LoadTally] = field(default_factory=list)
    spent_s: float = 0.0

    async def turn(self, start: int, size: int) -> None:
        """Send one block and put its rows behind those of the turn before."""
        begin_s = self.session.clock()
        done = await self._send(start, size, text=f"{self.session.plan.arm}: block")
        shift_s = self.spent_s - begin_s
        self.rows += [moved(row, shift_s) for row in done.rows]
        self.tallies.append(done.tally)
        self.spent_s += self.session.clock() - begin_s

    async def warm_up(self, size: int) -> None:
        """Send a block and forget it."""
        await self._send(0, size, text=f"{self.session.plan.arm}: warm-up")

    async def _send(self, start: int, size: int, *, text: str) -> LoadResult:
        block = [self.requests[(start + n) % len(self.requests)] for n in range(size)]
        if block[-1].at_s < block[0].at_s:  # it began anew in the midst
            pace_s = self.requests[-1].at_s / max(len(self.requests) - 1, 1)
            block = [replace(one, at_s=n * pace_s) for n, one in enumerate(block)]
        load = replace(self.session.plan.load, num_requests=size, duration_s=None, warm_up_s=0.0)
        return await self.session.run(block, load, text=text, first_index=start)

    def result(self) -> BenchResult:
        """All turns as one run, their times end to end."""
        tally = LoadTally(
            num_held=sum(one.num_held for one in self.tallies),
            most_in_flight=max(one.most_in_flight for one in self.tallies),
            max_in_flight=self.tallies[0].max_in_flight,
        )
        result = self.session.result(self.rows, self.session.summarize(self.rows, tally))
        notes = [*result.meta.notes, f"{len(self.tallies)} turns, taken with another run's"]
        return msgspec.structs.replace(
            result, meta=msgspec.structs.replace(result.meta, notes=notes)
        )


async def run_paired(
    plan_a: BenchPlan,
    plan_b: BenchPlan,
    *,
    watch: RunWatch = SILENT,
    clock: Callable[[], float] | None = None,
) -> tuple[BenchResult, BenchResult, RunComparison]:
    """Both runs in turns, and what differs between them.

    The plans must want the same load and workload. A duration is that of each side; a closed loop
    without a number of requests goes on until both have had theirs. Before the first measured
    block each side has one that is not measured.

    Raises PlanError, WorkloadError, TargetError, and ResultError where nothing can be compared.
    """
    check_pair(plan_a, plan_b)
    salt = plan_a.salt or secrets.token_hex(4)
    clock = clock or run_clock()
    load = replace(plan_a.load, warm_up_s=0.0)
    async with AsyncExitStack() as stack:
        sides = []
        for plan in (plan_a, plan_b):
            own = replace(plan, salt=f"{salt}/{plan.arm}", shares_noise=True)
            session = await stack.enter_async_context(Session(own, watch=watch, clock=clock))
            sides.append(_Side(session=session, requests=session.requests(load)))
        await _take_turns((sides[0], sides[1]), load)
        first, second = (side.result() for side in sides)
    comparison = compare_results(first, second, seed=plan_a.seed, is_paired=True)
    return first, second, comparison


def check_pair(plan_a: BenchPlan, plan_b: BenchPlan) -> None:
    """Raises PlanError where the two cannot be a pair."""
    if plan_a.search is not None or plan_b.search is not None:
        raise PlanError("a search finds a rate for one target; a paired run has one rate for both")
    if (plan_a.load, plan_a.workload, plan_a.seed) != (plan_b.load, plan_b.workload, plan_b.seed):
        raise PlanError("the sides of a paired run must have the same load, workload and seed")
    if plan_a.objectives != plan_b.objectives:
        raise PlanError("the sides of a paired run must have the same objectives")
    if not plan_a.arm or not plan_b.arm or plan_a.arm == plan_b.arm:
        raise PlanError("the sides of a paired run need two different names")


async def _take_turns(sides: tuple[_Side, _Side], load: LoadSettings) -> None:
    total = _total(sides, load)
    size = block_size(total, load)
    for side in sides:
        await side.warm_up(size)
    start, number = 0, 0
    while not _is_over(sides, load, start, total):
        count = size if total is None else min(size, total - start)
        for side in sides if number % 2 == 0 else reversed(sides):
            await side.turn(start, count)
        start += count
        number += 1


def _total(sides: tuple[_Side, _Side], load: LoadSettings) -> int | None:
    """Requests of each side; None where only time ends it."""
    if load.concurrency is not None:
        return load.num_requests
    return min(len(side.requests) for side in sides)


def _is_over(sides: tuple[_Side, _Side], load: LoadSettings, start: int, total: int | None) -> bool:
    if total is not None and start >= total:
        return True
    has_end = load.concurrency is not None and load.duration_s is not None and start > 0
    return has_end and all(side.spent_s >= (load.duration_s or 0.0) for side in sides)


def block_size(total: int | None, load: LoadSettings) -> int:
    """Requests of one turn: an even share, and enough that a queue can build up as it would."""
    least = max(_MIN_BLOCK, _BLOCK_A_USER * (load.concurrency or 0))
    if total is None:
        return least
    return min(total, max(least, -(-total // _NUM_BLOCKS)))


def moved(row: RequestRow, shift_s: float) -> RequestRow:
    """The same request at another time."""

    def shifted(value: float | None) -> float | None:
        return None if value is None else value + shift_s

    return msgspec.structs.replace(
        row,
        scheduled_s=row.scheduled_s + shift_s,
        sent_s=shifted(row.sent_s),
        first_s=shifted(row.first_s),
        last_s=shifted(row.last_s),
        ended_s=row.ended_s + shift_s,
    )
