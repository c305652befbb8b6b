"""`outrider erase`: afterwards neither disk nor database has what a tenant or an end user left."""

import asyncio
import errno
import json
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import insert, select
from typer.testing import CliRunner, Result

from outrider.engine.cache.block_pool import owner_tag
from outrider.engine.cache.extent_space import stored_extents
from outrider.engine.cache.extents import Extent
from outrider.engine.cache.sealing import Seal, read_key
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.cli import app
from outrider.gateway.http.apis.responses.redis_responses import RedisResponses
from outrider.gateway.http.apis.responses.store import StoredResponse, response_key
from outrider.gateway.settings.telemetry import CaptureSettings
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database
from outrider.gateway.telemetry.capture import Exchange, build_capture
from outrider.gateway.tenancy.keys.key_parts import key_store
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.redis_store import RedisStore, redis_client
from outrider.gateway.tenancy.sign_in.sign_in import signed_in_id
from tests.databases import with_tables
from tests.engine.cache.test_extent_folder import ABOUT, chain, extent_of, folder_of
from tests.gateway.tenancy.ledger.ledgers import row
from tests.gateway.tenancy.ledger.rows import store

CANARY = "CANARY-51b7"
Invoke = Callable[[str], Result]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return with_tables(tmp_path / "keys.db")


@pytest.fixture
def outrider(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_DATABASE_URL", url)
    runner = CliRunner()
    return lambda words: runner.invoke(app, words.split())


def files_with(folder: Path, text: str) -> list[str]:
    return [
        path.name
        for path in folder.rglob("*")
        if path.is_file() and text.encode() in path.read_bytes()
    ]


def exchange(key_id: str, text: str, **request: Any) -> Exchange:
    body = {"messages": [{"role": "user", "content": text}], **request}
    return Exchange(
        request_id="r",
        endpoint="chat",
        ended_at=1e9,
        request=json.dumps(body).encode(),
        answer=b"{}",
        is_private=False,
        key_id=key_id,
    )


def capture(folder: Path, *exchanges: Exchange) -> None:
    settings = CaptureSettings(folder=folder)
    kept = build_capture(settings, CollectorRegistry(), rng=random.Random(), wall_clock=lambda: 1e9)
    for each in exchanges:
        kept.offer(each)
    asyncio.run(kept.close())


def feedback_of(key_id: str, request_id: str) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "name": "note",
        "experiment": "",
        "version": 0,
        "arm": "",
        "unit_bucket": 0,
        "key_id": key_id,
        "kind": "label",
        "value": 1.0,
        "label": CANARY,
        "given_at": 1e9,
    }


