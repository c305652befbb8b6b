"""Limits of one process, counted in its memory."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import ClassVar, Final

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.tenancy.keys.amounts import Amounts, PastUses, Want
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.counters.end_users import MAX_END_USERS, EndUsers
from outrider.gateway.tenancy.limits.counters.slots import Counters
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics
from outrider.gateway.tenancy.limits.limit_rules import (
    Holding,
    LimitDemand,
    LimitPlan,
    LimitRule,
    Unit,
    ordered,
)
from outrider.gateway.tenancy.limits.limiter import LimitState
from outrider.gateway.tenancy.limits.past import PastAmounts
from outrider.gateway.tenancy.limits.refusals import LimitRefusal, decisive, refusal_error
from outrider.gateway.tenancy.limits.unlimited import UnlimitedReservation
from outrider.gateway.tenancy.limits.windows import ClockTimes, Counter

_MIN_SWEEP: Final = 4096
_MAX_PLANS: Final = 65_536


class _Plan:
    """A principal's rules and their counters, in the same order."""

    __slots__ = ("counters", "limits")

    def __init__(self, limits: LimitPlan, counters: tuple[Counter, ...]) -> None:
        self.limits = limits
        self.counters = counters

    def refusals(self, demands: Sequence[LimitDemand], moment: ClockTimes) -> list[LimitRefusal]:
        """Return a refusal for each rule that has no room for its demand."""
        refusals = []
        for i, amount in demands:
            if not amount:
                continue
            rule = self.limits.rules[i]
            used = self.counters[i].used(moment)
            if amount > rule.limit - used:
                wait_s = self.counters[i].wait_s(amount, rule.limit, moment)
                refusals.append(LimitRefusal(rule=rule, wanted=amount, used=used, wait_s=wait_s))
        return refusals

    def states(self, demands: Sequence[LimitDemand], moment: ClockTimes) -> tuple[LimitState, ...]:
        """Return the states of the rules in `demands`."""
        return ordered([self.state(i, moment) for i, _ in demands])

    def tightest(self, positions: Iterable[int], moment: ClockTimes) -> list[LimitState]:
        """Return the states that headers tell of, those with the least left of their unit."""
        rules, is_told = self.limits.rules, self.limits.is_told
        least: dict[Unit, tuple[int, list[int]]] = {}
        for i in positions:
            if not is_told[i]:
                continue
            rule = rules[i]
            left = max(0, rule.limit - self.counters[i].used(moment))
            most, at = least.get(rule.unit, (left, []))
            if left < most or not at:
                least[rule.unit] = (left, [i])
            elif left == most:
                at.append(i)
        return [self.state(i, moment) for _, at in least.values() for i in at]

    def state(self, position: int, moment: ClockTimes) -> LimitState:
        """Return the state of one rule."""
        rule, counter = self.limits.rules[position], self.counters[position]
        return rule.state(counter.used(moment), counter.reset_s(moment))


