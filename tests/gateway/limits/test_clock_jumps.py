"""A wall clock that is set by an hour or a year opens no limit without end."""

import asyncio

import pytest

from gateway.errors.tree import BudgetError, RateLimitError
from gateway.limits.memory_limiter import MemoryLimiter
from gateway.tenants.amounts import Amounts, LimitSpec, Want
from gateway.tenants.auth_throttle import AuthThrottle
from gateway.tenants.principal import Principal

HOUR_S, DAY_S, YEAR_S = 3600.0, 86_400.0, 365 * 86_400.0
NOON_S = 20_000 * DAY_S + 43_200
LIMITS = LimitSpec(requests_per_minute=5, requests_per_day=10, usd_per_month=1.0)
TENANT = Principal(key_id="k", name="k", tenant="k", limits=LIMITS)
ONE = Want(by_tier={"small": Amounts(requests=1, usd_nanos=1)})


class Clocks:
    """A monotonic clock and a wall clock that tests set."""

    def __init__(self) -> None:
        self.mono_s = 1000.0
        self.wall_s = NOON_S
        self.limiter = MemoryLimiter(clock=lambda: self.mono_s, wall_clock=lambda: self.wall_s)

    async def admitted(self, num_tries: int) -> int:
        """How many of so many requests are let in."""
        num = 0
        for _ in range(num_tries):
            try:
                reservation = await self.limiter.reserve(TENANT, ONE)
            except (RateLimitError, BudgetError):
                continue
            await reservation.settle(ONE.by_tier)
            num += 1
        return num


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, YEAR_S, -YEAR_S])
def test_a_minute_does_not_follow_the_wall_clock(jump_s: float) -> None:
    async def main() -> None:
        clocks = Clocks()
        assert await clocks.admitted(9) == 5
        clocks.wall_s += jump_s
        assert await clocks.admitted(9) == 0
        clocks.mono_s += 61
        assert await clocks.admitted(9) == 5

    asyncio.run(main())


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, DAY_S, -DAY_S, YEAR_S, -YEAR_S])
def test_a_clock_that_jumps_and_comes_back_finds_its_day_used_up(jump_s: float) -> None:
    """Each day that the clock shows has its own limit, however often the clock returns to it."""

    async def main() -> None:
        clocks = Clocks()
        total = 0
        for _ in range(20):
            for wall_s in (NOON_S, NOON_S + jump_s):
                clocks.wall_s = wall_s
                clocks.mono_s += 61
                total += await clocks.admitted(9)
        num_days = 1 if abs(jump_s) < DAY_S / 2 else 2
        assert total == 10 * num_days

    asyncio.run(main())


def test_the_throttle_of_wrong_keys_counts_on_a_clock_that_only_rises() -> None:
    now_s = 1000.0
    guard = AuthThrottle(lambda: now_s, burst=3, per_minute=6)
    assert [guard.count("a", b"%d" % n) for n in range(4)] == ["new"] * 3 + ["throttled"]
    now_s += YEAR_S
    assert [guard.count("a", b"later %d" % n) for n in range(4)] == ["new"] * 3 + ["throttled"]
