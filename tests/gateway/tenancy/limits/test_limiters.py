"""Behaviour of every limiter, in memory and on Redis alike."""

import asyncio
import random
from collections.abc import Callable

import pytest

from outrider.gateway.contract.errors.tree import BudgetError, RateLimitError, StorageError
from outrider.gateway.tenancy.keys.amounts import Amounts, LimitSpec, Want
from outrider.gateway.tenancy.limits.limiter import Limiter
from outrider.gateway.tenancy.limits.unlimited import UnlimitedReservation
from tests.gateway.tenancy.limits.rigs import NOON_S, RedisRig, Rig, key, want


def test_tokens_of_a_minute_slide(rig: Rig) -> None:
    """An amount counts for 60 whole seconds after its own, and not one more."""
    principal = key(LimitSpec(tokens_per_minute=100))
    with rig:
        rig.reserve(principal, tokens=60)
        rig.turn(30)
        rig.reserve(principal, tokens=40)
        with pytest.raises(RateLimitError, match=r"tokens_per_minute is 100 tokens") as full:
            rig.reserve(principal, tokens=1)
        assert full.value.retry_after_s == pytest.approx(30.75, abs=0.002)  # 12:01:01 is in 30.75
        rig.turn(30.7)
        with pytest.raises(RateLimitError):
            rig.reserve(principal, tokens=1)
        rig.turn(0.06)
        rig.reserve(principal, tokens=60)
        with pytest.raises(RateLimitError):
            rig.reserve(principal, tokens=1)


def test_unused_amounts_are_given_back_to_their_second(rig: Rig) -> None:
    principal = key(LimitSpec(tokens_per_minute=100, requests_per_minute=2))
    with rig:
        one = rig.reserve(principal, tokens=100)
        rig.turn(10)
        rig.settle(one, tokens=30)
        two = rig.reserve(principal, tokens=70)
        with pytest.raises(RateLimitError, match="requests_per_minute"):
            rig.reserve(principal)
        rig.turn(51)  # the first one's 30 are past
        three = rig.reserve(principal, tokens=30)
        rig.settle(two, tokens=70)
        assert {s.name: s.remaining for s in three.states}["tokens_per_minute"] == 0
        rig.settle(one, tokens=0)  # again is nothing
        with pytest.raises(RateLimitError):
            rig.reserve(principal, tokens=1, requests=0)


def test_nothing_used_gives_the_request_back_too(rig: Rig) -> None:
    principal = key(
        LimitSpec(requests_per_minute=1, requests_per_day=1, concurrent_requests=1, usd_per_day=1)
    )
    with rig:
        for _ in range(3):
            reservation = rig.reserve(principal, usd_nanos=10**9)
            with pytest.raises((RateLimitError, BudgetError)):
                rig.reserve(principal)
            rig.run(reservation.settle({}))


def test_requests_under_way_end_with_their_settling(rig: Rig) -> None:
    principal = key(LimitSpec(concurrent_requests=2))
    with rig:
        one, _two = rig.reserve(principal), rig.reserve(principal)
        rig.turn(10_000)
        with pytest.raises(RateLimitError, match="2 are under way") as full:
            rig.reserve(principal)
        assert full.value.retry_after_s == 1.0
        rig.settle(one)
        rig.reserve(principal)


def test_a_day_is_utcs(rig: Rig) -> None:
    principal = key(LimitSpec(requests_per_day=2, tokens_per_day=10))
    with rig:
        rig.reserve(principal, tokens=3)
        late = rig.reserve(principal, tokens=3)
        with pytest.raises(RateLimitError, match="requests_per_day") as full:
            rig.reserve(principal)
        assert full.value.retry_after_s == pytest.approx(43_199.75, abs=0.002)
        assert not full.value.should_retry
        rig.turn(43_199.5)
        with pytest.raises(RateLimitError) as nearly:
            rig.reserve(principal)
        assert nearly.value.should_retry  # a quarter of a second is worth waiting for
        rig.turn(0.5)
        states = rig.reserve(principal, tokens=10).states
        rig.settle(late)  # of yesterday: nothing comes back today
        assert [s.remaining for s in states] == [1, 0]
        with pytest.raises(RateLimitError, match="tokens_per_day"):
            rig.reserve(principal, tokens=1)


