"""No limit is ever passed, and what clients are charged is what they were told, to the token.

Hundreds of requests at once, to all endpoints, of clients that stream, leave, set no max_tokens or
send the same twice. One gateway counts in its memory; two count in one Redis and book in one
PostgreSQL. The engines are scripted: their answers are there at once, and of any length.
"""

import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import select

from outrider.engine.request import EngineRequest
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.storage import tables
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD, LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from tests.databases import with_tables
from tests.engines import PAIR_FOLDER, shipped_tokenizer
from tests.gateway.hybrid import World, hybrid
from tests.gateway.scripted_client import Script, Step
from tests.gateway.tenancy.metering.tenants import PRICES
from tests.laws.accounts import (
    PATHS,
    Ask,
    Row,
    Told,
    Workload,
    bearer,
    flush,
    put_all,
    until,
)
from tests.sizes import repeats

TOKENS: Final = 4_000
NANOS: Final = 20_000_000
LIMITS: Final = {
    "tokens_per_minute": LimitSpec(tokens_per_minute=TOKENS),
    "usd_per_day": LimitSpec(usd_per_day=NANOS / NANOS_PER_USD),
    "tokens_per_day": LimitSpec(tokens_per_day=TOKENS, concurrent_requests=60),
    "requests_per_minute": LimitSpec(requests_per_minute=50),
}
SHORT: Final = ("tokens_per_minute", "usd_per_day", "tokens_per_day")
STORES: Final = ("memory", "shared")


@dataclass(frozen=True)
class Gateways:
    """One gateway or two, with the same keys, limits and books."""

    worlds: tuple[World, ...]

    @property
    def urls(self) -> list[str]:
        """Return their addresses."""
        return [world.url for world in self.worlds]

    def new_key(self, name: str, limits: LimitSpec, scopes: Scopes | None = None) -> str:
        """A key that all of them know already."""
        store = self.worlds[0].context.tenancy.keys.store
        assert store is not None
        key: str = store.create(KeyOrder(name=name, limits=limits, scopes=scopes or Scopes())).text
        for url in self.urls:
            asked = partial_get(f"{url}/v1/models", key)
            until(lambda asked=asked: asked().status_code == 200)  # type: ignore[misc]
        return key

    def rows(self, key: str) -> list[Row]:
        """A key's rows, when all is over and written."""
        for world in self.worlds:
            tenancy = world.context.tenancy
            until(lambda w=world: not w.engine.running)  # type: ignore[misc]
            until(lambda t=tenancy: not t.settlements.is_busy)  # type: ignore[misc]
            until(lambda w=world: w.count("outrider_limit_reservations") == 0)  # type: ignore[misc]
            flush(tenancy.ledger)
        database = self.worlds[0].context.tenancy.database
        assert database is not None
        with database.read() as connection:
            of_key = tables.ledger.c.key_id == key[3:11]
            found = connection.execute(select(tables.ledger).where(of_key))
            return [dict(row._mapping) for row in found]


def partial_get(url: str, key: str) -> Callable[[], httpx.Response]:
    """Asks this when it is called."""
    return lambda: httpx.get(url, headers=bearer(key))


def encode(text: str) -> list[int]:
    return shipped_tokenizer().encode(text, add_special_tokens=False)


@contextmanager
def gateways(store: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[Gateways]:
    """`memory`: one gateway on SQLite. `shared`: two on one Redis and one PostgreSQL."""
    sections: dict[str, Any] = {
        "database_url": with_tables(folder / "books.db"),
        "routing": {"prices": PRICES},
        "ledger": {"flush_ms": 10, "batch_ms": 20, "journal": str(folder / "journal")},
        "keys": {"mode": "required", "refresh_s": 0.05},
    }
    if store == "shared":
        sections["database_url"] = request.getfixturevalue("postgres_url")
        sections["redis_url"] = request.getfixturevalue("redis_url")
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "small"))
    with ExitStack() as stack:
        worlds = []
        for number in range(2 if store == "shared" else 1):
            world = stack.enter_context(hybrid(tokenizer, encode, **sections))
            world.engine.max_context = 4096
            world.engine.vocab_size = len(shipped_tokenizer())
            world.engine.script = answers_of_any_length(number)
            object.__setattr__(world.context.limits, "default_max_tokens", None)
            worlds.append(world)
        made = Gateways(tuple(worlds))
        inspector = made.new_key("inspector", LimitSpec(), Scopes(reads_metrics=True))
        for world in worlds:
            world.http.headers.update(bearer(inspector))
        yield made


