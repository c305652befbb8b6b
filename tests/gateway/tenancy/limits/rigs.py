"""A limiter, a clock to turn, and a loop that outlives one call."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import redis

from outrider.gateway.tenancy.keys.amounts import NO_LIMITS, Amounts, LimitSpec, PastUse, Want
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.limiter import Limiter, Reservation
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from outrider.gateway.tenancy.limits.redis_limiter import RedisLimiter
from outrider.gateway.tenancy.limits.redis_scripts import Scripts
from outrider.gateway.tenancy.limits.redis_store import RedisStore

T = TypeVar("T")

NOON_S = 1_750_000_000 // 86_400 * 86_400 + 43_200.25
"""Noon of a day in June 2025 (UTC), a quarter of a second into it."""


def past_use(at_s: float = NOON_S, **changed: Any) -> PastUse:
    """What the ledger has of a key in a team."""
    usual = {"key_id": "k1", "team_id": "t", "tier": "large", "requests": 1, "tokens": 0}
    return PastUse(at_s=int(at_s), **{**usual, "usd_nanos": 0, **changed})


_CLOCK_KEY = "test:clock"
_CLOCK = f"return tonumber(redis.call('GET', '{_CLOCK_KEY}'))"


class Rig(Protocol):
    """The interface of both kinds. A context manager."""

    limiter: Limiter
    now_s: float

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T: ...

    def turn(self, seconds: float) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...


class _BaseRig:
    limiter: Limiter

    def __init__(self, now_s: float = NOON_S) -> None:
        self.now_s = now_s
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def turn(self, seconds: float) -> None:
        self.now_s += seconds

    def reserve(self, principal: Principal, **amounts: Any) -> Reservation:
        """On the tier "large"."""
        return self.run(self.limiter.reserve(principal, want(**amounts)))

    def settle(self, reservation: Reservation, **amounts: Any) -> None:
        self.run(reservation.settle(want(**amounts).by_tier))

    def __enter__(self) -> Self:
        self.run(self.limiter.start())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.run(self.limiter.close())
        self._runner.close()


class MemoryRig(_BaseRig):
    """Both of its clocks are the one that the test turns."""

    def __init__(self, now_s: float = NOON_S, **limiter: Any) -> None:
        super().__init__(now_s)
        self.limiter = MemoryLimiter(
            clock=lambda: self.now_s, wall_clock=lambda: self.now_s, **limiter
        )


class RedisRig(_BaseRig):
    """The clock is a key in Redis. `beside`: another gateway on the same Redis."""

    clock = _CLOCK

    def __init__(self, url: str, now_s: float = NOON_S, **scripts: Any) -> None:
        super().__init__(now_s)
        self.url = url
        self._redis = redis.Redis.from_url(url)
        self._redis.flushall()
        self.turn(0.0)
        self.limiter = self.beside(**scripts)

    def beside(self, *, lease_s: float = 1e9, **scripts: Any) -> RedisLimiter:
        return RedisLimiter(
            RedisStore.from_url(self.url, timeout_s=10.0),
            scripts=Scripts(_CLOCK, **scripts),
            lease_s=lease_s,
        )

    def turn(self, seconds: float) -> None:
        super().turn(seconds)
        self._redis.set(_CLOCK_KEY, repr(self.now_s))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, tb)
        self._redis.close()


def want(*, requests: int = 1, tokens: int = 0, usd_nanos: int = 0, tier: str = "large") -> Want:
    """Return wanted amounts of one tier."""
    return Want(by_tier={tier: Amounts(requests=requests, tokens=tokens, usd_nanos=usd_nanos)})


def key(
    limits: LimitSpec = NO_LIMITS,
    *,
    key_id: str = "k1",
    team_id: str | None = None,
    team_limits: LimitSpec = NO_LIMITS,
) -> Principal:
    """A principal with these limits."""
    return Principal(
        key_id=key_id,
        name=key_id,
        tenant=team_id or key_id,
        team_id=team_id,
        limits=limits,
        team_limits=team_limits,
    )
