"""Gateways with keys and books on the shipped pair, and clients that ask for everything."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from sqlalchemy import select

from outrider.draft.training.tasks.families import stream
from outrider.engine.events import EngineStats
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.storage import tables
from outrider.gateway.tenancy.keys.amounts import NO_LIMITS, LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder, TeamOrder
from outrider.gateway.tenancy.ledger.book import Ledger
from outrider.gateway.tenancy.ledger.writer import JournaledLedger
from outrider.router.policy import RoutePolicy
from outrider.verifier.params import TIERS
from tests.databases import with_tables
from tests.gateway.waiting import wait_for
from tests.laws.gateways import Gateway, gateway

Document = dict[str, Any]
Row = dict[str, Any]

BOOKS: Final[Mapping[str, Any]] = {
    "ledger.flush_ms": 10,
    "ledger.batch_ms": 20,
    "keys.refresh_s": 0.05,
    "routing.prices.small.prompt": 1.0,
    "routing.prices.small.completion": 2.0,
    "routing.prices.large.prompt": 10.0,
    "routing.prices.large.cached_prompt": 5.0,
    "routing.prices.large.completion": 30.0,
}
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_SETTLING_S: Final = 60.0
_ANSWER_S: Final = 120.0


# ---- gateways -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accounts:
    """A gateway and a way to look into its books."""

    gateway: Gateway

    @property
    def url(self) -> str:
        """Return its address."""
        return self.gateway.url

    def new_key(self, name: str, limits: LimitSpec = NO_LIMITS, **order: Any) -> str:
        """A key that the gateway knows already; `team` is the limits of a new team."""
        store = self.gateway.context.tenancy.keys.store
        assert store is not None
        if (team := order.pop("team", None)) is not None:
            made = store.create_team(TeamOrder(name=f"team of {name}", limits=team))
            order["team_id"] = made.team_id
        key = store.create(KeyOrder(name=name, limits=limits, **order)).text
        headers = {"authorization": f"Bearer {key}"}
        until(lambda: self.gateway.http.get("/v1/models", headers=headers).status_code == 200)
        return key

    def rows(self) -> list[Row]:
        """The ledger's rows, when all is written and nothing is in flight."""
        tenancy = self.gateway.context.tenancy
        assert tenancy.database is not None
        until(lambda: not self.num_open and not tenancy.settlements.is_busy)
        flush(tenancy.ledger)
        with tenancy.database.read() as connection:
            found = connection.execute(select(tables.ledger).order_by(tables.ledger.c.row_id))
            return [dict(row._mapping) for row in found]

    @property
    def num_open(self) -> float:
        """Requests that are not settled yet: the engine, or the limits."""
        stats = self.engine_stats()
        in_engine = sum(tier.num_running + tier.num_waiting for tier in stats.tiers.values())
        return in_engine + self._sample("outrider_limit_reservations")

    def engine_stats(self) -> EngineStats:
        """The engine's own counters."""
        engine = self.gateway.context.engine
        if isinstance(engine, ProcessEngineClient):
            assert engine._supervisor is not None
            loop = engine._supervisor.get_loop()
        else:
            assert isinstance(engine, InProcessEngineClient)
            assert engine._loop is not None
            loop = engine._loop
        return asyncio.run_coroutine_threadsafe(engine.stats(), loop).result(60)

    def remaining(self, key: str) -> int:
        """Return what a key has left of its tokens; asks for one more."""
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        response = self.gateway.http.post(PATHS[0], json=body, headers=bearer(key))
        assert response.status_code == 200, response.text
        return int(response.headers["x-ratelimit-remaining-tokens"])

    def _sample(self, name: str) -> float:
        lines = self.gateway.http.get("/metrics").text.splitlines()
        return next(float(x.rpartition(" ")[2]) for x in lines if x.startswith(f"{name} "))


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {key}"}


@contextmanager
def accounts(
    folder: Path,
    flags: Mapping[str, Any] | None = None,
    *,
    policy: RoutePolicy | None = None,
    client: ProcessEngineClient | None = None,
) -> Iterator[Accounts]:
    """A gateway on a database of its own."""
    database = {"database_url": with_tables(folder / "books.db")}
    with gateway({**BOOKS, **database, **(flags or {})}, policy=policy, client=client) as made:
        opened = Accounts(made)
        key = opened.new_key("inspector", scopes=Scopes(reads_metrics=True))
        # Until the gateway has heard of its first key, it lets everybody in, as nobody.
        until(lambda: made.http.get("/v1/models").status_code == 401)
        made.http.headers.update(bearer(key))
        yield opened


def until(condition: Callable[[], bool], timeout_s: float = _SETTLING_S) -> None:
    """Wait until the condition holds."""
    wait_for(condition, timeout_s)