def answers_of_any_length(seed: int) -> Callable[[EngineRequest], Script]:
    """One to three tokens a step; some answers break off by an error of ours."""
    rng, lock = random.Random(seed), threading.Lock()

    def script(request: EngineRequest) -> Script:
        with lock:
            # Most are short, so that little is reserved, and long ones have to grow.
            (num_wanted,) = rng.choices((1, 5, 20, 80, 400), (20, 30, 35, 10, 5))
            group = rng.randint(1, 3)
            has_failed = rng.random() < 0.03
        at_most = request.sampling.max_tokens
        num_tokens = min(num_wanted, at_most)
        tokens = tuple(300 + i % 700 for i in range(num_tokens))
        steps = [Step(token_ids=tokens[i : i + group]) for i in range(0, num_tokens, group)]
        failure = ("step_failed", "The engine broke.") if has_failed else None
        finish_reason = "length" if num_tokens == at_most else "stop"
        return Script(steps=steps, finish_reason=finish_reason, failure=failure)

    return script


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_no_limit_is_passed(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with gateways(store, tmp_path, request) as made:
        rounds = [attack(made, limit, seed) for seed, limit in enumerate(SHORT)]
    check_variety(rounds)


@pytest.mark.slow_cases
@pytest.mark.parametrize("store", STORES)
def test_answers_end_where_the_limit_ends(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """To the token, whoever of those that are written at the same time gets the last one."""
    words: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
        "/v1/completions": {"prompt": "Hello"},
        "/v1/responses": {"input": "Hello"},
    }
    with gateways(store, tmp_path, request) as made:
        for world in made.worlds:
            world.engine.script = lambda _: Script(steps=[Step(token_ids=(300,))] * 1000)
        ways = list(itertools.product(words, (False, True)))[:: repeats(1, 3)]
        for number, (path, streams) in enumerate(ways):
            limit = 150 + 7 * number
            key = made.new_key(f"{number}", LimitSpec(tokens_per_minute=limit))
            body = {"model": "small", "stream": streams, **words[path]}
            if streams and path != "/v1/responses":
                body["stream_options"] = {"include_usage": True}
            asks = [
                Ask(request_id=f"{number}-{i}", key=key, path=path, body=body) for i in range(6)
            ]
            told = put_all(made.urls, asks, num_clients=6)
            rows = made.rows(key)
            check_charges(told, rows)
            answered = [one for one in told if one.status == 200]
            assert 0 < len(answered) < 6
            assert sum(row["num_charged_tokens"] for row in rows) == limit
            assert {row["outcome"] for row in rows} == {"limited"}
            assert all(
                b"max_output_tokens" in one.body or b"length" in one.body for one in answered
            )


@pytest.mark.long
@pytest.mark.parametrize("store", STORES)
def test_no_limit_is_passed_in_fifty_rounds(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with gateways(store, tmp_path, request) as made:
        limits = itertools.cycle(LIMITS)
        rounds = [attack(made, next(limits), seed) for seed in range(100, 150)]
    check_variety(rounds)


Round = tuple[list[Told], list[Row]]


def attack(made: Gateways, limit: str, seed: int) -> Round:
    """200 requests at once with one new key, some more until it is used up; then all sums."""
    key = made.new_key(f"{limit} {seed}", LIMITS[limit])
    workload = Workload(
        random.Random(seed),
        [key],
        prefix=f"{limit}-{seed}",
        repeated_share=0.15,
        models=("auto", "small", "large"),
    )
    asks = [workload.next() for _ in range(200)]
    told = put_all(made.urls, asks, num_clients=200)
    made.rows(key)  # who has left has given back what he had reserved
    told += use_up(made, key, f"{limit}-{seed}-more")
    rows = made.rows(key)
    check_limit(limit, told, rows)
    check_charges(told, rows)
    return told, rows


def use_up(made: Gateways, key: str, prefix: str) -> list[Told]:
    """One small request after another until one is refused."""
    words = [{"role": "user", "content": "Hello"}]
    body = {"model": "large", "messages": words, "max_tokens": 20}
    told: list[Told] = []
    while not told or told[-1].status != 429:
        assert len(told) < 400, "the limit never comes"
        ask = Ask(request_id=f"{prefix}-{len(told)}", key=key, path=PATHS[0], body=body)
        told += put_all(made.urls, [ask], num_clients=1)
    return told


def check_limit(limit: str, told: list[Told], rows: list[Row]) -> None:
    """Check that charges and reported usage are within the limit, which was reached."""
    num_tokens = sum(row["num_charged_tokens"] for row in rows)
    nanos = sum(row["charge_nanos"] for row in rows)
    num_requests = len({row["request_id"] for row in rows if row["num_charged_tokens"]})
    num_told = sum(sum(one.usage) for one in told if one.usage and not one.is_replayed)
    if limit.startswith("tokens"):
        assert TOKENS - 40 < num_tokens <= TOKENS
        assert num_told <= TOKENS
    elif limit.startswith("usd"):
        assert 0.95 * NANOS < nanos <= NANOS
    else:
        # Some of those that were charged nothing count too: refused by their fault, or given up.
        num_free = sum(one.has_left or 400 <= (one.status or 0) < 500 for one in told)
        assert num_requests <= 50 <= num_requests + num_free


def check_charges(told: list[Told], rows: list[Row]) -> None:
    """Each answer is charged once, with what its client was told; failures are free."""
    charged: dict[str, int] = defaultdict(int)
    for row in rows:
        charged[row["client_request_id"]] += row["num_charged_tokens"]
    by_id: dict[str, list[Told]] = defaultdict(list)
    for one in told:
        by_id[one.ask.request_id].append(one)
    for request_id, each in by_id.items():
        whole = [one for one in each if one.usage and not one.has_failed and not one.has_left]
        first = [one for one in whole if not one.is_replayed]
        if whole:
            assert len({one.body for one in whole}) == 1
            assert len(first) <= 1
            if not any(one.has_left or one.has_failed for one in each):
                assert charged[request_id] == sum(whole[0].usage or ())
        elif all(is_ours(one) for one in each):
            assert charged[request_id] == 0, each


def is_ours(told: Told) -> bool:
    """Return whether it was refused or failed. A stream that its own deadline ends is paid for."""
    if told.has_failed:
        return b"deadline_exceeded" not in told.body
    return told.status not in (200, None)


def check_variety(rounds: list[Round]) -> None:
    """Or else much of what holds would hold for nothing."""
    told = [one for each, _ in rounds for one in each]
    outcomes = {row["outcome"] for _, rows in rounds for row in rows}
    assert outcomes >= {"answered", "cancelled", "failed"}
    assert any(one.is_replayed for one in told)
    assert any(one.has_left for one in told)
    assert {one.ask.path for one in told if one.usage} == {one.ask.path for one in told}