class MemoryReservation:
    """Amounts that are entered on a plan's rules. Made by `MemoryLimiter.reserve`."""

    __slots__ = ("_entries", "_holding", "_is_settled", "_limiter", "plan")
    never_waits: ClassVar[bool] = True

    def __init__(
        self,
        limiter: "MemoryLimiter",
        plan: _Plan,
        holding: Holding,
        entries: dict[int, list[LimitDemand]],
    ) -> None:
        self.plan = plan
        self._limiter = limiter
        self._holding = holding
        self._entries = entries  # rule → (slot, amount), oldest first
        self._is_settled = False

    @property
    def states(self) -> tuple[LimitState, ...]:
        """Return this request's limits as they are now, the tightest of each name first."""
        demands = [(i, 0) for i in self._entries]
        return self.plan.states(demands, self._limiter.moment())

    @property
    def reported(self) -> list[LimitState]:
        """Return the states that headers tell of: where the least is left of each unit."""
        return self.plan.tightest(self._entries, self._limiter.moment())

    @property
    def reserved(self) -> Want:
        """Return the amounts that are reserved now."""
        return Want(by_tier=self._holding.by_tier)

    async def count_for(self, end_user: str) -> None:
        """Count it for an end user, too. Raises RateLimitError or BudgetError."""
        if not self._is_settled:
            self.plan = self._limiter.count_for(
                end_user, self.plan, self._holding.overall, self._entries
            )

    async def grow(self, more: Want) -> bool:
        """Reserve more, all or nothing; False where a limit has no room for it."""
        if self._is_settled:
            return False
        overall, by_tier = self._holding.growth(more)
        demands = self.plan.limits.demands(overall, by_tier)
        if not self._limiter.grow(self.plan, demands, self._entries):
            return False
        self._holding.add(overall, by_tier)
        return True

    async def extend(self, more: Want) -> None:
        """Reserve more, all or nothing. Raises RateLimitError or BudgetError.

        Raises StorageError once it is settled.
        """
        if self._is_settled:
            raise StorageError(
                "This request's reservation is already settled; send the request again."
            )
        overall, by_tier = self._holding.growth(more)
        demands = self.plan.limits.demands(overall, by_tier)
        self._limiter.enter(self.plan, demands, self._entries)
        self._holding.add(overall, by_tier)

    async def settle(self, used: Mapping[str, Amounts]) -> None:
        """Give back the unused rest. Raises ValueError, and keeps all, for more than is
        reserved."""
        if self._is_settled:
            return
        self._is_settled = True
        self._limiter.forget(self)
        total, fault = self._holding.spend(used)
        spent = dict(self.plan.limits.demands(total, used))
        for i, entries in self._entries.items():
            if self.plan.limits.rules[i].period == "open":
                _give_back(self.plan.counters[i], entries, 0)
            elif not fault:
                _give_back(self.plan.counters[i], entries, spent.get(i, 0))
        if fault:
            raise ValueError(f"more than is reserved: {fault}")


