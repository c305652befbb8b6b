"""A kill -9 at each moment of a request's life: no answer is doubled, and nothing stays reserved.

The gateway, and in the second half its engine, end by SIGKILL at a named moment of one tenant's
request and are started again. From then on a charge is what is booked, once and within what was
reserved; the tenant's only place is free, its limit has what it had less what is booked; other
tenants are answered. An answer whose engine ended is whole, and is paid for once. Leases in Redis
are in tests/gateway/tenancy/limits/test_redis_limiter.py.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import select

from benchmarks.shared.mock_upstream import MockScript, MockThread, mock_in_thread
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.key_parts import key_store
from outrider.gateway.tenancy.keys.keys import Scopes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.upstream.bounds import most_prompt_tokens
from tests.databases import with_tables
from tests.laws import mortal_engine
from tests.laws.accounts import (
    BOOKS,
    PATHS,
    Accounts,
    Ask,
    Row,
    Told,
    accounts,
    bearer,
    documents_of,
    put_all,
    until,
)
from tests.laws.gateways import ENGINE
from tests.laws.mortal_gateway import MOMENTS, VICTIM

ROOT: Final = Path(__file__).parents[2]
TOKENS: Final = 1_000_000
ONE_PLACE: Final = LimitSpec(tokens_per_day=TOKENS, concurrent_requests=1)
PROMPT: Final = {"messages": [{"role": "user", "content": "Reverse the word: gateway"}]}
BODY: Final = {"model": "cloud", **PROMPT, "max_tokens": 8}
RESERVED: Final = most_prompt_tokens(PROMPT, 0) + 8
MOST_TOKENS: Final = 200
UPSTREAM: Final = {
    "models.large": "none",
    "models.small": "none",
    "tiers.cloud.model": "mock-model",
    "tiers.cloud.price.prompt": 10.0,
    "tiers.cloud.price.completion": 30.0,
    "server.drain_grace_s": 20,
}
NUM_ROWS: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("counted", "admitted", "prefill", "between tokens"), (0,)),
    **dict.fromkeys(("settling", "settled", "draining"), (0,)),
    "remembered": (0, 1),  # it was in memory, or in the journal within flush_ms
    "closing": (0, 1),
    **dict.fromkeys(("journaled", "stored", "stored at the start"), (1,)),
}
"""The victim's rows after a kill at each moment."""
QUICK: Final = ("stored",)


# ---- of the gateway -----------------------------------------------------------------------------


@dataclass
class Mortal:
    """Gateways of one process, one after the other, on one database."""

    zygote: subprocess.Popen[str]
    flags: Mapping[str, Any]
    url: str = ""
    pid: int = 0
    told: dict[str, int] = field(default_factory=dict)
    """Tokens of each answer, by request id."""

    def start(self, moment: str | None = None) -> None:
        """Start the next one; it ends at the moment."""
        self._order(moment)
        until(lambda: httpx.get(f"{self.url}/ready").status_code == 200)

    def start_and_die(self, moment: str) -> None:
        """Start one that ends at the moment, which comes before it is ready."""
        self._order(moment)
        self.is_killed()

    def kill(self) -> None:
        """Kill -9, now."""
        os.kill(self.pid, signal.SIGKILL)
        self.is_killed()

    def drain(self) -> None:
        """Have it begin to end in good order."""
        os.kill(self.pid, signal.SIGTERM)
        until(lambda: httpx.get(f"{self.url}/ready").status_code == 503)

    def stop(self) -> None:
        """Have it end in good order; the second signal ends the grace."""
        self.drain()
        os.kill(self.pid, signal.SIGTERM)

    def is_killed(self) -> None:
        """Wait until it has ended by SIGKILL."""
        assert self.ending() == -signal.SIGKILL

    def ending(self) -> int:
        """Wait for its end; return its status."""
        return int(self._word("ended"))

    def ask(self, key: str, request_id: str) -> httpx.Response | None:
        """Ask once; None where the gateway ends before the answer does."""
        headers = {
            **bearer(key),
            "x-request-id": request_id,
            "idempotency-key": request_id,
        }
        with suppress(httpx.TransportError):
            answer = httpx.post(f"{self.url}{PATHS[0]}", json=BODY, headers=headers, timeout=60)
            if request_id != VICTIM:
                assert answer.status_code == 200, answer.text
                assert "idempotent-replayed" not in answer.headers
                self.told[request_id] = answer.json()["usage"]["total_tokens"]
            return answer
        return None

    def _order(self, moment: str | None) -> None:
        assert self.zygote.stdin is not None
        self.zygote.stdin.write(json.dumps({"flags": self.flags, "moment": moment}) + "\n")
        self.zygote.stdin.flush()
        self.pid = int(self._word("is"))
        self.url = self._word("at")

    def _word(self, name: str) -> str:
        assert self.zygote.stdout is not None
        for line in self.zygote.stdout:
            if line.startswith(f"{name} "):
                return line.split()[1]
        raise AssertionError(f"no {name!r} came")