def test_a_budget_says_when_it_begins_anew(rig: Rig) -> None:
    principal = key(LimitSpec(usd_per_month=0.5))
    with rig:
        rig.reserve(principal, usd_nanos=400_000_000)
        with pytest.raises(BudgetError) as gone:
            rig.reserve(principal, usd_nanos=100_000_001)
        assert "$0.50: $0.40 are used or reserved" in str(gone.value)
        assert "$0.100000001" in str(gone.value)
        assert gone.value.reset_s is not None
        rig.turn(gone.value.reset_s - 0.005)  # 30 June, 23:59:59.995
        with pytest.raises(BudgetError):
            rig.reserve(principal, usd_nanos=100_000_001)
        rig.turn(0.006)
        rig.reserve(principal, usd_nanos=500_000_000)


def test_months_end_where_the_calendar_ends_them(make_rig: Callable[[], Rig]) -> None:
    """2024 had a 29 February, 2100 has none; a year ends as well."""
    principal = key(LimitSpec(usd_per_month=1))
    ends = {
        1_706_745_600.0: 29,  # 1 February 2024
        4_105_123_200.0: 28,  # 1 February 2100
        1_764_547_200.0: 31,  # 1 December 2025
        1_767_225_600.0: 31,  # 1 January 2026
    }
    with make_rig() as rig:
        for start_s, num_days in ends.items():
            rig.turn(start_s - rig.now_s)
            rig.reserve(principal, usd_nanos=10**9)
            with pytest.raises(BudgetError) as gone:
                rig.reserve(principal, usd_nanos=1)
            assert gone.value.reset_s == pytest.approx(num_days * 86_400, abs=0.002)


def test_a_request_that_can_never_fit_is_told_so(rig: Rig) -> None:
    principal = key(LimitSpec(tokens_per_minute=100, requests_per_minute=10))
    with rig:
        with pytest.raises(BudgetError, match=r"101 tokens.*is 100 tokens.*never") as never:
            rig.reserve(principal, tokens=101)
        assert never.value.reset_s is None
        assert never.value.limit == "tokens_per_minute"
        rig.reserve(principal, tokens=100)
        nothing = key(LimitSpec(requests_per_day=0), key_id="k2")
        with pytest.raises(BudgetError, match="is 0"):
            rig.reserve(nothing)


def test_a_free_request_needs_no_budget(rig: Rig) -> None:
    with rig:
        rig.reserve(key(LimitSpec(usd_per_day=0)), tokens=10)


def test_all_or_nothing(rig: Rig) -> None:
    """The team's limit refuses: nothing is entered on the key's."""
    principal = key(
        LimitSpec(tokens_per_minute=100, requests_per_day=5),
        team_id="t",
        team_limits=LimitSpec(tokens_per_minute=50),
    )
    with rig:
        with pytest.raises(BudgetError, match="the team's limit"):
            rig.reserve(principal, tokens=60)
        states = rig.reserve(principal, tokens=50).states
        assert [(s.scope, s.name, s.remaining) for s in states] == [
            ("team", "tokens_per_minute", 0),
            ("key", "tokens_per_minute", 50),
            ("key", "requests_per_day", 4),
        ]


def test_keys_of_a_team_share_its_limits(rig: Rig) -> None:
    limits = LimitSpec(concurrent_requests=1)
    team = LimitSpec(tokens_per_day=100)
    one = key(limits, key_id="k1", team_id="t", team_limits=team)
    two = key(limits, key_id="k2", team_id="t", team_limits=team)
    with rig:
        rig.reserve(one, tokens=70)
        rig.reserve(two, tokens=30)
        with pytest.raises(RateLimitError, match="The team's limit tokens_per_day"):
            rig.reserve(key(key_id="k3", team_id="t", team_limits=team), tokens=1)
        rig.reserve(key(key_id="k4", team_id="u", team_limits=team), tokens=100)


def test_limits_of_one_tier_count_requests_it_may_answer(rig: Rig) -> None:
    principal = key(
        LimitSpec(tokens_per_minute=100, models={"large": LimitSpec(tokens_per_minute=40)})
    )
    both = Want(by_tier={"small": Amounts(tokens=30), "large": Amounts(tokens=35)})
    with rig:
        one = rig.run(rig.limiter.reserve(principal, both))
        assert [(s.model, s.remaining) for s in one.states] == [("large", 5), (None, 65)]
        with pytest.raises(RateLimitError, match="tokens_per_minute for large") as full:
            rig.run(rig.limiter.reserve(principal, both))
        assert full.value.tier == "large"
        two = rig.run(rig.limiter.reserve(principal, want(tokens=65, tier="small")))
        rig.run(one.settle({"small": Amounts(tokens=30)}))
        # The small model answered: the large one's limit is free, of all tiers 30 + 65 are taken.
        three = rig.run(rig.limiter.reserve(principal, want(tokens=5, tier="large")))
        assert [(s.model, s.remaining) for s in three.states] == [(None, 0), ("large", 35)]
        rig.run(two.settle({}))