class MemoryLimiter:
    """Counts for one process. `history`: the ledger's usage from before it started.

    `max_end_users`: those of one key or team that are remembered.

    `clock` is monotonic and slides the minutes, `wall_clock` (seconds since 1970) tells days and
    months; both may stand still. All calls run on one event loop, with no await between check and
    entry, which makes reservations atomic.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        history: Callable[[], Awaitable[PastUses]] | None = None,
        max_end_users: int = MAX_END_USERS,
        metrics: LimitMetrics | None = None,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._history = history
        self._metrics = metrics or LimitMetrics()
        self._make = Counters()
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._plans: dict[str, _Plan] = {}
        self._open: set[MemoryReservation] = set()
        self._past: PastAmounts | None = None
        self._end_users = EndUsers(self._make, max_end_users)
        self._sweep_at = _MIN_SWEEP
        self._metrics.report_open(lambda: len(self._open))

    async def start(self) -> None:
        """Load earlier usage. Raises the errors of the history."""
        if self._history is not None:
            past, now = await self._history(), self.moment()
            self._past = PastAmounts(past, now)
            self._end_users.keep_past(past, now)

    async def close(self) -> None:
        """Give back all open reservations."""
        for reservation in tuple(self._open):
            await reservation.settle({})

    async def reserve(
        self, principal: Principal, want: Want
    ) -> MemoryReservation | UnlimitedReservation:
        """Reserve all or nothing. Raises RateLimitError or BudgetError."""
        plan = self._plan(principal)
        if not plan.counters and plan.limits.for_end_users is None:
            return UnlimitedReservation(want)
        holding = Holding(want.by_tier, want.most)
        entries: dict[int, list[LimitDemand]] = {}
        self.enter(plan, plan.limits.demands(holding.overall, want.by_tier), entries)
        reservation = MemoryReservation(self, plan, holding, entries)
        self._open.add(reservation)
        return reservation

    def enter(
        self, plan: _Plan, demands: Sequence[LimitDemand], entries: dict[int, list[LimitDemand]]
    ) -> None:
        """Enter a request's demands, all or none. Raises RateLimitError or BudgetError."""
        moment = self.moment()
        refusals = plan.refusals(demands, moment)
        if refusals:
            self._metrics.refused(decisive(refusals).rule)
            raise refusal_error(refusals, plan.states(demands, moment))
        _enter(plan, demands, entries, moment)

    def count_for(
        self,
        end_user: str,
        plan: _Plan,
        held: Amounts,
        entries: dict[int, list[LimitDemand]],
    ) -> _Plan:
        """Enter what a request holds for an end user, too; return the plan that counts for both.

        Raises RateLimitError or BudgetError.
        """
        limits = plan.limits.for_end_users
        if limits is None:
            return plan
        rules = limits.rules[len(plan.counters) :]
        counters = self._end_users.counters(rules, end_user, self.moment())
        both = _Plan(limits, plan.counters + counters)
        self.enter(both, limits.demands_from(len(plan.counters), held), entries)
        return both

    def grow(
        self, plan: _Plan, demands: Sequence[LimitDemand], entries: dict[int, list[LimitDemand]]
    ) -> bool:
        """Enter more for a reservation, all or nothing."""
        moment = self.moment()
        refusals = plan.refusals(demands, moment)
        if refusals:
            self._metrics.growth_refused(decisive(refusals).rule)
            return False
        _enter(plan, demands, entries, moment)
        return True

    def forget(self, reservation: MemoryReservation) -> None:
        """Forget a settled reservation."""
        self._open.discard(reservation)

    @property
    def num_end_users(self) -> int:
        """Return the number of end users that are remembered."""
        return len(self._end_users)

    @property
    def num_counters(self) -> int:
        """Return the number of counters kept."""
        return len(self._counters)

    def moment(self) -> ClockTimes:
        """Return the present time of both clocks."""
        return ClockTimes(self._clock(), self._wall_clock())

    def _plan(self, principal: Principal) -> _Plan:
        """Return rules and counters; cached while the principal's limits are the same objects."""
        plan = self._plans.get(principal.key_id)
        if plan is None or not plan.limits.is_of(principal):
            if len(self._counters) >= self._sweep_at or len(self._plans) >= _MAX_PLANS:
                self._sweep()
            limits = LimitPlan(principal)
            plan = _Plan(limits, tuple(self._counter(rule) for rule in limits.rules))
            self._plans[principal.key_id] = plan
        return plan

    def _counter(self, rule: LimitRule) -> Counter:
        """Return the rule's counter, which does not depend on the size of its limit."""
        name = (rule.scope, rule.owner, rule.model or "", rule.name)
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = self._make.make(rule.period)
            if self._past is not None:
                self._past.enter(rule, counter)
        return counter

    def _sweep(self) -> None:
        """Drop counters that count nothing, so that deleted keys take no memory.

        Plans hold counters too, so they are made anew. Counters of open reservations stay.
        """
        moment = self.moment()
        held = {id(counter) for r in self._open for counter in r.plan.counters}
        self._counters = {
            name: counter
            for name, counter in self._counters.items()
            if counter.used(moment) or id(counter) in held
        }
        self._plans.clear()
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._counters))


def _enter(
    plan: _Plan,
    demands: Sequence[LimitDemand],
    entries: dict[int, list[LimitDemand]],
    moment: ClockTimes,
) -> None:
    for i, amount in demands:
        if i not in entries:
            entries[i] = []
        if amount:
            entries[i].append((plan.counters[i].add(amount, moment), amount))


def _give_back(counter: Counter, entries: Sequence[LimitDemand], spent: int) -> None:
    """Give back all but `spent`; answers use the earliest entries first."""
    for slot, amount in entries:
        kept = min(spent, amount)
        spent -= kept
        if kept < amount:
            counter.give_back(slot, amount - kept)
