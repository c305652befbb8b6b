"""Booked rows outlive a kill -9 of the gateway and of its engine; limits go on from there."""

import asyncio
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from sqlalchemy import select

from benchmarks.shared.mock_upstream import MockScript, mock_in_thread
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.amounts import NANOS_PER_USD, LimitSpec
from outrider.gateway.tenancy.keys.key_parts import key_store
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.upstream.bounds import most_prompt_tokens
from tests.laws.accounts import (
    BOOKS,
    PATHS,
    Accounts,
    Ask,
    Row,
    Told,
    accounts,
    bearer,
    booked,
    counted,
    put,
    put_all,
    until,
    until_equal,
)
from tests.laws.gateways import ENGINE

ROOT: Final = Path(__file__).parents[2]
BUNDLED: Final = {"models.large": "demo", "models.small": "demo"}
FLUSH_S: Final = 0.1
SCHEDULING_S: Final = 0.5
"""How late a thread may be on a busy machine, beyond the interval itself."""
MOST: Final = {"tokens": 1_500, "usd": 6_000_000}
LIMITS: Final = {
    "tokens": LimitSpec(tokens_per_day=MOST["tokens"]),
    "usd": LimitSpec(usd_per_month=MOST["usd"] / NANOS_PER_USD),
}
LOAD_S: Final = 1.5
PROMPT: Final = {"messages": [{"role": "user", "content": "Reverse the word: gateway"}]}
# A request at an upstream tier reserves the bytes of its prompt, and 8 tokens for the answer.
_PROMPT_TOKENS: Final = most_prompt_tokens(PROMPT, 0)
RESERVED: Final = {"tokens": _PROMPT_TOKENS + 8, "usd": _PROMPT_TOKENS * 10_000 + 8 * 30_000}


# ---- of the gateway -----------------------------------------------------------------------------


