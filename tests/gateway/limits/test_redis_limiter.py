"""What only limits on Redis can meet: other gateways, dead ones, and a Redis that is away."""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence

import pytest
import redis
from prometheus_client import CollectorRegistry

from gateway.errors import RateLimitError, StorageError
from gateway.limits.amounts import LimitSpec
from gateway.limits.metrics import LimitMetrics
from gateway.limits.redis_limiter import RedisLimiter
from gateway.limits.redis_scripts import Scripts
from gateway.limits.redis_store import RedisStore
from gateway.settings import SettingsError
from tests.gateway.limits.rigs import RedisRig, key, want

PRINCIPAL = key(LimitSpec(concurrent_requests=2, tokens_per_minute=100, usd_per_day=1))


@pytest.fixture
def rig(redis_url: str) -> RedisRig:
    return RedisRig(redis_url)


class FlakyStore:
    """Redis, behind a line that can be cut: before a question, or before its answer."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.cut: str | None = None
        self.held: asyncio.Event | None = None

    async def run(self, script: str, key: str, args: Sequence[str | float]) -> list[int]:
        if self.cut == "question":
            raise StorageError("cut")
        if self.held is not None:
            await self.held.wait()
        reply = await self._store.run(script, key, args)
        if self.cut == "answer":
            raise StorageError("cut")
        return reply

    async def close(self) -> None:
        await self._store.close()


@pytest.fixture
def flaky(rig: RedisRig) -> Iterator[tuple[RedisRig, FlakyStore, RedisLimiter]]:
    """A rig with a second gateway whose line can be cut."""
    store = FlakyStore(RedisStore.from_url(rig.url, timeout_s=10))
    with rig:
        limiter = RedisLimiter(store, scripts=Scripts(rig.clock), lease_s=30)
        yield rig, store, limiter
        store.cut = None
        rig.run(limiter.close())


def remaining(rig: RedisRig) -> dict[str, int]:
    """What another request of the key is told, itself not counted."""
    reservation = rig.reserve(PRINCIPAL, requests=0)
    rig.run(reservation.settle({}))
    return {state.name: state.remaining for state in reservation.states}


def test_gateways_share_their_counters(rig: RedisRig) -> None:
    with rig:
        other = rig.beside()
        one = rig.reserve(PRINCIPAL, tokens=60)
        with pytest.raises(RateLimitError):
            rig.run(other.reserve(PRINCIPAL, want(tokens=60)))
        rig.settle(one, tokens=10)
        rig.run(other.reserve(PRINCIPAL, want(tokens=60)))
        rig.run(other.close())
        assert remaining(rig) == {
            "concurrent_requests": 2,
            "tokens_per_minute": 90,
            "usd_per_day": 10**9,
        }


def test_what_a_dead_gateway_had_is_given_back(rig: RedisRig) -> None:
    with rig:
        dead = rig.beside(lease_s=30)
        rig.run(dead.reserve(PRINCIPAL, want(tokens=60, usd_nanos=10**9)))
        rig.run(dead.reserve(PRINCIPAL, want(tokens=40)))
        rig.turn(20)
        rig.run(dead.renew())
        rig.turn(29)  # 49 s in all: it lives because it renewed
        with pytest.raises(RateLimitError, match="2 are under way"):
            rig.reserve(PRINCIPAL)
        rig.turn(2)
        assert remaining(rig) == {
            "concurrent_requests": 2,
            "tokens_per_minute": 100,
            "usd_per_day": 10**9,
        }
        rig.run(dead.close())


def test_a_gateway_that_was_only_away_has_its_use_counted_once(
    flaky: tuple[RedisRig, FlakyStore, RedisLimiter],
) -> None:
    rig, store, limiter = flaky
    one = rig.run(limiter.reserve(PRINCIPAL, want(tokens=60, usd_nanos=10**9)))
    store.cut = "question"
    assert not rig.run(one.grow(want(requests=0, tokens=1)))
    rig.turn(31)
    assert remaining(rig)["tokens_per_minute"] == 100
    rig.run(one.settle(want(tokens=50, usd_nanos=5).by_tier))  # kept for later, without a word
    store.cut = None
    for _ in range(2):
        rig.run(limiter.catch_up())
        assert remaining(rig) == {
            "concurrent_requests": 2,
            "tokens_per_minute": 50,
            "usd_per_day": 10**9 - 5,
        }
    assert not rig.run(one.grow(want(requests=0, tokens=1)))


def test_an_answer_that_was_lost_enters_nothing_twice(
    flaky: tuple[RedisRig, FlakyStore, RedisLimiter],
) -> None:
    rig, store, limiter = flaky
    one = rig.run(limiter.reserve(PRINCIPAL, want(tokens=20)))
    store.cut = "answer"
    assert not rig.run(one.grow(want(requests=0, tokens=30)))  # entered, but nobody knows
    assert one.reserved == want(tokens=20)
    with pytest.raises(StorageError):
        rig.run(limiter.reserve(PRINCIPAL, want(tokens=25)))
    rig.run(one.settle(want(tokens=15).by_tier))  # settled, but nobody knows
    store.cut = None
    rig.run(limiter.catch_up())
    assert remaining(rig)["tokens_per_minute"] == 100 - 15 - 25
    rig.turn(30.5)  # the reservation that nobody knows of has no one to renew it
    assert remaining(rig)["tokens_per_minute"] == 100 - 15


def test_the_same_question_twice_is_one(rig: RedisRig) -> None:
    """As a client sends it whose connection broke before the answer."""
    with rig:
        store, scripts = RedisStore.from_url(rig.url, timeout_s=10), Scripts(rig.clock)
        line = ["minute", "n", 100, 60]
        for _ in range(3):
            reply = rig.run(store.run(scripts.reserve, "{t}", ["id", 30, 0, *line]))
            assert reply[:2] == [1, 60]
        for _ in range(3):
            reply = rig.run(
                store.run(scripts.reserve, "{t}", ["id", 30, 1, "minute", "n", 100, 40])
            )
            assert reply[:2] == [1, 100]
        settle = ["id", "minute", "n", 70]
        assert [rig.run(store.run(scripts.settle, "{t}", settle)) for _ in "12"] == [[1], [0]]
        reply = rig.run(store.run(scripts.reserve, "{t}", ["id2", 30, 0, "minute", "n", 100, 30]))
        assert reply[:2] == [1, 100]
        rig.run(store.close())


def test_who_leaves_while_redis_is_asked_leaves_nothing_behind(
    flaky: tuple[RedisRig, FlakyStore, RedisLimiter],
) -> None:
    rig, store, limiter = flaky

    async def leave_in(coroutine: object) -> None:
        store.held = asyncio.Event()
        task = asyncio.ensure_future(coroutine)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        store.held = None

    one = rig.run(limiter.reserve(PRINCIPAL, want(tokens=60)))
    rig.run(leave_in(limiter.reserve(PRINCIPAL, want(tokens=40))))
    rig.run(leave_in(one.settle(want(tokens=50).by_tier)))
    rig.run(limiter.catch_up())
    assert remaining(rig) == {
        "concurrent_requests": 2,
        "tokens_per_minute": 50,
        "usd_per_day": 10**9,
    }


def test_a_cancelled_call_does_not_mix_up_answers(redis_url: str) -> None:
    """The connection that was asked is not used for the next question."""

    async def ask() -> None:
        store, scripts = RedisStore.from_url(redis_url, timeout_s=10), Scripts()
        line = ["minute", "n", 10**6, 7]
        await store.run(scripts.reserve, "{t}", ["first", 30, 0, *line])
        for i in range(50):
            args = [f"a{i}", 30, 0, *line]
            task = asyncio.create_task(store.run(scripts.reserve, "{t}", args))
            for _ in range(i % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await store.run(scripts.renew, "{t}", [30, "first", f"none{i}"]) == [1]
        await store.close()

    asyncio.run(ask())


def test_forgotten_scripts_are_loaded_again(rig: RedisRig) -> None:
    with rig:
        one = rig.reserve(PRINCIPAL, tokens=10)
        admin = redis.Redis.from_url(rig.url)
        admin.script_flush()
        rig.settle(one, tokens=5)
        assert remaining(rig)["tokens_per_minute"] == 95
        admin.close()


def test_connections_that_broke_are_made_again(rig: RedisRig) -> None:
    with rig:
        one = rig.reserve(PRINCIPAL, tokens=10)
        admin = redis.Redis.from_url(rig.url)
        admin.client_kill_filter(_type="normal", skipme=True)
        rig.settle(one, tokens=5)
        assert remaining(rig)["tokens_per_minute"] == 95
        admin.close()


def test_without_redis_nobody_is_let_in_free_of_limits(caplog: pytest.LogCaptureFixture) -> None:
    """Refused at once; those without limits are let in; start and close do not fail."""
    registry = CollectorRegistry()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"redis://:hunter2@127.0.0.1:{taken.getsockname()[1]}/0"

        async def ask() -> None:
            limiter = RedisLimiter.from_url(url, metrics=LimitMetrics(registry))
            await limiter.start()
            for _ in range(3):
                with pytest.raises(StorageError, match="cannot be checked"):
                    await limiter.reserve(PRINCIPAL, want(tokens=1))
            await limiter.reserve(key(), want(tokens=1))
            await limiter.close()

        asyncio.run(ask())
    assert registry.get_sample_value("outrider_limit_store_errors_total") == 4
    assert "hunter2" not in caplog.text
    assert caplog.text.count("limits store failed") == 1


def test_a_redis_that_says_nothing_is_not_waited_for() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"

        async def ask() -> float:
            limiter = RedisLimiter.from_url(url, timeout_s=0.1)
            began_s = time.monotonic()
            with pytest.raises(StorageError):
                await limiter.reserve(PRINCIPAL, want(tokens=1))
            await limiter.close()
            return time.monotonic() - began_s

        assert asyncio.run(ask()) < 2


def test_closing_gives_back_what_is_open(rig: RedisRig) -> None:
    with rig:
        other = rig.beside()
        one = rig.run(other.reserve(PRINCIPAL, want(tokens=60)))
        rig.run(other.close())
        assert remaining(rig)["concurrent_requests"] == 2
        assert remaining(rig)["tokens_per_minute"] == 100
        rig.run(one.settle(want(tokens=60).by_tier))  # after the end: nothing, and no error


def test_leases_are_renewed_by_themselves(rig: RedisRig) -> None:
    scripts = Scripts(rig.clock)
    renewed: asyncio.Queue[Sequence[str | float]] = asyncio.Queue()

    class Watched(FlakyStore):
        async def run(self, script: str, key: str, args: Sequence[str | float]) -> list[int]:
            reply = await super().run(script, key, args)
            if script == scripts.renew:
                renewed.put_nowait(args)
            return reply

    async def hold() -> None:
        store = Watched(RedisStore.from_url(rig.url, timeout_s=10))
        other = RedisLimiter(store, scripts=scripts, lease_s=0.06, gateway_id="g")
        await other.start()
        await other.reserve(PRINCIPAL, want(tokens=60))
        while await renewed.get() != [0.06, "g-1"]:
            pass
        await other.close()

    with rig:
        rig.run(asyncio.wait_for(hold(), 10))


def test_nothing_is_kept_for_ever(redis_url: str) -> None:
    """By the server's own clock: every key that is made has an end."""

    async def use() -> None:
        limiter = RedisLimiter.from_url(redis_url)
        await limiter.start()
        full = {name: 1000 for name in LimitSpec.model_fields if name != "models"}
        principal = key(LimitSpec(**full))  # type: ignore[arg-type]
        one = await limiter.reserve(principal, want(tokens=10, usd_nanos=5))
        await limiter.reserve(principal, want(tokens=10, usd_nanos=5))
        await one.settle(want(tokens=5, usd_nanos=1).by_tier)
        admin = redis.Redis.from_url(redis_url)
        names = admin.keys("*")
        assert len(names) == 8  # leases, book, 2 minutes, 3 days, a month
        assert all(name.startswith(b"outrider:limits:{key:k1}") for name in names)
        assert min(admin.ttl(name) for name in names) > 60
        admin.close()
        await limiter.close()

    asyncio.run(use())


@pytest.mark.parametrize(
    "url", ["http://h:1", "localhost:6379", "redis://h:port/0", "redis+sentinel://h:1", ""]
)
def test_urls_that_cannot_be_used_are_told(url: str) -> None:
    with pytest.raises(SettingsError, match="redis_url"):
        RedisLimiter.from_url(url)