def test_nothing_of_a_tenant_is_left_on_disk_and_in_the_database(
    outrider: Invoke, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outrider(f"keys team create --name {CANARY}-team --label owner={CANARY}")
    made = outrider(f"keys create --name {CANARY} --team {CANARY}-team --label who={CANARY} --json")
    key_id = json.loads(made.stdout)["id"]
    other_id = json.loads(outrider("keys create --name other --json").stdout)["id"]
    texts = tmp_path / "texts"
    capture(texts, exchange(key_id, CANARY), exchange(other_id, "stays"))
    monkeypatch.setenv("OUTRIDER_TELEMETRY__CAPTURE__FOLDER", str(texts))
    with closing(Database(url)) as database:
        team_id = key_store(load_settings(), database).find_team(f"{CANARY}-team").team_id
        rows = [
            row(1, key_id=key_id, team_id=team_id, client_request_id=CANARY, charge_nanos=500,
                end_user=CANARY),
            row(2, key_id=other_id, client_request_id="theirs", charge_nanos=7),
        ]  # fmt: skip
        store(database, rows)
        with database.write() as connection:
            connection.execute(insert(tables.feedback).values(feedback_of(key_id, "r")))
    assert files_with(tmp_path, CANARY)
    with closing(Database(url)) as running:  # a gateway, which keeps the write-ahead log open
        with running.read() as connection:
            connection.execute(select(tables.keys)).all()
        done = outrider(f"erase --tenant {CANARY}-team --wait 0 --yes")
        assert done.exit_code == 0, done.output
        assert files_with(tmp_path, CANARY) == []
    with closing(Database(url)) as database:
        with database.read() as connection:
            ledger = tables.ledger
            query = select(ledger.c.key_id, ledger.c.team_id, ledger.c.charge_nanos)
            found = sorted(tuple(each) for each in connection.execute(query))
            reported = connection.execute(select(tables.feedback.c.key_id)).scalars().all()
        assert found == sorted([("erased", None, 500), (other_id, None, 7)])
        assert reported == ["erased"]
        last = [*AuditLog(database).rows()][-1]
    assert (last.action, last.target) == ("erase", f"tenant/{team_id}")
    assert (last.after or {})["counts"]["ledger rows"] == 1
    assert outrider("audit verify").exit_code == 0
    assert "stays" in (texts / "capture-2001-09-09.jsonl").read_text()
    listed = json.loads(outrider("keys list --json").stdout)
    assert {each["id"]: each["status"] for each in listed} == {
        key_id: "revoked",
        other_id: "active",
    }
    again = outrider(f"erase --tenant {team_id} --wait 0 --yes")
    assert "ledger rows: 0" in again.stdout


def test_an_end_user_is_erased_beside_others_of_the_tenant(
    outrider: Invoke, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = json.loads(outrider("keys create --name app --json").stdout)["id"]
    texts = tmp_path / "texts"
    capture(
        texts,
        exchange(key_id, "one", user=CANARY),
        exchange(key_id, "two", metadata={"user_id": CANARY}),
        exchange(key_id, "three", user="bob"),
    )
    monkeypatch.setenv("OUTRIDER_TELEMETRY__CAPTURE__FOLDER", str(texts))
    with closing(Database(url)) as database:
        digest = key_store(load_settings(), database).hasher.end_user_digest(CANARY)
        who = (CANARY, digest, "bob")  # before the setting was changed, and after
        mine = [row(i, key_id=key_id, end_user=name) for i, name in enumerate(who)]
        store(database, [*mine, row(9, key_id="other", end_user="zoe")])
    done = outrider(f"erase --end-user {CANARY} --tenant app --yes")
    assert "captured texts: 2" in done.stdout
    assert "ledger rows: 2" in done.stdout
    assert files_with(tmp_path, CANARY) == files_with(tmp_path, digest) == []
    with closing(Database(url)) as database, database.read() as connection:
        query = select(tables.ledger.c.end_user, tables.ledger.c.key_id)
        found = sorted(tuple(each) for each in connection.execute(query))
    assert found == [("", key_id), ("", key_id), ("bob", key_id), ("zoe", "other")]
    assert "ledger rows: 0" in outrider(f"erase --end-user {CANARY} --yes").stdout
    assert "ledger rows: 1" in outrider("erase --end-user zoe --yes").stdout
    assert "three" in (texts / "capture-2001-09-09.jsonl").read_text()
    assert json.loads(outrider("keys list --json").stdout)[0]["status"] == "active"


SIGN_IN = """
[sign_in.issuers.corp]
url = "https://id.example"
audience = "outrider"
[sign_in.issuers.corp.grants.all]
team = "red"
"""


def test_of_people_who_signed_in_nothing_is_left(
    outrider: Invoke, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no key: the ledger, captured texts and files have a digest in its place."""
    (tmp_path / "outrider.toml").write_text(SIGN_IN)
    monkeypatch.setenv("OUTRIDER_CONFIG", str(tmp_path / "outrider.toml"))
    outrider("keys team create --name red")
    with closing(Database(url)) as database:
        team_id = key_store(load_settings(), database).find_team("red").team_id
    people = [signed_in_id("https://id.example", name) for name in ("ann", "bob")]
    texts = tmp_path / "texts"
    capture(texts, *(exchange(person, person) for person in (*people, "other")))
    monkeypatch.setenv("OUTRIDER_TELEMETRY__CAPTURE__FOLDER", str(texts))
    monkeypatch.setenv("OUTRIDER_ENGINE__KV_FOLDER", str(tmp_path / "kv"))
    monkeypatch.setenv("OUTRIDER_ENGINE__KV_FOLDER_KEY", str(tmp_path / "kv.key"))
    folder = folder_of(tmp_path / "kv", seal=Seal(read_key(tmp_path / "kv.key")))
    space = folder.space(ABOUT)
    with closing(Database(url)) as database:
        hasher = key_store(load_settings(), database).hasher
        facts = [{"key_id": person, "team_id": team_id} for person in people]
        users = [{"end_user": f"corp:{name}"} for name in ("ann", "bob")]
        store(database, [row(i, **facts[i], **users[i]) for i in range(2)])
        with database.write() as connection:
            connection.execute(insert(tables.feedback).values(feedback_of(people[0], "r")))
    for number, person in enumerate(people):
        extent = extent_of(chain(number), 0, 4)
        owner = owner_tag(hasher.cache_salt(f"{team_id}\0{person}"))
        header = replace(extent.header, owner=owner)
        folder.write(space, Extent(header=header, payload=extent.payload))
    done = outrider("erase --end-user corp:ann --yes")
    found = [line.split(": ")[0] for line in done.stdout.splitlines() if line.endswith(": 1")]
    assert found == ["ledger rows", "feedback", "captured texts", "keys and values"]
    assert files_with(tmp_path, people[0]) == files_with(tmp_path, "corp:ann") == []
    done = outrider("erase --tenant red --wait 0 --yes")
    assert files_with(tmp_path, people[1]) == files_with(tmp_path, "corp:bob") == []
    assert [*stored_extents(space.folder)] == []
    assert "other" in (texts / "capture-2001-09-09.jsonl").read_text()


def test_a_team_without_keys_takes_nobody_elses_texts_along(
    outrider: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outrider("keys team create --name red")
    capture(tmp_path / "texts", exchange("other", "stays", user="alice"))
    monkeypatch.setenv("OUTRIDER_TELEMETRY__CAPTURE__FOLDER", str(tmp_path / "texts"))
    assert "texts: 0" in outrider("erase --end-user alice --tenant red --yes").stdout
    assert "texts: 0" in outrider("erase --tenant red --wait 0 --yes").stdout


def test_copies_of_mirrors_are_erased(
    outrider: Invoke, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mirror.jsonl"
    monkeypatch.setenv("OUTRIDER_MIRROR__FILE", str(file))
    key_id = json.loads(outrider("keys create --name app --json").stdout)["id"]
    with closing(Database(url)) as database:
        digest = key_store(load_settings(), database).hasher.end_user_digest("ann")
    whose = [(key_id, digest), (key_id, "bob"), ("other", "ann"), ("other", "")]
    lines = [{"key": key, "end_user": name, "request": {}} for key, name in whose]
    files = (file, tmp_path / "mirror-2026-11-22.jsonl")  # an older version's, and a day's
    for each in files:
        each.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "mirrors: 2" in outrider("erase --end-user ann --tenant app --yes").stdout
    assert "mirrors: 2" in outrider("erase --end-user ann --yes").stdout
    assert "mirrors: 2" in outrider("erase --tenant app --wait 0 --yes").stdout
    assert {each.read_text() for each in files} == {f"{json.dumps(lines[3])}\n"}


def test_an_end_user_named_by_a_mail_address_is_erased(
    outrider: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured texts are redacted, and so is the end user whom they name."""
    capture(tmp_path / "texts", exchange("app", "hers", user="ann@example.com"))
    monkeypatch.setenv("OUTRIDER_TELEMETRY__CAPTURE__FOLDER", str(tmp_path / "texts"))
    assert "texts: 1" in outrider("erase --end-user ann@example.com --yes").stdout


def test_keys_and_values_of_a_tenant_are_erased(
    outrider: Invoke, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [
        json.loads(outrider(f"keys create --name {name} --json").stdout)["id"]
        for name in ("gone", "stays")
    ]
    place, key_file = tmp_path / "kv", tmp_path / "kv.key"
    monkeypatch.setenv("OUTRIDER_ENGINE__KV_FOLDER", str(place))
    monkeypatch.setenv("OUTRIDER_ENGINE__KV_FOLDER_KEY", str(key_file))
    with closing(Database(url)) as database:
        hasher = key_store(load_settings(), database).hasher
    folder = folder_of(place, seal=Seal(read_key(key_file)))
    space = folder.space(ABOUT)
    for number, key_id in enumerate(ids):
        extent = extent_of(chain(number), 0, 4)
        header = replace(extent.header, owner=owner_tag(hasher.cache_salt(key_id)))
        folder.write(space, Extent(header=header, payload=extent.payload))
    done = outrider("erase --tenant gone --wait 0 --yes")
    assert "keys and values: 1" in done.stdout
    (left,) = stored_extents(space.folder)
    assert space.read(left).header.owner == owner_tag(hasher.cache_salt(ids[1]))


@pytest.mark.slow
def test_stored_responses_in_redis_are_erased(
    outrider: Invoke, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_REDIS_URL", redis_server)
    key_id = json.loads(outrider("keys create --name app --json").stdout)["id"]

    async def left(*, puts: bool) -> list[str]:
        """Put a response of each end user, or say whose are there."""
        client = redis_client(redis_server, 5.0)
        responses = RedisResponses(RedisStore(client), ttl_s=60.0, max_bytes_per_tenant=10**6)
        found = []
        for number, (tenant, user) in enumerate(
            ((key_id, "alice"), (key_id, "bob"), ("others", "alice"))
        ):
            principal = Principal(key_id=tenant, name="", tenant=tenant)
            key = response_key(principal, f"resp_{number:048x}")
            assert key is not None
            entry = StoredResponse(owner=tenant, end_user=user, input_items=b"", response=b"x")
            if puts:
                assert await responses.put(key, entry)
            elif await responses.get(key) is not None:
                found.append(f"{tenant}/{user}")
        if puts:
            await client.set(b"outrider:answer:x", b"cached")
        else:
            assert await client.get(b"outrider:answer:x") is None
        await client.aclose()
        return found

    asyncio.run(left(puts=True))
    assert outrider("erase --end-user alice --tenant app --yes").exit_code == 0
    assert asyncio.run(left(puts=False)) == [f"{key_id}/bob", "others/alice"]
    assert outrider("erase --tenant app --wait 0 --yes").exit_code == 0
    assert asyncio.run(left(puts=False)) == ["others/alice"]


def test_no_copy_of_texts_is_left_where_the_disk_is_full(
    outrider: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    capture(tmp_path / "texts", exchange("app", "hers", user="ann"), exchange("app", CANARY))
    monkeypatch.setenv("OUTRIDER_TELEMETRY__CAPTURE__FOLDER", str(tmp_path / "texts"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", is_full)
        assert outrider("erase --end-user ann --yes").exit_code == 1
    assert files_with(tmp_path, CANARY) == ["capture-2001-09-09.jsonl"]


def test_what_cannot_be_erased_is_said(outrider: Invoke) -> None:
    assert outrider("erase").exit_code == 2
    assert outrider("erase --tenant nobody --yes").exit_code == 1
    outrider("keys team create --name red")
    outrider("keys create --name app --team red --json")
    refused = outrider("erase --tenant app --yes")
    assert (refused.exit_code, "which is the tenant" in refused.stderr) == (2, True)