def flush(ledger: Ledger) -> None:
    """Have everything in the database that was added so far."""
    assert isinstance(ledger, JournaledLedger)
    asyncio.run(ledger.flush())


def until_equal(ask: Callable[[], tuple[Any, Any]]) -> None:
    """Both must become the same: a request whose client has left may begin after all others."""
    deadline_s = time.monotonic() + _SETTLING_S / 2
    one, other = ask()
    while one != other and time.monotonic() < deadline_s:
        time.sleep(0.1)
        one, other = ask()
    assert one == other


# ---- clients ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. Its client leaves after so many pieces of a stream, or so many seconds.

    It is sent `num_repeats` times more, at the same time.
    """

    request_id: str
    key: str
    path: str
    body: Document
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves_after_pieces: int | None = None
    leaves_after_s: float | None = None
    num_repeats: int = 0


@dataclass(frozen=True, kw_only=True)
class Told:
    """The response to a client. `status` None: the client left before there was one.

    `usage`: prompt and completion, where the answer is whole and says so.
    """

    ask: Ask
    status: int | None
    usage: tuple[int, int] | None = None
    has_left: bool = False
    has_failed: bool = False
    is_replayed: bool = False
    body: bytes = field(default=b"", repr=False)


async def put(url: str, ask: Ask) -> Told:
    """Ask on a connection of its own, and read the answer as far as this client wants it."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
    body = json.dumps(ask.body).encode()
    headers = {
        **bearer(ask.key),
        **ask.headers,
        "host": parts.netloc,
        "connection": "close",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": ask.request_id,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    try:
        writer.write(f"POST {ask.path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        async with asyncio.timeout(ask.leaves_after_s or _ANSWER_S):
            return await _read(reader, ask)
    except TimeoutError:
        assert ask.leaves_after_s is not None, f"no answer came: {ask}"
        return Told(ask=ask, status=None, has_left=True)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, ask: Ask) -> Told:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head.split(" ", 2)[1])
    body = b""
    if "transfer-encoding: chunked" in head:
        num_pieces = 0
        while num_bytes := int(await reader.readline(), 16):
            if num_pieces == ask.leaves_after_pieces:
                return Told(ask=ask, status=status, has_left=True)
            body += await reader.readexactly(num_bytes)
            await reader.readline()
            num_pieces += 1
    else:
        body = await reader.read()
    if status != 200:
        return Told(ask=ask, status=status, body=body)
    documents = documents_of(body)
    return Told(
        ask=ask,
        status=status,
        usage=usage_of(documents),
        has_failed=any(_is_error(document) for document in documents),
        is_replayed="idempotent-replayed: true" in head,
        body=body,
    )


def documents_of(body: bytes) -> list[Document]:
    """The JSON of a whole answer, or of each event of a stream."""
    with suppress(ValueError):
        return [json.loads(body)]
    lines = [line.removeprefix(b"data:") for line in body.split(b"\n") if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line.strip() != b"[DONE]"]


def _is_error(document: Document) -> bool:
    return bool(document.get("error")) or document.get("type") in ("error", "response.failed")


def usage_of(documents: list[Document]) -> tuple[int, int] | None:
    """Tokens of prompt and answer, in any API's words; the last word counts."""
    found: dict[str, int] = {}
    for document in documents:
        inner = document.get("response") or document.get("message") or document
        for usage in (inner.get("usage"), document.get("usage")):
            found.update({k: v for k, v in (usage or {}).items() if isinstance(v, int)})
    if "prompt_tokens" in found:
        return found["prompt_tokens"], found["completion_tokens"]
    if "input_tokens" not in found:
        return None
    cached = found.get("cache_read_input_tokens", 0) + found.get("cache_creation_input_tokens", 0)
    return found["input_tokens"] + cached, found["output_tokens"]


# ---- workloads ----------------------------------------------------------------------------------

_TASKS: Final = tuple(task.prompt for task, _ in zip(stream(3, "heldout"), range(64), strict=False))
_NUMBER: Final = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}, "number": {"type": "integer"}},
    "required": ["word", "number"],
    "additionalProperties": False,
}
_SCHEMA: Final = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": _NUMBER, "strict": True},
}


