"""Limits of each end user under a key, and budgets of a week and of days that roll on."""

import asyncio
import gc
import tracemalloc
from collections.abc import Callable

import pytest

from outrider.gateway.contract.errors.tree import BudgetError, GatewayError, RateLimitError
from outrider.gateway.tenancy.keys.amounts import LimitSpec, PastUses
from outrider.gateway.tenancy.keys.keys import VERIFIED, Principal
from outrider.gateway.tenancy.limits.limiter import Reservation
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from tests.gateway.tenancy.limits.rigs import NOON_S, Rig, key, past_use, want

DAY_S = 86_400


def of(rig: Rig, principal: Principal, end_user: str, tokens: int = 0) -> Reservation:
    """A request of an end user: counted, then its tokens reserved."""
    reservation = rig.run(rig.limiter.reserve(principal, want()))
    try:
        rig.run(reservation.count_for(end_user))
        rig.run(reservation.extend(want(requests=0, tokens=tokens)))
    except GatewayError:
        rig.run(reservation.settle({}))
        raise
    return reservation


def test_one_end_users_limit_leaves_the_others_theirs(rig: Rig) -> None:
    principal = key(LimitSpec(tokens_per_minute=1000, end_user=LimitSpec(tokens_per_minute=100)))
    with rig:
        ann = of(rig, principal, "ann", 90)
        with pytest.raises(RateLimitError, match="end user's limit tokens_per_minute") as full:
            of(rig, principal, "ann", 11)
        assert full.value.headers["x-ratelimit-remaining-tokens"] == "10"
        assert full.value.limit == "tokens_per_minute"
        states = {s.scope: s.remaining for s in of(rig, principal, "bob", 100).states}
        assert states == {"key": 810, "end_user": 0}
        rig.run(ann.settle(want(tokens=40).by_tier))
        of(rig, principal, "ann", 60)


def test_requests_that_name_nobody_are_one_end_users(rig: Rig) -> None:
    principal = key(LimitSpec(end_user=LimitSpec(requests_per_day=1)))
    with rig:
        of(rig, principal, "")
        with pytest.raises(RateLimitError, match="requests_per_day"):
            of(rig, principal, "")
        of(rig, principal, "ann")


def test_an_end_user_of_a_team_is_the_same_under_each_of_its_keys(rig: Rig) -> None:
    limits = LimitSpec(end_user=LimitSpec(concurrent_requests=2))
    one, two = (key(key_id=k, team_id="t", team_limits=limits) for k in ("k1", "k2"))
    with rig:
        of(rig, one, "ann")
        under_way = of(rig, two, "ann")
        with pytest.raises(RateLimitError, match="2 are under way"):
            of(rig, one, "ann")
        rig.settle(under_way)
        of(rig, one, "ann")


def test_a_verified_end_user_is_none_that_a_key_names(make_rig: Callable[..., Rig]) -> None:
    team = LimitSpec(end_user=LimitSpec(requests_per_day=1))
    app = key(key_id="k1", team_id="t", team_limits=team)
    with make_rig(max_end_users=3) as rig:
        for end_user in ("idp:ann", "1", "2"):
            of(rig, app, end_user)
        with pytest.raises(RateLimitError, match="no further one can be counted"):
            of(rig, app, "3")
        person = key(key_id="jwt-0", team_id="t", team_limits=team)
        of(rig, person, f"{VERIFIED}idp:ann")
        with pytest.raises(RateLimitError, match="requests_per_day"):
            of(rig, person, f"{VERIFIED}idp:ann")


def test_the_end_user_seen_least_recently_makes_room(make_rig: Callable[..., Rig]) -> None:
    """But never one that has used up half of a limit: its budget would begin anew."""
    principal = key(LimitSpec(end_user=LimitSpec(tokens_per_day=100)))
    with make_rig(max_end_users=3) as rig:
        for end_user, tokens in (("spent", 100), ("half", 50), ("little", 49)):
            of(rig, principal, end_user, tokens)
            rig.turn(1)
        for i in range(20):
            of(rig, principal, f"invented {i}", 49)
            rig.turn(1)
        with pytest.raises(RateLimitError):
            of(rig, principal, "spent", 1)
        with pytest.raises(RateLimitError):
            of(rig, principal, "half", 51)
        of(rig, principal, "little", 100)
        with pytest.raises(RateLimitError, match="no further one can be counted"):
            of(rig, principal, "new", 1)
        rig.turn(DAY_S)
        of(rig, principal, "new", 1)


def test_a_key_with_end_users_of_all_sorts_takes_no_others_room() -> None:
    limiter = MemoryLimiter(clock=lambda: 1.0, wall_clock=lambda: NOON_S, max_end_users=10)

    async def flood() -> None:
        for i in range(200):
            limits = LimitSpec(end_user=LimitSpec(requests_per_day=100))
            reservation = await limiter.reserve(key(limits, key_id=f"k{i % 20}"), want())
            await reservation.count_for(f"user {i}")

    asyncio.run(flood())
    assert limiter.num_end_users == 40