def test_tiers_that_both_wrote_add_up(rig: Rig) -> None:
    principal = key(LimitSpec(tokens_per_minute=100, requests_per_minute=5))
    both = Want(by_tier={"small": Amounts(tokens=30), "large": Amounts(tokens=40)})
    with rig:
        one = rig.run(rig.limiter.reserve(principal, both))
        more = Want(by_tier={"large": Amounts(requests=0, tokens=20)})
        assert rig.run(one.grow(more))
        assert one.reserved.by_tier["large"] == Amounts(tokens=60)
        rig.run(one.settle({"small": Amounts(tokens=30), "large": Amounts(tokens=25)}))
        two = rig.reserve(principal, tokens=45)
        remaining = {s.name: s.remaining for s in two.states}
        assert remaining == {"requests_per_minute": 3, "tokens_per_minute": 0}


def test_growing_is_all_or_nothing_and_counts_no_request(rig: Rig) -> None:
    principal = key(
        LimitSpec(
            requests_per_minute=2, concurrent_requests=1, tokens_per_minute=100, usd_per_day=1
        )
    )
    more = want(requests=0, tokens=30, usd_nanos=400_000_000)
    with rig:
        one = rig.reserve(principal, tokens=30, usd_nanos=400_000_000)
        assert rig.run(one.grow(more))
        assert not rig.run(one.grow(more))  # tokens would fit, money does not
        assert one.reserved == want(tokens=60, usd_nanos=800_000_000)
        remaining = {s.name: s.remaining for s in one.states}
        assert remaining["tokens_per_minute"] == 40
        assert remaining["requests_per_minute"] == 1
        rig.settle(one, tokens=45, usd_nanos=500_000_000)
        assert not rig.run(one.grow(want(requests=0, tokens=1)))
        two = rig.reserve(principal, tokens=55, usd_nanos=500_000_000)
        assert {s.remaining for s in two.states} == {0}


def test_growth_counts_when_it_is_taken_and_is_given_back_first(rig: Rig) -> None:
    principal = key(LimitSpec(tokens_per_minute=100))
    with rig:
        one = rig.reserve(principal, tokens=50)
        rig.turn(40)
        assert rig.run(one.grow(want(requests=0, tokens=50)))
        rig.settle(one, tokens=70)  # 50 of the first second, 20 of the fortieth
        with pytest.raises(RateLimitError) as full:
            rig.reserve(principal, tokens=31)
        assert full.value.retry_after_s == pytest.approx(20.75, abs=0.002)
        rig.turn(20.75)
        rig.reserve(principal, tokens=80)
        with pytest.raises(RateLimitError):
            rig.reserve(principal, tokens=1)


def test_growing_onto_another_tier_is_the_same_request(rig: Rig) -> None:
    tiers = {"small": LimitSpec(requests_per_minute=5), "large": LimitSpec(requests_per_minute=5)}
    principal = key(LimitSpec(requests_per_minute=5, tokens_per_minute=100, models=tiers))
    with rig:
        one = rig.run(rig.limiter.reserve(principal, want(tokens=10, tier="small")))
        assert rig.run(one.grow(want(tokens=20, tier="large")))
        left = {(s.name, s.model): s.remaining for s in one.states}
        assert left["requests_per_minute", None] == 4
        assert left["requests_per_minute", "small"] == left["requests_per_minute", "large"] == 4
        assert left["tokens_per_minute", None] == 70


