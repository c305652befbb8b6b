"""Limits on Redis: other gateways, dead ones, and a Redis that is away."""

import asyncio
import socket
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, get_args

import pytest
import redis
from prometheus_client import CollectorRegistry

from outrider.gateway.contract.errors.tree import RateLimitError, StorageError
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tenancy.keys.amounts import LimitName, LimitSpec
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics
from outrider.gateway.tenancy.limits.redis_limiter import RedisLimiter
from outrider.gateway.tenancy.limits.redis_scripts import Scripts
from outrider.gateway.tenancy.limits.redis_store import RedisStore
from tests.gateway.tenancy.limits.rigs import RedisRig, key, want

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
    """Return what another request of the key is told, itself not counted."""
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


def test_reservations_of_a_dead_gateway_are_given_back(rig: RedisRig) -> None:
    with rig:
        dead = rig.beside(lease_s=30)
        rig.run(dead.reserve(PRINCIPAL, want(tokens=60, usd_nanos=10**9)))
        rig.run(dead.reserve(PRINCIPAL, want(tokens=40)))
        rig.turn(20)
        rig.run(dead.leases.renew())
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
        rig.run(limiter.leases.catch_up())
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
    rig.run(limiter.leases.catch_up())
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


def test_a_request_cancelled_during_a_redis_call_leaves_nothing_behind(
    flaky: tuple[RedisRig, FlakyStore, RedisLimiter],
) -> None:
    rig, store, limiter = flaky

    async def leave_in(coroutine: Coroutine[Any, Any, object]) -> None:
        store.held = asyncio.Event()
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        store.held = None

    one = rig.run(limiter.reserve(PRINCIPAL, want(tokens=60)))
    rig.run(leave_in(limiter.reserve(PRINCIPAL, want(tokens=40))))
    rig.run(leave_in(one.settle(want(tokens=50).by_tier)))
    rig.run(limiter.leases.catch_up())
    assert remaining(rig) == {
        "concurrent_requests": 2,
        "tokens_per_minute": 50,
        "usd_per_day": 10**9,
    }


async def test_a_cancelled_call_does_not_mix_up_answers(redis_url: str) -> None:
    """The connection that was asked is not used for the next question."""

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


def test_without_redis_limited_requests_are_refused(caplog: pytest.LogCaptureFixture) -> None:
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


def test_closing_gives_back_open_reservations(rig: RedisRig) -> None:
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


def poison(url: str, name: str) -> None:
    """Put another kind of value under one of a tenant's names, as another program might."""
    admin = redis.Redis.from_url(url)
    admin.delete(name)
    admin.rpush(name, "garbage")
    admin.close()


def test_a_tenant_whose_counters_fail_costs_no_other_its_lease(
    flaky: tuple[RedisRig, FlakyStore, RedisLimiter],
) -> None:
    """The same holds for a node of a cluster that is away: it has some tenants' counters only."""
    rig, _, limiter = flaky
    failing, healthy = (
        key(LimitSpec(concurrent_requests=1), key_id=key_id) for key_id in ("failing", "healthy")
    )
    rig.run(limiter.reserve(failing, want()))
    rig.run(limiter.reserve(healthy, want()))
    poison(rig.url, "outrider:limits:{key:failing}:leases")
    rig.turn(20)
    with pytest.raises(StorageError):
        rig.run(limiter.leases.renew())
    rig.turn(20)  # past the first lease
    with pytest.raises(RateLimitError, match="1 are under way"):
        rig.reserve(healthy)
    with pytest.raises(StorageError):
        rig.reserve(failing)