@contextmanager
def mortal(flags: Mapping[str, Any]) -> Iterator[Mortal]:
    """The process that forks the gateways."""
    command = [sys.executable, "-m", "tests.laws.mortal_gateway"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as zygote:
        made = Mortal(zygote, flags)
        try:
            yield made
        finally:
            with suppress(ProcessLookupError):
                os.kill(made.pid, signal.SIGKILL)
            zygote.communicate()


@dataclass(frozen=True)
class Keys:
    """The victim's key, another tenant's, and one that reads the metrics."""

    victim: str
    other: str
    inspector: str

    @classmethod
    def of(cls, database: Database) -> "Keys":
        """Make them."""
        store = key_store(load_settings(flags=BOOKS, environ={}, config_file=None), database)
        return cls(
            victim=store.create(KeyOrder(name="victim", limits=ONE_PLACE)).text,
            other=store.create(KeyOrder(name="other", limits=ONE_PLACE)).text,
            inspector=store.create(
                KeyOrder(name="inspector", limits=LimitSpec(), scopes=Scopes(reads_metrics=True))
            ).text,
        )


def test_a_gateway_killed_at_any_moment_holds_and_doubles_nothing(tmp_path: Path) -> None:
    check_moments(tmp_path, QUICK)


@pytest.mark.slow
def test_a_gateway_killed_at_every_moment_holds_and_doubles_nothing(tmp_path: Path) -> None:
    check_moments(tmp_path, [moment for moment in NUM_ROWS if moment not in QUICK])


def check_moments(folder: Path, moments: Sequence[str]) -> None:
    """Kill at each moment in turn, start again, look."""
    url = with_tables(folder / "books.db")
    database = Database(url)
    with mock_in_thread(MockScript(num_pieces=8)) as mock:
        flags = {**BOOKS, **UPSTREAM, "database_url": url, "tiers.cloud.url": mock.url}
        try:
            keys = Keys.of(database)
            with mortal(flags) as gateway:
                gateway.start(call_of(moments[0]))
                for moment, following in zip(moments, [*moments[1:], None], strict=True):
                    num_before = len(victims_rows(database))
                    gateway.ask(keys.other, request_id(moment, "before"))
                    kill_at(gateway, mock, keys.victim, moment)
                    gateway.start(following and call_of(following))
                    num_rows = len(victims_rows(database)) - num_before
                    assert num_rows in NUM_ROWS[moment], moment
                    check_free(gateway, database, keys, moment)
                gateway.stop()
                assert gateway.ending() == 0
                check_booked_once(gateway.told, rows_of(database))
        finally:
            database.close()


def call_of(moment: str) -> str | None:
    """The call at which the gateway ends by itself; None: it is killed."""
    return "journaled" if moment == "stored at the start" else moment if moment in MOMENTS else None


def request_id(moment: str, when: str) -> str:
    """A name of a request, which is its idempotency key too."""
    return f"{moment}-{when}".replace(" ", "-")


def kill_at(gateway: Mortal, mock: MockThread, key: str, moment: str) -> None:
    """Ask as the victim; returns when the gateway is dead."""
    match moment:
        case "prefill":
            with slow(mock, MockScript(first_token_delay_s=60)):
                num_before = len(mock.requests)
                kill_during(gateway, key, lambda: until(lambda: len(mock.requests) > num_before))
        case "between tokens":
            with slow(mock, MockScript(num_pieces=8, gap_s=0.3)):
                kill_during(gateway, key, lambda: None, num_pieces=3)
        case "draining":
            with slow(mock, MockScript(num_pieces=8, gap_s=0.3)):
                kill_during(gateway, key, gateway.drain, num_pieces=3)
        case "closing":
            assert gateway.ask(key, VICTIM) is not None
            gateway.stop()
            gateway.is_killed()
        case "stored at the start":
            gateway.ask(key, VICTIM)
            gateway.is_killed()
            gateway.start_and_die("stored")
        case _:
            gateway.ask(key, VICTIM)
            gateway.is_killed()


@contextmanager
def slow(mock: MockThread, script: MockScript) -> Iterator[None]:
    """Have the mock answer otherwise."""
    usual, mock.script = mock.script, script
    try:
        yield
    finally:
        mock.script = usual


def kill_during(gateway: Mortal, key: str, wait: Callable[[], None], num_pieces: int = 0) -> None:
    """Kill during the victim's stream, after so many pieces of it and this wait."""
    headers = {**bearer(key), "x-request-id": VICTIM}
    body = {**BODY, "stream": True}
    seen = threading.Semaphore(0)

    def read() -> None:
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", f"{gateway.url}{PATHS[0]}", json=body, headers=headers) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    seen.release()

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(num_pieces):
        assert seen.acquire(timeout=30)
    wait()
    gateway.kill()
    reader.join()


# ---- of the engine ------------------------------------------------------------------------------


def test_an_engine_killed_at_any_moment_holds_and_doubles_nothing(tmp_path: Path) -> None:
    check_engine(tmp_path, {}, ("prefilling", "finished"))


@pytest.mark.slow
def test_an_engine_killed_at_every_moment_holds_and_doubles_nothing(tmp_path: Path) -> None:
    flags = {**ENGINE, "engine.process": True, "models.small": "none"}
    settings = load_settings(flags=flags, environ={}, config_file=None)
    check_engine(tmp_path, {"settings": settings.model_dump_json()}, mortal_engine.MOMENTS)


def check_engine(folder: Path, options: Mapping[str, str], moments: Sequence[str]) -> None:
    """Kill at each moment in turn; it is started again by its gateway."""
    armed = folder / "armed"
    arguments = json.dumps({**options, "armed": str(armed)})
    builder = "tests.laws.mortal_engine:build"
    client = ProcessEngineClient(EngineRecipe(builder=builder, arguments=arguments))
    with accounts(folder, {"models.small": "none"}, client=client) as made:
        keys = {name: made.new_key(name, ONE_PLACE) for name in (VICTIM, "other")}
        for moment in moments:
            pid = client.pid
            armed.write_text(moment, encoding="utf-8")
            victim = victims(keys[VICTIM], moment)
            check_victim(told := put_all([made.url], [victim], num_clients=1)[0])
            until(lambda pid=pid: client.is_ready and client.pid != pid)  # type: ignore[misc]
            assert not armed.exists()
            check_limit_is_free(made, keys, moment)
            if not told.has_left:
                again = replace(victim, request_id=f"undisturbed-{moment}")
                check_same(told, put_all([made.url], [again], num_clients=1)[0])


def victims(key: str, moment: str) -> Ask:
    """A stream; its client leaves early if the engine is to end while it aborts."""
    leaves = moment == "aborting"
    num_tokens = MOST_TOKENS if leaves else 12
    return Ask(
        request_id=VICTIM,
        key=key,
        path=PATHS[0],
        body={
            **own_words(moment),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
        },
        leaves_after_pieces=2 if leaves else None,
    )


def own_words(moment: str) -> dict[str, Any]:
    """A prompt of each moment's own: requests of two deaths are refused."""
    messages = [{"role": "user", "content": f"Say: {moment}"}]
    return {"model": "large", "messages": messages, "temperature": 0.8, "seed": 11}


def check_victim(told: Told) -> None:
    """The answer is whole, unless its client has left."""
    assert told.has_left or told.usage is not None, told
    assert not told.has_failed


def check_same(told: Told, right: Told) -> None:
    """Both clients have the same text and the same usage."""
    one, other = (
        "".join(
            choice["delta"].get("content") or ""
            for document in documents_of(answer.body)
            for choice in document["choices"]
        )
        for answer in (told, right)
    )
    assert one == other
    assert told.usage == right.usage


def check_limit_is_free(made: Accounts, keys: Mapping[str, str], moment: str) -> None:
    """All tenants are answered, each once, and pay for that."""
    for name, key in keys.items():
        before = made.rows()
        charged = sum(row["num_charged_tokens"] for row in before if row["key_id"] == key[3:11])
        answer = made.gateway.http.post(
            PATHS[0],
            json={**own_words(moment), "max_tokens": 4},
            headers={**bearer(key), "x-request-id": f"{name}-{moment}"},
        )
        assert answer.status_code == 200, (moment, answer.text)
        num_tokens = answer.json()["usage"]["total_tokens"]
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert left == TOKENS - charged - num_tokens, moment
        ids = {row["row_id"] for row in before}
        (row,) = [row for row in made.rows() if row["row_id"] not in ids and is_answer(row)]
        assert row["num_charged_tokens"] == num_tokens
    for row in made.rows():
        if row["client_request_id"] == VICTIM and is_answer(row):
            assert row["num_charged_tokens"] > 0
            assert row["num_charged_tokens"] <= row["num_prompt_tokens"] + MOST_TOKENS


def is_answer(row: Row) -> bool:
    """Whether it is more than the account of what was drafted, which costs nothing."""
    return row["kind"] != "draft"


# ---- the books ----------------------------------------------------------------------------------


def rows_of(database: Database) -> list[Row]:
    """All rows in the database."""
    with database.read() as connection:
        return [dict(row._mapping) for row in connection.execute(select(tables.ledger))]


def victims_rows(database: Database) -> list[Row]:
    """Those that were killed."""
    return [row for row in rows_of(database) if row["client_request_id"] == VICTIM]


def num_charged(database: Database, key: str) -> int:
    """Tokens that a key pays for."""
    rows = [row for row in rows_of(database) if row["key_id"] == key[3:11]]
    return sum(row["num_charged_tokens"] for row in rows)


def check_free(gateway: Mortal, database: Database, keys: Keys, moment: str) -> None:
    """Nothing is reserved; both tenants are answered, from what their limits have left."""

    def is_free() -> bool:
        lines = httpx.get(f"{gateway.url}/metrics", headers=bearer(keys.inspector)).text
        return "\noutrider_limit_reservations 0.0\n" in lines

    until(is_free)
    assert all(0 < row["num_charged_tokens"] <= RESERVED for row in victims_rows(database))
    left = {key: TOKENS - num_charged(database, key) for key in (keys.victim, keys.other)}
    for key in left:
        answer = gateway.ask(key, name := request_id(moment, key[3:11]))
        assert answer is not None
        left_after = int(answer.headers["x-ratelimit-remaining-tokens"])
        assert left_after == left[key] - gateway.told[name], moment
    until(is_free)


def check_booked_once(told: Mapping[str, int], rows: Sequence[Row]) -> None:
    """Each answer is booked once, with what its client was told; none of a kill's is missing."""
    booked = [row for row in rows if row["client_request_id"] != VICTIM]
    assert {row["client_request_id"]: row["num_charged_tokens"] for row in booked} == told
    assert len(booked) == len(told)
