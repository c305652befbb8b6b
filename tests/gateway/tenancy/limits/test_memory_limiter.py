"""Limits in memory: past usage from the ledger, clocks, many keys."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.contract.errors.tree import BudgetError, RateLimitError
from outrider.gateway.tenancy.keys.amounts import Amounts, LimitSpec, PastUses
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics
from outrider.gateway.tenancy.limits.limiter import LimitState
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from outrider.gateway.tenancy.limits.unlimited import Unlimited
from outrider.gateway.tenancy.limits.windows import ClockTimes, MinuteWindow
from tests.gateway.tenancy.limits.rigs import NOON_S, key, past_use, want

T = TypeVar("T")
TODAY_S = NOON_S // 86_400 * 86_400


@dataclass
class Clocks:
    """Apart from each other, as a machine's are."""

    monotonic_s: float = 5.5
    wall_s: float = NOON_S

    def limiter(self, past: PastUses | None = None) -> MemoryLimiter:
        async def history() -> PastUses:
            assert past is not None
            return past

        return MemoryLimiter(
            clock=lambda: self.monotonic_s,
            wall_clock=lambda: self.wall_s,
            history=None if past is None else history,
        )

    def turn(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run what must not wait for anything: that is what makes reservations atomic."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


def left(limiter: MemoryLimiter, principal: Any) -> dict[tuple[str, str, str | None], int]:
    reservation = at_once(limiter.reserve(principal, want(requests=0)))
    at_once(reservation.settle({}))
    return {(s.scope, s.name, s.model): s.remaining for s in reservation.states}


def test_a_new_process_goes_on_where_the_ledger_ends() -> None:
    day = past_use(TODAY_S, requests=3, tokens=70, usd_nanos=3 * 10**8)
    past = PastUses(
        minute=(
            past_use(NOON_S - 20, tokens=20),
            past_use(NOON_S - 50, tokens=40, tier="small"),
        ),
        days=(
            replace(day, at_s=int(TODAY_S) - 5 * 86_400, requests=5, usd_nanos=5 * 10**8),
            day,
            replace(day, key_id="k2", requests=1, tokens=5),
        ),
    )
    limits = LimitSpec(
        tokens_per_minute=100,
        requests_per_day=10,
        usd_per_month=1,
        models={"small": LimitSpec(tokens_per_minute=50)},
    )
    principal = key(limits, team_id="t", team_limits=LimitSpec(tokens_per_day=100, usd_per_day=1))
    clocks = Clocks()
    limiter = clocks.limiter(past)
    asyncio.run(limiter.start())
    now = left(limiter, principal)
    assert now == {
        ("key", "tokens_per_minute", None): 40,
        ("key", "requests_per_day", None): 7,
        ("key", "usd_per_month", None): 2 * 10**8,
        ("team", "tokens_per_day", None): 25,
        ("team", "usd_per_day", None): 4 * 10**8,
    }
    small = at_once(limiter.reserve(principal, want(requests=0, tier="small")))
    assert {s.model: s.remaining for s in small.states if s.model} == {"small": 10}
    clocks.turn(12)
    assert left(limiter, principal)["key", "tokens_per_minute", None] == 80
    clocks.turn(30)
    assert left(limiter, principal)["key", "tokens_per_minute", None] == 100
    clocks.turn(86_400)
    tomorrow = left(limiter, principal)
    assert tomorrow["team", "tokens_per_day", None] == 100
    assert tomorrow["key", "usd_per_month", None] == 2 * 10**8


def test_a_past_of_a_month_that_is_over_does_not_count() -> None:
    clocks = Clocks()
    limiter = clocks.limiter(PastUses(days=(past_use(usd_nanos=10**9),)))
    asyncio.run(limiter.start())
    clocks.turn(31 * 86_400)
    principal = key(LimitSpec(usd_per_month=1, usd_per_day=1))
    assert set(left(limiter, principal).values()) == {10**9}


def test_a_history_that_cannot_be_read_is_not_taken_for_an_empty_one() -> None:
    async def history() -> PastUses:
        raise ConnectionError("the database is away")

    with pytest.raises(ConnectionError):
        asyncio.run(MemoryLimiter(history=history).start())


def test_a_wall_clock_that_goes_back_over_midnight_spends_nothing_twice() -> None:
    clocks = Clocks(wall_s=TODAY_S + 86_399)
    limiter = clocks.limiter()
    principal = key(LimitSpec(usd_per_day=1))
    at_once(limiter.reserve(principal, want(usd_nanos=10**9)))
    clocks.wall_s += 2
    at_once(limiter.reserve(principal, want(usd_nanos=10**9)))
    clocks.wall_s -= 2
    with pytest.raises(BudgetError):
        at_once(limiter.reserve(principal, want(usd_nanos=1)))
    clocks.wall_s += 400 * 86_400  # wrong for a while
    at_once(limiter.reserve(principal, want(usd_nanos=10**9)))
    clocks.wall_s -= 400 * 86_400
    with pytest.raises(BudgetError):
        at_once(limiter.reserve(principal, want(usd_nanos=1)))


def test_the_wall_clock_does_not_move_minutes() -> None:
    clocks = Clocks()
    limiter = clocks.limiter()
    principal = key(LimitSpec(requests_per_minute=1))
    at_once(limiter.reserve(principal, want()))
    clocks.wall_s += 3_600
    with pytest.raises(RateLimitError):
        at_once(limiter.reserve(principal, want()))
    clocks.monotonic_s -= 100  # which no monotonic clock does
    with pytest.raises(RateLimitError):
        at_once(limiter.reserve(principal, want()))


def test_a_window_that_was_left_alone_is_empty() -> None:
    window = MinuteWindow()
    slot = window.add(5, ClockTimes(10.0, 0.0))
    window.add(7, ClockTimes(69.9, 0.0))
    assert window.used(ClockTimes(70.9, 0.0)) == 12
    assert window.used(ClockTimes(71.0, 0.0)) == 7
    window.give_back(slot, 5)  # it is past
    assert window.used(ClockTimes(129.9, 0.0)) == 7
    assert window.used(ClockTimes(1e9, 0.0)) == 0
    assert window.reset_s(ClockTimes(1e9, 0.0)) == 0


@pytest.mark.slow
def test_keys_that_are_gone_cost_nothing() -> None:
    """Counters of 12,000 keys, one of them open: only those that count are kept."""
    clocks = Clocks()
    limiter = clocks.limiter()
    limits = LimitSpec(requests_per_minute=2, concurrent_requests=2)
    stays = key(limits, key_id="stays")
    begun = at_once(limiter.reserve(stays, want()))
    for i in range(12_000):
        at_once(at_once(limiter.reserve(key(limits, key_id=f"k{i}"), want())).settle({}))
        if i % 1_000 == 0:
            clocks.turn(61)
    assert limiter.num_counters < 8_500
    at_once(limiter.reserve(stays, want()))
    with pytest.raises(RateLimitError, match="2 are under way"):
        at_once(limiter.reserve(stays, want()))
    at_once(begun.settle(want().by_tier))
    at_once(limiter.reserve(stays, want()))


def test_closing_gives_back_open_reservations() -> None:
    limiter = Clocks().limiter()
    principal = key(LimitSpec(concurrent_requests=1, tokens_per_minute=10))
    one = at_once(limiter.reserve(principal, want(tokens=10)))
    at_once(limiter.close())
    assert left(limiter, principal)["key", "tokens_per_minute", None] == 10
    at_once(one.settle(want(tokens=10).by_tier))


def test_metrics_count_refusals_and_open_reservations() -> None:
    registry = CollectorRegistry()
    limiter = MemoryLimiter(metrics=LimitMetrics(registry))
    principal = key(LimitSpec(tokens_per_minute=10))
    one = at_once(limiter.reserve(principal, want(tokens=10)))
    with pytest.raises(RateLimitError):
        at_once(limiter.reserve(principal, want(tokens=1)))
    assert not at_once(one.grow(want(requests=0, tokens=1)))
    labels = {"limit": "tokens_per_minute", "scope": "key"}
    assert registry.get_sample_value("outrider_limit_refusals_total", labels) == 1
    assert registry.get_sample_value("outrider_limit_growths_refused_total", labels) == 1
    assert registry.get_sample_value("outrider_limit_reservations") == 1
    at_once(one.settle({}))
    assert registry.get_sample_value("outrider_limit_reservations") == 0


def test_nothing_is_counted_without_limits() -> None:
    limiter = Unlimited()
    asyncio.run(limiter.start())
    limits = LimitSpec(requests_per_minute=0)
    one = at_once(limiter.reserve(key(limits), want(tokens=10)))
    states: tuple[LimitState, ...] = one.states
    assert states == ()
    at_once(one.settle(want(tokens=10).by_tier))
    at_once(one.settle(want(tokens=11).by_tier))  # again is nothing
    assert not at_once(one.grow(want(requests=0, tokens=1)))
    asyncio.run(limiter.close())


def test_amounts_are_never_negative() -> None:
    """A refund has no other way than settling."""
    with pytest.raises(ValueError, match="never negative"):
        Amounts(tokens=-1)