def test_a_request_is_counted_before_its_tokens_are_known(rig: Rig) -> None:
    tiers = {"large": LimitSpec(requests_per_minute=1)}
    principal = key(LimitSpec(requests_per_minute=3, tokens_per_minute=100, models=tiers))
    alone = Want(by_tier={"": Amounts(requests=1)})
    with rig:
        one, two = (rig.run(rig.limiter.reserve(principal, alone)) for _ in range(2))
        rig.run(one.extend(want(tokens=60)))
        left = {(s.name, s.model): s.remaining for s in one.states}
        assert left["requests_per_minute", None] == 1  # still one request each
        assert left["requests_per_minute", "large"] == 0
        assert left["tokens_per_minute", None] == 40
        with pytest.raises(RateLimitError) as full:
            rig.run(two.extend(want(tokens=10)))
        assert full.value.tier == "large"
        with pytest.raises(BudgetError, match="can never be let in"):
            rig.run(two.extend(want(tokens=101, tier="small")))
        rig.run(two.extend(want(tokens=40, tier="small")))  # a refusal has entered nothing
        rig.run(two.settle({"": Amounts(requests=1)}))
        rig.run(one.settle(want(tokens=5).by_tier))
        with pytest.raises(StorageError):
            rig.run(two.extend(want(tokens=1)))
        three = rig.run(rig.limiter.reserve(principal, alone))
        left = {(s.name, s.model): s.remaining for s in three.states}
        assert left["requests_per_minute", None] == 0
        assert left["tokens_per_minute", None] == 95


def test_settling_more_than_is_reserved_keeps_all_and_says_so(rig: Rig) -> None:
    principal = key(LimitSpec(tokens_per_minute=140, concurrent_requests=1))
    with rig:
        for used in (
            {"large": Amounts(tokens=41)},
            {"small": Amounts(tokens=1)},
            {"large": Amounts(requests=2, tokens=1)},
        ):
            one = rig.reserve(principal, tokens=40)
            with pytest.raises(ValueError, match="more than is reserved"):
                rig.run(one.settle(used))
            rig.run(one.settle({}))  # too late
        two = rig.reserve(principal, tokens=20)
        assert {s.name: s.remaining for s in two.states}["tokens_per_minute"] == 0


def test_a_request_that_names_no_tier_counts_for_key_and_team(rig: Rig) -> None:
    principal = key(
        LimitSpec(requests_per_minute=2, models={"large": LimitSpec(requests_per_minute=0)}),
        team_id="t",
        team_limits=LimitSpec(requests_per_minute=1),
    )
    nowhere = Want(by_tier={"": Amounts(requests=1)})
    with rig:
        one = rig.run(rig.limiter.reserve(principal, nowhere))
        with pytest.raises(RateLimitError, match="team's"):
            rig.run(rig.limiter.reserve(principal, nowhere))
        rig.run(one.settle({"": Amounts(requests=1)}))
        with pytest.raises(RateLimitError, match="team's"):
            rig.run(rig.limiter.reserve(principal, nowhere))


def test_no_limits_cost_nothing(rig: Rig) -> None:
    with rig:
        for principal in (key(), key(LimitSpec(models={"large": LimitSpec()}), team_id="t")):
            one = rig.reserve(principal, tokens=10)
            assert isinstance(one, UnlimitedReservation)
            assert one.states == ()
            assert rig.run(one.grow(want(requests=0, tokens=5)))
            assert one.reserved == want(tokens=15)
            with pytest.raises(ValueError, match="more than is reserved"):
                rig.settle(one, tokens=16)


def test_limits_that_are_changed_keep_what_was_counted(rig: Rig) -> None:
    with rig:
        rig.reserve(key(LimitSpec(tokens_per_day=100)), tokens=80)
        wider = rig.reserve(key(LimitSpec(tokens_per_day=200)), tokens=50)
        assert [s.remaining for s in wider.states] == [70]
        with pytest.raises(RateLimitError) as full:
            rig.reserve(key(LimitSpec(tokens_per_day=100)), tokens=1)
        assert full.value.headers["x-ratelimit-remaining-tokens"] == "0"


def test_a_refusal_says_what_keeps_it_out_for_longest(rig: Rig) -> None:
    principal = key(
        LimitSpec(requests_per_minute=1, tokens_per_day=10, usd_per_day=0.1, concurrent_requests=1)
    )
    with rig:
        rig.reserve(principal, tokens=10, usd_nanos=10**8)
        with pytest.raises(RateLimitError, match="requests_per_minute"):
            rig.reserve(principal)
        with pytest.raises(RateLimitError, match="tokens_per_day"):
            rig.reserve(principal, tokens=1)
        with pytest.raises(BudgetError, match="usd_per_day"):
            rig.reserve(principal, tokens=1, usd_nanos=1)
        with pytest.raises(BudgetError, match="never"):
            rig.reserve(principal, tokens=11, usd_nanos=1)