def test_a_new_process_goes_on_with_each_end_user_where_the_ledger_ends() -> None:
    midnight_s = int(NOON_S) // DAY_S * DAY_S

    async def history() -> PastUses:
        return PastUses(
            minute=(past_use(NOON_S - 20, end_user="ann", tokens=30),),
            end_user_days=(
                past_use(midnight_s, end_user="ann", key_id="jwt-0", usd_nanos=6 * 10**8),
                past_use(midnight_s, end_user="ann", requests=3, usd_nanos=10**8),
                past_use(midnight_s - 6 * DAY_S, end_user="ann", usd_nanos=2 * 10**8),
                past_use(midnight_s - 7 * DAY_S, end_user="ann", usd_nanos=4 * 10**8),
            ),
        )

    spec = LimitSpec(tokens_per_minute=100, requests_per_day=10, usd_per_7_days=1)
    team = LimitSpec(end_user=LimitSpec(usd_per_30_days=1))
    principal = key(LimitSpec(end_user=spec), team_id="t", team_limits=team)
    limiter = MemoryLimiter(clock=lambda: 5.0, wall_clock=lambda: NOON_S, history=history)

    async def left(end_user: str) -> dict[str, int]:
        reservation = await limiter.reserve(principal, want(requests=0))
        await reservation.count_for(end_user)
        return {state.name: state.remaining for state in reservation.states}

    async def both() -> list[dict[str, int]]:
        await limiter.start()
        return [await left(name) for name in ("ann", "bob", f"{VERIFIED}ann")]

    ann, bob, verified = asyncio.run(both())
    assert ann == {
        "tokens_per_minute": 70,
        "requests_per_day": 7,
        "usd_per_7_days": 7 * 10**8,
        "usd_per_30_days": 3 * 10**8,
    }
    assert bob["usd_per_7_days"] == 10**9
    assert verified["usd_per_30_days"] == 4 * 10**8


def test_a_week_begins_on_monday(rig: Rig) -> None:
    principal = key(LimitSpec(usd_per_week=1))
    with rig:  # noon of Sunday, 15 June 2025
        rig.reserve(principal, usd_nanos=10**9)
        with pytest.raises(BudgetError, match="usd_per_week") as gone:
            rig.reserve(principal, usd_nanos=1)
        assert gone.value.reset_s == pytest.approx(DAY_S / 2 - 0.25, abs=0.002)
        rig.turn(DAY_S / 2 - 0.25)
        rig.reserve(principal, usd_nanos=10**9)
        rig.turn(7 * DAY_S - 1)
        with pytest.raises(BudgetError):
            rig.reserve(principal, usd_nanos=1)
        rig.turn(1)
        rig.reserve(principal, usd_nanos=10**9)


@pytest.mark.parametrize("days", [7, 30])
def test_days_roll_on(rig: Rig, days: int) -> None:
    """An amount counts on its own day of UTC and on those after it, so many in all."""
    principal = key(LimitSpec.model_validate({f"usd_per_{days}_days": 1}))
    with rig:
        rig.reserve(principal, usd_nanos=6 * 10**8)
        rig.turn(DAY_S)
        late = rig.reserve(principal, usd_nanos=4 * 10**8)
        with pytest.raises(BudgetError) as gone:
            rig.reserve(principal, usd_nanos=1)
        assert gone.value.reset_s == pytest.approx((days - 1.5) * DAY_S - 0.25, abs=0.002)
        with pytest.raises(BudgetError) as longer:
            rig.reserve(principal, usd_nanos=7 * 10**8)
        assert longer.value.reset_s == pytest.approx((days - 0.5) * DAY_S - 0.25, abs=0.002)
        rig.turn((days - 1.5) * DAY_S - 1)
        with pytest.raises(BudgetError):
            rig.reserve(principal, usd_nanos=1)
        rig.turn(1)
        rig.reserve(principal, usd_nanos=6 * 10**8)
        rig.settle(late)  # given back to its own day
        rig.reserve(principal, usd_nanos=4 * 10**8)
        with pytest.raises(BudgetError):
            rig.reserve(principal, usd_nanos=1)


@pytest.mark.slow
def test_100_000_end_users_take_at_most_50_megabytes() -> None:
    spec = LimitSpec(requests_per_minute=10, tokens_per_minute=100, usd_per_day=1, usd_per_month=9)
    principal = key(LimitSpec(end_user=spec))
    limiter = MemoryLimiter(clock=lambda: 1.0, wall_clock=lambda: NOON_S)

    async def flood() -> None:
        for i in range(120_000):
            reservation = await limiter.reserve(principal, want(tokens=9, usd_nanos=10**6))
            await reservation.count_for(f"{i:0256}")
            await reservation.settle(want(tokens=8, usd_nanos=10**6).by_tier)

    tracemalloc.start()
    asyncio.run(flood())
    gc.collect()
    taken, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert limiter.num_end_users == 100_000
    assert taken < most < 50 * 2**20, (taken, most)