def test_a_tenant_whose_counters_fail_does_not_keep_others_from_settling(
    flaky: tuple[RedisRig, FlakyStore, RedisLimiter],
) -> None:
    rig, store, limiter = flaky
    failing = rig.run(limiter.reserve(key(PRINCIPAL.limits, key_id="failing"), want(tokens=60)))
    healthy = rig.run(limiter.reserve(PRINCIPAL, want(tokens=60)))
    store.cut = "question"
    for reservation in (failing, healthy):
        rig.run(reservation.settle(want(tokens=50).by_tier))
    store.cut = None
    poison(rig.url, "outrider:limits:{key:failing}:book")
    with pytest.raises(StorageError):
        rig.run(limiter.leases.catch_up())
    assert remaining(rig)["tokens_per_minute"] == 50


def test_a_counter_that_fails_has_the_others_given_back_once(
    flaky: tuple[RedisRig, FlakyStore, RedisLimiter],
) -> None:
    rig, _, limiter = flaky
    rig.run(limiter.reserve(PRINCIPAL, want(tokens=40)))
    one = rig.run(limiter.reserve(PRINCIPAL, want(tokens=60, usd_nanos=5)))
    day = f"outrider:limits:{{key:k1}}:d:key:k1::usd_per_day:{int(rig.now_s // 86_400)}"
    poison(rig.url, day)
    rig.run(one.settle({}))
    for _ in range(3):
        with suppress(StorageError):
            rig.run(limiter.leases.catch_up())
    redis.Redis.from_url(rig.url).delete(day)
    assert remaining(rig) == {
        "concurrent_requests": 1,
        "tokens_per_minute": 60,
        "usd_per_day": 10**9,
    }


def test_a_full_redis_takes_back_and_lets_nothing_in(rig: RedisRig) -> None:
    admin = redis.Redis.from_url(rig.url)
    with rig:
        one = rig.reserve(PRINCIPAL, tokens=60)
        admin.config_set("maxmemory", 1)
        try:
            with pytest.raises(StorageError):
                rig.reserve(PRINCIPAL, tokens=1)
            rig.settle(one, tokens=10)
            assert b"open:key:k1::concurrent_requests" not in admin.hgetall(
                "outrider:limits:{key:k1}:book"
            )
        finally:
            admin.config_set("maxmemory", 0)
        assert remaining(rig)["tokens_per_minute"] == 90
    admin.close()


def test_a_primary_that_became_a_replica_is_connected_to_anew(redis_url: str) -> None:
    """Its name may lead to the new primary; a connection that is kept never does."""
    admin = redis.Redis.from_url(redis_url)
    own = admin.client_id()

    async def ask() -> None:
        limiter = RedisLimiter.from_url(redis_url)
        await limiter.reserve(PRINCIPAL, want(tokens=1))
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            with pytest.raises(StorageError):
                await limiter.reserve(PRINCIPAL, want(tokens=1))
            for _ in range(1000):
                left = [c["id"] for c in admin.client_list(_type="normal") if int(c["id"]) != own]
                if not left:
                    break
            assert not left
        finally:
            admin.execute_command("REPLICAOF", "NO", "ONE")
        await limiter.reserve(PRINCIPAL, want(tokens=1))
        await limiter.close()

    asyncio.run(ask())
    admin.close()


