"""A gateway with keys, limits and a ledger, and a way to look into its books."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import NO_LIMITS, LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tenancy.limits.memory_limiter import MemoryLimiter
from tests.databases import with_tables
from tests.gateway.hybrid import World, hybrid
from tests.gateway.waiting import wait_for

ALL = Scopes()
Open = Callable[..., Any]
PRICES = {
    "small": {"prompt": 1.0, "completion": 2.0},
    "large": {"prompt": 10.0, "cached_prompt": 5.0, "completion": 30.0},
}


class Books:
    """A world whose requests are made with one key."""

    def __init__(self, world: World, limits: LimitSpec, scopes: Scopes) -> None:
        self.world = world
        self.limits = limits
        self.scopes = scopes
        self.key = self.new_key("tester", limits, replace(scopes, reads_metrics=True))
        # Until it has heard of its first key, the gateway lets everybody in, as nobody.
        self.until(lambda: httpx.get(f"{world.url}/v1/models").status_code == 401)
        world.http.headers["authorization"] = f"Bearer {self.key}"

    def new_key(
        self, name: str, limits: LimitSpec = NO_LIMITS, scopes: Scopes = ALL, **order: Any
    ) -> str:
        """A key that the gateway knows already."""
        store = self.world.context.tenancy.keys.store
        assert store is not None
        text = store.create(KeyOrder(name=name, limits=limits, scopes=scopes, **order)).text
        headers = {"authorization": f"Bearer {text}"}
        self.until(
            lambda: httpx.get(f"{self.world.url}/v1/models", headers=headers).status_code == 200
        )
        return text

    @property
    def database(self) -> Database:
        """Return the database of the ledger."""
        database = self.world.context.tenancy.database
        assert database is not None
        return database

    def rows(self, count: int) -> list[dict[str, Any]]:
        """The ledger's rows in the order in which they were written; there must be so many."""
        self.until(lambda: len(self._rows()) >= count)
        rows = self._rows()
        assert len(rows) == count, [(r["kind"], r["tier"], r["outcome"]) for r in rows]
        return rows

    def _rows(self) -> list[dict[str, Any]]:
        with self.database.read() as connection:
            found = connection.execute(select(tables.ledger).order_by(tables.ledger.c.row_id))
            return [dict(row._mapping) for row in found]

    def remaining_tokens(self) -> int:
        """Return what the key has left of its tokens, when all that is over has been settled."""
        self.until(lambda: not self.world.context.tenancy.settlements.is_busy)
        response = self.world.chat(max_tokens=1)
        assert response.status_code == 200, response.text
        used = response.json()["usage"]["total_tokens"]
        return int(response.headers["x-ratelimit-remaining-tokens"]) + used

    def used(self, limit: str) -> int:
        """Return the usage of the key's limit, when all is over: tokens, or nano-dollars."""
        self.settle()
        limiter = self.world.context.tenancy.limiter
        assert isinstance(limiter, MemoryLimiter)
        key_id = self.key[3:11]
        return limiter._counters["key", key_id, "", limit].used(limiter.moment())

    def settle(self) -> None:
        """Wait until nothing is under way, and all that is over is charged."""
        tenancy = self.world.context.tenancy
        assert isinstance(tenancy.limiter, MemoryLimiter)
        reservations = tenancy.limiter._open
        self.until(lambda: not reservations and not tenancy.settlements.is_busy)

    until = staticmethod(wait_for)


@contextmanager
def books(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    folder: Path,
    *,
    limits: LimitSpec = NO_LIMITS,
    scopes: Scopes = ALL,
    **world: Any,
) -> Iterator[Books]:
    """A gateway with one key, on a database of its own."""
    sections = {
        "database_url": with_tables(folder / "books.db"),
        "routing": {"prices": PRICES},
        "ledger": {"flush_ms": 10, "batch_ms": 10},
        "keys": {"refresh_s": 0.02},
    }
    with hybrid(tokenizer, encode, **{**sections, **world}) as made:
        yield Books(made, limits, scopes)