@dataclass
class Workload:
    """Requests drawn at random: all endpoints, all ways to answer and to leave."""

    rng: random.Random
    keys: list[str]
    models: tuple[str, ...] = ("auto", "auto", "small", "large")
    longest: int = 48
    prefix: str = "w"
    repeated_share: float = 0.0
    several_share: float = 0.3
    _count: int = 0

    def next(self) -> Ask:
        """The next one."""
        rng = self.rng
        self._count += 1
        path = rng.choice(PATHS)
        body: Document = {"model": rng.choice(self.models), **self._words(path)}
        if rng.random() < 0.5 or path == "/v1/messages":
            name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body[name] = rng.randint(1, self.longest)
        if rng.random() < 0.7:
            body["temperature"] = rng.choice((0, 0.7, 1.0))
        if path in PATHS[:2]:
            self._add_options(path, body)
        if rng.random() < 0.04:
            body["temperature"] = "hot"  # refused
        leaves: Document = {}
        headers = {}
        if rng.random() < self.repeated_share:
            headers["idempotency-key"] = f"again-{self._count}"
            leaves["num_repeats"] = rng.randint(1, 2)
        if rng.random() < 0.5:
            body["stream"] = True
            if path in PATHS[:2]:
                body["stream_options"] = {"include_usage": True}
            if rng.random() < 0.4:
                leaves["leaves_after_pieces"] = rng.choice((0, 0, 1, 2, 4, 8, 16))
        elif rng.random() < 0.35:
            leaves["leaves_after_s"] = rng.choice((0.01, 0.03, 0.06, 0.1, 0.2, 0.4))
        return Ask(
            request_id=f"{self.prefix}-{self._count}",
            key=rng.choice(self.keys),
            path=path,
            body=body,
            headers=headers,
            **leaves,
        )

    def _words(self, path: str) -> Document:
        prompt = self.rng.choice(_TASKS)
        if self.rng.random() < 0.2:
            prompt = " ".join(self.rng.choices(_TASKS, k=8))
        if self.rng.random() < 0.02:
            prompt *= 400  # longer than the context: refused
        match path:
            case "/v1/completions":
                return {"prompt": [prompt, "Again: " + prompt][: self.rng.choice((1, 1, 2))]}
            case "/v1/responses":
                return {"input": prompt}
            case _:
                return {"messages": [{"role": "user", "content": prompt}]}

    def _add_options(self, path: str, body: Document) -> None:
        rng = self.rng
        if rng.random() < self.several_share:
            body["n"] = rng.randint(2, 3)
        if rng.random() < 0.3:
            body["seed"] = rng.randint(0, 3)
        if rng.random() < 0.2:
            body["stop"] = rng.choice((["e"], [" "], ["the", "1"]))
        if rng.random() < 0.2:
            body["logprobs"] = True if path == PATHS[0] else 2
        if path == PATHS[0] and rng.random() < 0.2:
            body["response_format"] = _SCHEMA
        outrider: Document = {}
        if rng.random() < 0.15:
            outrider["speculation"] = "off"
        if rng.random() < 0.15:
            outrider["deadline_ms"] = rng.choice((20, 60, 150, 400))
        if rng.random() < 0.1:
            outrider["quality"] = {"cascade": 0.3}
        if outrider:
            body["outrider"] = outrider


def put_all(urls: Sequence[str], asks: Sequence[Ask], *, num_clients: int) -> list[Told]:
    """Ask everything, so many at a time, each the next of the gateways."""

    async def run() -> list[Told]:
        places = asyncio.Semaphore(num_clients)

        async def one(number: int, ask: Ask) -> list[Told]:
            url = urls[number % len(urls)]
            async with places:
                return list(
                    await asyncio.gather(*(put(url, ask) for _ in range(1 + ask.num_repeats)))
                )

        told = await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))
        return [each for every in told for each in every]

    return asyncio.run(run())


# ---- sums ---------------------------------------------------------------------------------------


def booked(rows: list[Row]) -> dict[str, Counter[str]]:
    """Return what the local models did, by tier, as the ledger has it."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row["kind"] == "draft":
            sums[row["tier"]]["draft_rows"] += row["num_computed_tokens"]
            sums["all"]["drafted"] += row["num_drafted_tokens"]
            sums["all"]["accepted"] += row["num_accepted_tokens"]
        else:
            sums[row["tier"]]["computed"] += row["num_computed_tokens"]
            sums[row["tier"]]["output"] += row["num_completion_tokens"]
    return {tier: +counts for tier, counts in sums.items() if +counts}


def counted(stats: EngineStats) -> dict[str, Counter[str]]:
    """The same as the engine has counted it."""
    sums: dict[str, Counter[str]] = {
        tier: Counter(
            draft_rows=stats.tiers[tier].num_draft_rows,
            computed=stats.tiers[tier].num_computed_tokens,
            output=stats.tiers[tier].num_output_tokens,
        )
        for tier in TIERS
        if tier in stats.tiers
    }
    sums["all"] = Counter(drafted=stats.num_draft_tokens, accepted=stats.num_accepted_tokens)
    return {tier: +counts for tier, counts in sums.items() if +counts}