def test_large_amounts_are_exact(rig: Rig) -> None:
    """Near 2^53, where a sum of doubles would round."""
    most = 2**53
    principal = key(LimitSpec(tokens_per_minute=most, tokens_per_day=most))
    with rig:
        one = rig.reserve(principal, tokens=most - 1)
        two = rig.reserve(principal, tokens=1)
        with pytest.raises(RateLimitError):
            rig.reserve(principal, tokens=1)
        rig.settle(two, tokens=1)
        rig.settle(one, tokens=most - 4)
        three = rig.reserve(principal, tokens=2)
        assert {s.remaining for s in three.states} == {1}


@pytest.mark.slow
def test_fifty_clients_of_two_hundred_requests_never_pass_a_limit(
    rig: Rig,
) -> None:
    """Half of them on another gateway, where several share the counters."""
    max_tokens, max_requests, max_open, max_nanos = 18_000, 1_500, 20, 5 * 10**8
    principal = key(
        LimitSpec(tokens_per_minute=max_tokens, concurrent_requests=max_open),
        team_id="t",
        team_limits=LimitSpec(requests_per_minute=max_requests, usd_per_day=0.5),
    )
    open_now = charged_tokens = charged_nanos = num_let_in = most_open = num_refused = 0
    reserved_tokens = most_tokens = 0

    async def client(limiter: Limiter, rng: random.Random) -> None:
        nonlocal open_now, charged_tokens, charged_nanos, num_let_in, most_open, num_refused
        nonlocal reserved_tokens, most_tokens
        for _ in range(200):
            tokens, nanos = rng.randint(1, 60), rng.randint(0, 10**6)
            try:
                one = await limiter.reserve(principal, want(tokens=tokens, usd_nanos=nanos))
            except (RateLimitError, BudgetError):
                num_refused += 1
                await asyncio.sleep(0)
                continue
            open_now += 1
            reserved_tokens += tokens
            most_open = max(most_open, open_now)
            most_tokens = max(most_tokens, reserved_tokens + charged_tokens)
            if rng.random() < 0.3 and await one.grow(want(requests=0, tokens=10)):
                tokens += 10
                reserved_tokens += 10
            await asyncio.sleep(0)
            used = rng.randint(0, tokens)
            kept = rng.random() < 0.9
            # Counted before the settling: what is given back may be taken before it returns.
            open_now -= 1
            reserved_tokens -= tokens
            if kept:
                charged_tokens += used
                charged_nanos += nanos
                num_let_in += 1
            await one.settle(want(tokens=used, usd_nanos=nanos).by_tier if kept else {})

    async def everybody(limiters: list[Limiter]) -> None:
        clients = [client(limiters[i % len(limiters)], random.Random(i)) for i in range(50)]
        await asyncio.gather(*clients)

    with rig:
        limiters: list[Limiter] = [rig.limiter]
        if isinstance(rig, RedisRig):
            limiters.append(rig.beside())
        rig.run(everybody(limiters))
        for limiter in limiters[1:]:
            rig.run(limiter.close())
        states = {
            s.name: s
            for s in rig.reserve(
                key(
                    LimitSpec(tokens_per_minute=2**40, concurrent_requests=100),
                    team_id="t",
                    team_limits=LimitSpec(requests_per_minute=2**40, usd_per_day=100.0),
                )
            ).states
        }
    assert most_open <= max_open
    assert most_tokens <= max_tokens
    assert charged_tokens <= max_tokens
    assert num_let_in <= max_requests
    assert charged_nanos <= max_nanos
    assert num_refused > 100  # the limits were pushed against
    assert 2**40 - states["tokens_per_minute"].remaining == charged_tokens
    assert 2**40 - states["requests_per_minute"].remaining == num_let_in + 1
    assert 100 * 10**9 - states["usd_per_day"].remaining == charged_nanos
    assert states["concurrent_requests"].remaining == 99


def test_clocks_are_the_tests_own(rig: Rig) -> None:
    """Else the tests above would pass by accident at some times of the day."""
    with rig:
        states = rig.reserve(key(LimitSpec(requests_per_day=1))).states
        assert rig.now_s == NOON_S
        assert states[0].reset_s == pytest.approx(43_199.75, abs=0.002)
