"""A wall clock that is set by an hour or a year opens no limit without end."""

import inspect
import random
import time
from email.utils import formatdate
from pathlib import Path

import pytest

from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    BudgetError,
    FailureKind,
    RateLimitError,
)
from outrider.gateway.tenancy.keys.amounts import Amounts, LimitSpec, Want
from outrider.gateway.tenancy.keys.auth_throttle import AuthThrottle
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from outrider.gateway.tenancy.limits.redis_store import RedisStore
from outrider.gateway.upstream.breaker import Breaker
from outrider.gateway.upstream.retry_after import asked_wait_s
from outrider.gateway.wiring.upstream import build_mirror, build_transport, build_upstreams
from tests.gateway.tenancy.keys.world import World

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
        """Return how many of so many requests are let in."""
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
async def test_a_minute_does_not_follow_the_wall_clock(jump_s: float) -> None:
    clocks = Clocks()
    assert await clocks.admitted(9) == 5
    clocks.wall_s += jump_s
    assert await clocks.admitted(9) == 0
    clocks.mono_s += 61
    assert await clocks.admitted(9) == 5


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, DAY_S, -DAY_S, YEAR_S, -YEAR_S])
async def test_a_clock_that_jumps_and_comes_back_finds_its_day_used_up(jump_s: float) -> None:
    """Each day that the clock shows has its own limit, however often the clock returns to it."""

    clocks = Clocks()
    total = 0
    for _ in range(20):
        for wall_s in (NOON_S, NOON_S + jump_s):
            clocks.wall_s = wall_s
            clocks.mono_s += 61
            total += await clocks.admitted(9)
    num_days = 1 if abs(jump_s) < DAY_S / 2 else 2
    assert total == 10 * num_days


def test_the_throttle_of_wrong_keys_counts_on_a_clock_that_only_rises() -> None:
    now_s = 1000.0
    guard = AuthThrottle(lambda: now_s, burst=3, per_minute=6)
    assert [guard.count("a", b"%d" % n) for n in range(4)] == ["new"] * 3 + ["throttled"]
    now_s += YEAR_S
    assert [guard.count("a", b"later %d" % n) for n in range(4)] == ["new"] * 3 + ["throttled"]


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
async def test_a_clock_that_jumps_gives_a_reservation_back_once(jump_s: float) -> None:
    """Reserved on one day and settled on another: it counts on its own day, by what it used."""

    clocks = Clocks()
    reservation = await clocks.limiter.reserve(TENANT, ONE)
    clocks.wall_s += jump_s
    for _ in range(3):
        await reservation.settle({})
    assert await clocks.admitted(9) == 5, "the other day has its own limit"
    clocks.wall_s -= jump_s
    clocks.mono_s += 61
    assert await clocks.admitted(9) == 5
    clocks.mono_s += 61
    assert await clocks.admitted(9) == 5, "nothing is left of it"
    clocks.mono_s += 61
    assert await clocks.admitted(9) == 0, "and it was given back once"


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_key_that_expires_does_so_by_the_clock_alone(tmp_path: Path, jump_s: float) -> None:
    """A clock set right again finds its keys valid; one without an end, or revoked, stays so."""
    world = World(tmp_path)
    ends = world.store.create(KeyOrder(name="ends", expires_at=world.now_s + HOUR_S))
    endless = world.store.create(KeyOrder(name="endless"))
    revoked = world.store.create(KeyOrder(name="revoked"))
    world.store.revoke(revoked.record.key_id)

    def found(text: str) -> str:
        try:
            return world.authenticator.authenticate(f"Bearer {text}", None, "198.51.100.7").name
        except AuthenticationError as error:
            return str(error.code)

    async def main() -> None:
        for _ in range(3):
            assert found(ends.text) == "ends"
            world.now_s += jump_s
            await world.keys.refresh()
            assert found(ends.text) == ("api_key_expired" if jump_s > 0 else "ends")
            assert found(endless.text) == "endless"
            assert found(revoked.text) == "api_key_revoked"
            world.now_s -= jump_s
            await world.keys.refresh()

    world.run(main)


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
@pytest.mark.parametrize("failure", ["reset", "throttled"])
def test_no_breaker_follows_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch, failure: FailureKind, jump_s: float
) -> None:
    """The server names a date, and its clock or the gateway's is wrong by a day."""
    mono_s, wall_s = 1000.0, NOON_S
    monkeypatch.setattr("time.time", lambda: wall_s)
    breaker = Breaker(clock=lambda: mono_s, rng=random.Random(1))
    retry = {"retry-after": formatdate(NOON_S + 5, usegmt=True)}
    for _ in range(5):
        breaker.failed(breaker.began(), failure, asked_wait_s(retry))
        wall_s = NOON_S + jump_s
    assert breaker.wait_s <= 60
    assert not breaker.admits()
    mono_s += 61
    if failure == "reset":
        assert breaker.wants_probe
        breaker.probe_succeeded()
    assert breaker.admits()
    breaker.succeeded(breaker.began())
    assert breaker.state == "closed"


def test_waits_are_measured_on_a_monotonic_clock() -> None:
    for build in (build_upstreams, build_transport, build_mirror, MemoryLimiter, RedisStore):
        assert inspect.signature(build).parameters["clock"].default is time.monotonic, build
