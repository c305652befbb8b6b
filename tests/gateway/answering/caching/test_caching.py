"""The response cache: who gets which answer again, and what it costs."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.shared.mock_upstream import MockScript, Toxic
from outrider.gateway.answering.caching.entry import CachedEntry
from outrider.gateway.answering.caching.memory_store import MemoryStore
from outrider.gateway.answering.caching.redis_store import RedisEntries
from outrider.gateway.settings.tree import Settings
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tenancy.limits.redis_store import redis_client
from tests.gateway.conftest import OpenWorld, wait_for
from tests.gateway.hybrid import CHAT, LOCAL_TEXT, Streamed, World

Make = Callable[..., Any]

ON = {"outrider": {"cache": "on"}, "temperature": 0}
STATUS = "x-outrider-cache"
SAMPLED = MockScript(is_sampled=True, num_pieces=6)
MESSAGES = CHAT["messages"]


@pytest.fixture
def make(open_world: OpenWorld) -> Make:
    """Makes a gateway with a cache; a context manager."""

    def made(script: MockScript = SAMPLED, **options: Any) -> Any:
        cache = {"store": "memory", **options.pop("cache", {})}
        return open_world(clouds=(script,), cache=cache, **options)

    return made


def ask(world: World, model: str = "cloud", **fields: Any) -> httpx.Response:
    answer = world.chat(model=model, **{**ON, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def status(world: World, **fields: Any) -> str | None:
    found = ask(world, **fields).headers.get(STATUS)
    return None if found is None else str(found)


# ---- what is equal -------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("model", ["cloud", "large"])
def test_an_equal_request_gets_the_same_bytes(make: Make, model: str) -> None:
    with make() as world:
        first, second = ask(world, model), ask(world, model)
        assert (first.headers[STATUS], second.headers[STATUS]) == ("miss", "hit")
        assert second.content == first.content
        assert second.headers["x-outrider-tier"] == model
        assert second.headers["x-outrider-reason"] == "cache"
        assert int(second.headers["age"]) >= 0
        assert len(world.cloud.requests) == (1 if model == "cloud" else 0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("model", ["cloud", "large"])
def test_streams_are_replayed_event_by_event(make: Make, model: str) -> None:
    with make() as world:
        fields = {"model": model, **ON, "stream_options": {"include_usage": True}}
        first, second = world.stream(**fields), world.stream(**fields)
        assert second.headers[STATUS] == "hit"
        assert second.raw == first.raw
        assert second.is_done
        assert first.text == (LOCAL_TEXT if model == "large" else first.text)
        assert status(world, model=model) == "miss"  # a whole answer is another one


def test_a_hit_names_the_ignored_fields_too(make: Make) -> None:
    with make() as world:
        answers = [ask(world, "large", verbosity="low") for _ in range(2)]
        assert [answer.headers[STATUS] for answer in answers] == ["miss", "hit"]
        for answer in answers:
            assert answer.headers["x-outrider-ignored-fields"] == "verbosity"


def test_labels_and_the_order_of_fields_change_nothing(make: Make) -> None:
    with make() as world:
        assert status(world, user="a", max_tokens=5) == "miss"
        body = {"max_tokens": 5, "messages": MESSAGES, **ON, "model": "cloud", "user": "b"}
        assert world.http.post("/v1/chat/completions", json=body).headers[STATUS] == "hit"
        timed = {"cache": "on", "deadline_ms": 60_000}
        assert status(world, max_tokens=5, outrider=timed) == "hit"


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "other",
    [
        {"model": "large"},
        {"max_tokens": 4},
        {"temperature": 0.5, "seed": 1},
        {"messages": [{"role": "user", "content": "How are you today"}]},
        {"messages": [{"role": "system", "content": "x"}, *MESSAGES]},
        {"stop": ["x"]},
        {"response_format": {"type": "text"}},
        {"models": ["large"]},
        {"logprobs": True},
        {"outrider": {"cache": "on", "policy": "cloud_only"}},
    ],
)
def test_what_shapes_the_answer_makes_it_another_one(make: Make, other: dict[str, Any]) -> None:
    with make() as world:
        ask(world)
        assert status(world, **other) == "miss"
        assert status(world) == "hit"


def test_seeds_are_told_apart_and_their_answers_kept(make: Make) -> None:
    with make() as world:
        one = [ask(world, temperature=1, seed=1) for _ in range(2)]
        two = ask(world, temperature=1, seed=2)
        assert [answer.headers[STATUS] for answer in (*one, two)] == ["miss", "hit", "miss"]
        assert one[1].content == one[0].content != two.content


# ---- who takes part ------------------------------------------------------------------------------


def test_a_sampled_answer_without_a_seed_is_refused(make: Make) -> None:
    with make() as world:
        for fields in ({}, {"temperature": 0.7}):
            answer = world.chat(model="cloud", outrider={"cache": "on"}, **fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "outrider.cache"
            assert "seed" in answer.json()["error"]["message"]
        assert not world.cloud.requests
    with make(cache={"default": "on"}) as world:  # not asked for: answered without it
        answers = [world.chat(model="cloud") for _ in range(2)]
        assert [answer.headers[STATUS] for answer in answers] == ["bypass", "bypass"]
        assert answers[0].content != answers[1].content
        assert status(world, outrider={"cache": "off"}) is None


def test_without_a_store_the_wish_is_refused(open_world: OpenWorld) -> None:
    with open_world() as world:
        answer = world.chat(**ON)
        assert answer.status_code == 400
        assert "cache.store" in answer.json()["error"]["message"]
        assert world.chat(outrider={"cache": "off"}).status_code == 200


def test_only_named_tiers_keep_answers(make: Make) -> None:
    with make(cache={"tiers": ["large"]}) as world:
        assert [status(world), status(world)] == ["miss", "miss"]
        assert [status(world, model="large"), status(world, model="large")] == ["miss", "hit"]


def test_private_requests_are_not_kept(make: Make) -> None:
    with make() as world:
        private = {"cache": "on", "privacy": "private"}
        assert status(world, model="auto", outrider=private) == "bypass"


@pytest.fixture
def tenants(make: Make, tmp_path: Any) -> Iterator[tuple[World, Callable[..., dict[str, str]]]]:
    """A gateway with keys, and a function that makes one."""
    options = {
        "database_url": f"sqlite:///{tmp_path}/keys.db",
        "keys": {"refresh_s": 0.02},
        "ledger": {"flush_ms": 1},
        "charges": {"cloud": {"prompt": 1000.0, "completion": 1000.0}},
    }
    with make(cache={"charge": "full", "keys": ["a", "b"]}, **options) as world:
        store = world.context.tenancy.keys.store

        def key(name: str, **fields: Any) -> dict[str, str]:
            text = store.create(KeyOrder(name=name, **fields)).text
            mine = {"authorization": f"Bearer {text}"}
            wait_for(lambda: world.http.get("/v1/models").status_code == 401)
            wait_for(lambda: world.http.get("/v1/models", headers=mine).status_code == 200)
            return mine

        yield world, key


def test_tenants_get_no_answers_of_each_other(
    tenants: tuple[World, Callable[..., dict[str, str]]],
) -> None:
    world, key = tenants
    one, two, outside = key("a"), key("b"), key("c")
    assert [status(world, headers=one), status(world, headers=one)] == ["miss", "hit"]
    assert status(world, headers=two) == "miss"
    assert status(world, headers=outside) == "bypass"
    scoped = key("a", scopes=Scopes(models=frozenset({"large"})))
    refused = world.chat(model="cloud", headers=scoped, **ON)
    assert refused.status_code == 403


def test_a_hit_is_charged_as_the_settings_say_and_costs_nothing(
    tenants: tuple[World, Callable[..., dict[str, str]]],
) -> None:
    world, key = tenants
    mine = key("a", scopes=Scopes(is_admin=True))
    for _ in range(3):
        ask(world, headers=mine)

    def rows() -> list[dict[str, Any]]:
        answer = world.http.get("/v1/usage", params={"by": "kind"}, headers=mine)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    wait_for(lambda: {row["group"] for row in rows()} == {"answer", "cached"})
    by_kind = {row["group"]: row for row in rows()}
    assert by_kind["cached"]["requests"] == 2
    assert by_kind["cached"]["cost_usd"] == 0
    assert by_kind["cached"]["charge_usd"] == pytest.approx(2 * by_kind["answer"]["charge_usd"])
    assert by_kind["answer"]["charge_usd"] > 0


# ---- what is kept --------------------------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "script",
    [
        MockScript(toxic=Toxic(kind="status", status=503)),
        MockScript(pieces=("a", "b", "c"), toxic=Toxic(kind="reset", after_events=2)),
        MockScript(pieces=("a",), finish_reason="content_filter"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_failed_and_withheld_answers_are_not_kept(
    make: Make, script: MockScript, stream: bool
) -> None:
    with make(script) as world:
        for _ in range(2):
            world.chat(model="cloud", stream=stream, **ON)
        world.cloud.script = SAMPLED
        assert status(world, stream=stream) == "miss"
        assert status(world, stream=stream) == "hit"


def test_an_answer_that_is_too_large_is_not_kept(make: Make) -> None:
    with make(cache={"max_entry_bytes": 100}) as world:
        assert [status(world), status(world)] == ["miss", "miss"]


def test_many_equal_requests_are_one_computation(make: Make) -> None:
    slow = MockScript(is_sampled=True, num_pieces=6, first_token_delay_s=0.3)
    with make(slow) as world:
        answers: list[Streamed] = []
        threads = [
            threading.Thread(target=lambda: answers.append(world.stream(model="cloud", **ON)))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(world.cloud.requests) == 1
        assert len({answer.raw for answer in answers}) == 1
        assert sorted({answer.headers[STATUS] for answer in answers}) == ["miss", "shared"]


def test_waiting_requests_outlive_the_one_they_wait_for(make: Make) -> None:
    slow = MockScript(is_sampled=True, num_pieces=6, first_token_delay_s=0.3)
    with make(slow) as world:
        found: list[httpx.Response] = []

        def leave() -> None:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{world.url}/v1/chat/completions",
                    json={**CHAT, "model": "cloud", **ON},
                    timeout=0.15,
                )

        leaver = threading.Thread(target=leave)
        leaver.start()
        wait_for(lambda: len(world.cloud.requests) == 1)
        others = [threading.Thread(target=lambda: found.append(ask(world))) for _ in range(2)]
        for thread in others:
            thread.start()
        for thread in (leaver, *others):
            thread.join(30)
        assert [answer.status_code for answer in found] == [200, 200]


# ---- stores --------------------------------------------------------------------------------------


def entry(size: int = 10) -> CachedEntry:
    return CachedEntry(
        parts=(b"x" * size,),
        tier="cloud",
        model="m",
        num_prompt_tokens=1,
        num_completion_tokens=2,
        made_at=0.0,
        is_streamed=False,
    )


async def test_memory_is_bounded_and_what_is_used_stays() -> None:
    now_s = 0.0
    store = MemoryStore(ttl_s=10, max_bytes=5_000, clock=lambda: now_s)
    rng = random.Random(3)
    for number in range(200):
        await store.put(bytes([number]), entry(rng.randrange(2_000)))
        await store.get(b"\x00")
        assert store.num_bytes <= 5_000
    await store.put(b"big", entry(6_000))
    assert await store.get(b"big") is None
    await store.put(b"a", entry())
    await store.put(b"a", entry(20))
    assert await store.get(b"a") == entry(20)
    now_s = 10.0
    assert await store.get(b"a") is None


async def test_redis_keeps_entries_until_they_expire_and_its_failure_is_a_miss(
    redis_url: str,
) -> None:
    now_s = 0.0
    client = redis_client(redis_url, 1.0)
    store = RedisEntries(client, ttl_s=60, clock=lambda: now_s, timeout_s=5)
    assert await store.get(b"k") is None
    await store.put(b"k", entry())
    assert await store.get(b"k") == entry()
    assert 0 < await client.pttl(b"outrider:answer:k") <= 60_000
    await client.set(b"outrider:answer:k", b"rubbish")
    assert await store.get(b"k") is None
    await store.close()
    gone = RedisEntries(redis_client("redis://127.0.0.1:9/0", 1.0), ttl_s=60, clock=lambda: now_s)
    assert await gone.get(b"k") is None
    await gone.put(b"k", entry())
    await gone.close()


def test_gateways_share_answers_in_redis(make: Make, redis_url: str) -> None:
    options = {"cache": {"store": "redis"}, "redis_url": redis_url, "tier": {"url": ""}}
    with make() as plain:
        options["tier"] = {"url": plain.cloud.url}
        with make(**options) as one:
            first = ask(one)
        with make(**options) as two:
            second = ask(two)
    assert (first.headers[STATUS], second.headers[STATUS]) == ("miss", "hit")
    assert second.content == first.content


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({"store": "redis"}, "set redis_url"),
        ({"tiers": ["clod"]}, "unknown tier"),
        ({"ttl_s": 0}, "greater than"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(cache: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.model_validate({"cache": cache})
