"""Where stored responses are kept: in memory and in Redis, with a bound for each tenant."""

import random
from typing import Any

import pytest

from outrider.gateway.answering.caching.memory_store import MemoryStore
from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.http.apis.responses.redis_responses import RedisResponses
from outrider.gateway.http.apis.responses.store import (
    ResponseStore,
    StoredResponse,
    random_id,
    response_key,
)
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.redis_store import RedisStore, redis_client
from tests.gateway.conftest import OpenWorld

BOUND = 8_000


def principal(tenant: str = "a", key_id: str = "k") -> Principal:
    return Principal(key_id=key_id, name=key_id, tenant=tenant)


def key_of(tenant: str) -> bytes:
    key = response_key(principal(tenant), f"resp_{random_id()}")
    assert key is not None
    return key


def entry(size: int, owner: str = "a") -> StoredResponse:
    return StoredResponse(owner=owner, end_user=None, input_items=b"[]", response=b"x" * size)


class Clock:
    """A clock that goes on when it is read."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, clock: Clock) -> ResponseStore:
    """One with a bound for each tenant."""
    if request.param == "memory":
        return MemoryStore(ttl_s=60, max_bytes=10 * BOUND, max_bytes_per_owner=BOUND, clock=clock)
    client = redis_client(request.getfixturevalue("redis_url"), 5.0)
    return RedisResponses(
        RedisStore(client, timeout_s=5.0), ttl_s=60, max_bytes_per_tenant=BOUND, wall_clock=clock
    )


async def test_a_response_is_kept_until_it_is_deleted(store: ResponseStore) -> None:
    key = key_of("a")
    assert await store.get(key) is None
    assert await store.put(key, entry(10))
    assert await store.get(key) == entry(10)
    assert await store.delete(key)
    assert not await store.delete(key)
    assert await store.get(key) is None
    await store.close()


async def test_a_tenant_loses_what_it_used_least_recently(store: ResponseStore) -> None:
    others, first = key_of("b"), key_of("a")
    await store.put(others, entry(10, "b"))
    await store.put(first, entry(500))
    later = [key_of("a") for _ in range(8)]
    for key in later:
        assert await store.put(key, entry(500))
        assert await store.get(first) is not None
    assert await store.get(later[0]) is None
    assert [await store.get(key) is not None for key in later[-3:]] == [True] * 3
    assert await store.get(others) == entry(10, "b")
    assert not await store.put(key_of("a"), entry(BOUND))
    assert await store.get(first) is not None
    await store.close()


async def test_the_largest_tenant_makes_room_in_memory(clock: Clock) -> None:
    store: MemoryStore[StoredResponse] = MemoryStore(ttl_s=60, max_bytes=BOUND, clock=clock)
    small = key_of("b")
    await store.put(small, entry(100, "b"))
    rng = random.Random(5)
    for _ in range(200):
        await store.put(key_of("a"), entry(rng.randrange(4_000)))
        assert store.num_bytes <= BOUND
    assert await store.get(small) == entry(100, "b")
    clock.now_s += 60
    assert await store.get(small) is None
    await store.close()
    assert store.num_bytes == 0


async def test_redis_forgets_after_a_time_and_holds_no_more_than_the_bound(
    redis_url: str, clock: Clock
) -> None:
    client: Any = redis_client(redis_url, 5.0)
    store = RedisResponses(
        RedisStore(client, timeout_s=5.0), ttl_s=60, max_bytes_per_tenant=BOUND, wall_clock=clock
    )
    key = key_of("a")
    for _ in range(30):
        assert await store.put(key, entry(2_000))  # again and again: it counts once
    assert await store.get(key) is not None
    for _ in range(30):
        key = key_of("a")
        await store.put(key, entry(2_000))
    names = [name async for name in client.scan_iter(b"outrider:response:*")]
    assert len(names) == 2 + BOUND // 3_100
    assert {0 < await client.pttl(name) <= 60_000 for name in names} == {True}
    await client.set(b"outrider:response:" + key, b"rubbish")
    assert await store.get(key) is None
    for name in names:
        await client.delete(name)
    assert await store.put(key, entry(10))
    await store.close()


async def test_a_redis_that_fails_is_not_a_store_without_the_response() -> None:
    client = redis_client("redis://127.0.0.1:9/0", 1.0)
    store = RedisResponses(RedisStore(client), ttl_s=60, max_bytes_per_tenant=BOUND)
    with pytest.raises(StorageError):
        await store.get(key_of("a"))
    with pytest.raises(StorageError):
        await store.put(key_of("a"), entry(1))
    await store.close()


def test_keys_tell_tenants_and_their_keys_apart() -> None:
    response_id = f"resp_{random_id()}"
    mine = response_key(principal(), response_id)
    assert mine == response_key(principal(), response_id)
    others = [principal("b"), principal("a", "j"), principal("ak", "")]
    assert len({mine, *(response_key(other, response_id) for other in others)}) == 4
    assert response_key(principal(), "resp_1") is None


def test_gateways_share_responses_in_redis(open_world: OpenWorld, redis_url: str) -> None:
    options = {"responses": {"store": True}, "redis_url": redis_url}
    with open_world(**options) as one:
        made = one.http.post("/v1/responses", json={"input": "Hello"}).json()
    with open_world(**options) as two:
        assert two.http.get(f"/v1/responses/{made['id']}").json() == made
        more = {"input": "More", "previous_response_id": made["id"]}
        assert two.http.post("/v1/responses", json=more).status_code == 200


def test_an_answer_goes_out_where_redis_is_gone(open_world: OpenWorld) -> None:
    with open_world(responses={"store": True}, redis_url="redis://127.0.0.1:9/0") as world:
        made = world.http.post("/v1/responses", json={"input": "Hello"})
        assert made.json()["store"] is False
        found = world.http.get(f"/v1/responses/resp_{random_id()}")
        assert found.status_code == 503
        more = {"input": "More", "previous_response_id": f"resp_{random_id()}"}
        assert world.http.post("/v1/responses", json=more).status_code == 503