def test_a_cluster_that_cannot_be_reached_is_an_outage() -> None:
    """Its client's own errors end neither the start, nor the task that renews leases."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"redis+cluster://127.0.0.1:{taken.getsockname()[1]}"

        async def ask() -> None:
            limiter = RedisLimiter.from_url(url)
            await limiter.start()
            with pytest.raises(StorageError, match="cannot be checked"):
                await limiter.reserve(PRINCIPAL, want(tokens=1))
            await limiter.close()

        asyncio.run(ask())


@pytest.mark.parametrize("num_turns", range(4))
async def test_closing_while_redis_is_away_ends(num_turns: int) -> None:
    """Also in the very turn in which the task that renews leases is told of a failure."""

    class Away:
        is_away = False

        async def run(self, *_: object) -> list[int]:
            if self.is_away:
                raise StorageError("away")
            return [1, *([0, -1, 0] * len(LimitSpec.model_fields))]

        async def close(self) -> None:
            pass

    store = Away()
    limiter = RedisLimiter(store)
    await limiter.start()
    one = await limiter.reserve(PRINCIPAL, want())
    store.is_away = True
    await one.settle({})
    for _ in range(num_turns):
        await asyncio.sleep(0)
    await asyncio.wait({asyncio.create_task(limiter.close())}, timeout=5)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:  # a second cancellation is not lost
        task.cancel()
    assert not left


@pytest.mark.parametrize("jump_s", [100.0, 3_600.0, 86_400.0])
def test_a_clock_of_redis_that_jumps_and_comes_back_keeps_no_minute_full(
    rig: RedisRig, jump_s: float
) -> None:
    """What was entered while it was ahead counts for a minute, not until it is there again."""
    principal = key(LimitSpec(tokens_per_minute=100))
    with rig:
        rig.turn(jump_s)
        one, two = rig.reserve(principal, tokens=60), rig.reserve(principal, tokens=40)
        rig.turn(-jump_s)
        with pytest.raises(RateLimitError) as full:
            rig.reserve(principal, tokens=1)
        assert full.value.retry_after_s == pytest.approx(60.75, abs=0.002)
        rig.settle(one, tokens=10)  # too late to be given back: a minute is not long
        rig.turn(61)
        rig.settle(two, tokens=10)
        assert rig.reserve(principal, tokens=100).states[0].remaining == 0
        rig.turn(61)
        assert rig.reserve(principal, tokens=100).states[0].remaining == 0


@pytest.mark.parametrize("jump_s", [100.0, 3_600.0, 86_400.0])
def test_a_dead_gateway_holds_nothing_until_a_clock_set_back_is_there_again(
    rig: RedisRig, jump_s: float
) -> None:
    with rig:
        dead, alive = rig.beside(lease_s=30), rig.beside(lease_s=30)
        for limiter in (dead, alive):
            rig.run(limiter.reserve(PRINCIPAL, want(tokens=50)))
        rig.turn(-jump_s)
        with pytest.raises(RateLimitError, match="2 are under way"):
            rig.run(alive.reserve(PRINCIPAL, want()))
        rig.turn(20)
        rig.run(alive.leases.renew())
        rig.turn(20)  # the living one's is kept
        rig.run(rig.run(alive.reserve(PRINCIPAL, want())).settle({}))
        assert remaining(rig)["concurrent_requests"] == 1
        for limiter in (dead, alive):
            rig.run(limiter.close())


async def test_nothing_is_kept_for_ever(redis_url: str) -> None:
    """By the server's own clock: every key that is made has an end."""

    limiter = RedisLimiter.from_url(redis_url)
    await limiter.start()
    full: dict[str, Any] = dict.fromkeys(get_args(LimitName), 1000)
    principal = key(LimitSpec(**full, end_user=LimitSpec(**full)))
    one = await limiter.reserve(principal, want(tokens=10, usd_nanos=5))
    await one.count_for("ann")
    await limiter.reserve(principal, want(tokens=10, usd_nanos=5))
    await one.settle(want(tokens=5, usd_nanos=1).by_tier)
    admin = redis.Redis.from_url(redis_url)
    names = admin.keys("*")
    # Leases and book; of key and end user 2 minutes, 3 days, week, month, 7 and 30 days; end users.
    assert len(names) == 2 + 2 * 9 + 1
    assert all(name.startswith(b"outrider:limits:{key:k1}") for name in names)
    assert min(admin.ttl(name) for name in names) > 60
    admin.close()
    await limiter.close()


@pytest.mark.parametrize(
    "url", ["http://h:1", "localhost:6379", "redis://h:port/0", "redis+sentinel://h:1", ""]
)
def test_urls_that_cannot_be_used_are_told(url: str) -> None:
    with pytest.raises(SettingsError, match="redis_url"):
        RedisLimiter.from_url(url)