@contextmanager
def serving(flags: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`outrider serve`; yields the process and its URL when it is ready."""
    command = [sys.executable, "-m", "outrider.gateway.cli", "serve", "--port", "0"]
    for name, value in flags.items():
        command += ["--set", f"{name}={str(value).lower() if value in (True, False) else value}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), None)
            assert line is not None, "it did not start"
            found = re.search(r"http://[\d.:]+", line)
            assert found
            until(lambda: httpx.get(f"{found.group()}/ready").status_code == 200, 180)
            yield process, found.group()
        finally:
            process.kill()


@dataclass(frozen=True)
class Timed:
    """An answer, and when it was there."""

    told: Told
    at_s: float


async def load(
    url: str, keys: Mapping[str, str], models: Sequence[str], process: subprocess.Popen[str]
) -> list[Timed]:
    """Several clients a key, until the gateway is killed in the midst of it."""
    answers: list[Timed] = []
    rng = random.Random(1)

    async def client(name: str, number: int) -> None:
        for i in itertools.count():
            body = {"model": rng.choice(models), **PROMPT, "max_tokens": 8}
            ask = Ask(request_id=f"{name}-{number}-{i}", key=keys[name], path=PATHS[0], body=body)
            try:
                told = await put(url, ask)
            except (OSError, asyncio.IncompleteReadError):
                return
            if told.usage is not None:
                answers.append(Timed(told, time.monotonic()))
            if answers and time.monotonic() - answers[0].at_s > LOAD_S:
                process.kill()
            if told.status == 429:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(client(name, i) for name in keys for i in range(2)))
    return answers


@pytest.mark.slow
def test_a_killed_gateway_has_booked_what_it_answered(tmp_path: Path) -> None:
    elsewhere = {
        "models.large": "none",
        "models.small": "none",
        "tiers.cloud.model": "mock-model",
        "tiers.cloud.price.completion": 30.0,
        "tiers.cloud.price.prompt": 10.0,
    }
    with mock_in_thread(MockScript(num_pieces=8)) as mock:
        check_kill(tmp_path, {**elsewhere, "tiers.cloud.url": mock.url}, ("cloud",))


@pytest.mark.long
def test_a_killed_gateway_has_booked_what_its_models_answered(tmp_path: Path) -> None:
    check_kill(tmp_path, {**BUNDLED, **ENGINE}, ("large", "auto", "small"))


def check_kill(folder: Path, tiers: Mapping[str, Any], models: Sequence[str]) -> None:
    """Load, kill, start again, and use up what the keys have left."""
    url = f"sqlite:///{folder / 'books.db'}"
    flags = {**BOOKS, **tiers, "database_url": url, "ledger.flush_ms": 1000 * FLUSH_S}
    database = Database(url)
    try:
        database.migrate()
        store = key_store(load_settings(flags=flags, environ={}, config_file=None), database)
        keys = {
            name: store.create(KeyOrder(name=name, limits=limits)).text
            for name, limits in LIMITS.items()
        }
        # Nothing reaches the database: the journal is all that is left.
        with serving({**flags, "ledger.batch_ms": 600_000}) as (process, address):
            answers = asyncio.run(load(address, keys, models, process))
            killed_s = time.monotonic()
        assert stored(database) == []
        with serving(flags) as (process, address):
            before = stored(database)
            check_kept(answers, before, killed_s)
            after = [one for name in keys for one in use_up(address, keys[name], models[0], name)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        check_limits(keys, before, stored(database), after)
    finally:
        database.close()


def stored(database: Database) -> list[Row]:
    """All rows in the database."""
    with database.read() as connection:
        return [dict(row._mapping) for row in connection.execute(select(tables.ledger))]


def check_kept(answers: list[Timed], rows: list[Row], killed_s: float) -> None:
    """Check that each answer before the last flush is in the ledger once, as it was told."""
    charged: Counter[str] = Counter()
    num_rows: Counter[str] = Counter()
    for row in rows:
        charged[row["client_request_id"]] += row["num_charged_tokens"]
        num_rows[row["client_request_id"]] += row["num_charged_tokens"] > 0
    assert set(num_rows.values()) <= {0, 1}
    num_safe = 0
    for answer in answers:
        request_id = answer.told.ask.request_id
        is_safe = answer.at_s < killed_s - FLUSH_S - SCHEDULING_S
        num_safe += is_safe
        if is_safe or request_id in charged:
            assert charged[request_id] == sum(answer.told.usage or ()), (request_id, is_safe)
    assert num_safe > 5


def use_up(url: str, key: str, model: str, name: str) -> list[Told]:
    """One request after another, until one is refused."""
    told: list[Told] = []
    while not told or told[-1].status == 200:
        body = {"model": model, **PROMPT, "max_tokens": 8}
        ask = Ask(request_id=f"{name}-after-{len(told)}", key=key, path=PATHS[0], body=body)
        told += put_all([url], [ask], num_clients=1)
    assert told[-1].status == 429
    return told


def check_limits(
    keys: Mapping[str, str], before: list[Row], rows: list[Row], after: list[Told]
) -> None:
    """Check that charges before and after the kill are within the limit, and near it."""
    used: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        used[row["key_id"]]["tokens"] += row["num_charged_tokens"]
        used[row["key_id"]]["usd"] += row["charge_nanos"]
    for name, key in keys.items():
        left = MOST[name] - used[key[3:11]][name]
        assert 0 <= left < max(0.1 * MOST[name], RESERVED[name]), (
            "another request would have fitted"
        )
    assert {row["row_id"] for row in before} <= {row["row_id"] for row in rows}
    num_tokens = sum(sum(one.usage) for one in after if one.usage)
    old = {row["row_id"] for row in before}
    assert num_tokens == sum(r["num_charged_tokens"] for r in rows if r["row_id"] not in old)


# ---- of the engine ------------------------------------------------------------------------------


@pytest.mark.slow
def test_work_of_a_killed_engine_is_not_charged(tmp_path: Path) -> None:
    limits = LimitSpec(tokens_per_day=1_000_000, concurrent_requests=6)
    options = {"engine.process": True, "engine.resume_within_s": 0}  # else answers go on
    with accounts(tmp_path, options) as made:
        key = made.new_key("tester", limits)
        endless = {**PROMPT, "temperature": 2.0, "min_tokens": 3000, "max_tokens": 3000, "n": 2}
        asks = [
            Ask(
                request_id=f"e-{number}",
                key=key,
                path=PATHS[0],
                body={**endless, "model": model, "stream": streams},
            )
            for number, (model, streams) in enumerate(
                (model, streams)
                for model in ("auto", "small", "large")
                for streams in (True, False)
            )
        ]
        told = asyncio.run(killed(made, asks))
        assert all(one.status != 200 or one.has_failed for one in told)
        rows = made.rows()
        assert {row["client_request_id"] for row in rows} == {ask.request_id for ask in asks}
        assert {row["outcome"] for row in rows} <= {"failed", "escalated"}
        assert sum(row["num_charged_tokens"] + row["charge_nanos"] for row in rows) == 0
        answers = [row for row in rows if row["kind"] == "answer"]
        assert all(row["num_completion_tokens"] and row["num_computed_tokens"] for row in answers)
        # What streams were sent is the least that was written.
        for one in told:
            own = [row for row in rows if row["client_request_id"] == one.ask.request_id]
            assert sum(row["num_completion_tokens"] for row in own) >= num_pieces(one)
        check_goes_on(made, key, asks, {row["row_id"] for row in rows})


async def killed(made: Accounts, asks: list[Ask]) -> list[Told]:
    """All at once; when all are being answered the engine's process is killed."""
    engine = made.gateway.context.engine
    assert isinstance(engine, ProcessEngineClient)
    pid = engine.pid
    assert pid is not None
    tasks = [asyncio.create_task(put(made.url, ask)) for ask in asks]

    def all_write() -> bool:
        stats = made.engine_stats()
        tiers = stats.tiers.values()
        return sum(t.num_running for t in tiers) == 2 * len(asks) and all(
            t.num_output_tokens > 50 for t in tiers
        )

    await asyncio.to_thread(until, all_write)
    os.kill(pid, signal.SIGKILL)
    told = list(await asyncio.gather(*tasks))
    await asyncio.to_thread(until, lambda: engine.is_ready and engine.pid != pid, 180)
    return told


def num_pieces(told: Told) -> int:
    """Pieces of text in a stream, of a token or more each."""
    return told.body.count(b'"content":"') - told.body.count(b'"content":""')


def check_goes_on(made: Accounts, key: str, asks: list[Ask], old: set[str]) -> None:
    """No limit is held by the dead; the next engine's count begins anew."""
    assert made.remaining(key) > 999_900
    again = [
        Ask(
            request_id=f"again-{ask.request_id}",
            key=key,
            path=ask.path,
            body={**ask.body, "min_tokens": 0, "max_tokens": 12},
        )
        for ask in asks
    ]
    told = put_all([made.url], again, num_clients=len(again))
    assert {one.status for one in told} == {200}

    def new_rows() -> list[Row]:
        return [row for row in made.rows() if row["row_id"] not in old]

    until_equal(lambda: (booked(new_rows()), counted(made.engine_stats())))
    response = made.gateway.http.get("/v1/usage", headers=bearer(key))
    assert response.status_code == 200
