"""/admin/audit, and changes that no database keeps, through a whole gateway."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.audit.verifying import verify_chain
from outrider.gateway.http.apis.audit import AuditList
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.application import build_app
from tests.engines import PAIR_FOLDER
from tests.gateway.answers import read_answer
from tests.gateway.conftest import parts_over
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World

BOSS = {"authorization": f"Bearer {ADMIN_TOKEN}"}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def http(world: World) -> Iterator[TestClient]:
    tenancy = Tenancy(keys=world.parts, database=world.database, audit=AuditLog(world.database))
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "large"))
    engine = ScriptedClient(vocab_size=4096, script=lambda _: Script())
    parts = parts_over(engine, tokenizer, tenancy=tenancy)
    with TestClient(build_app(parts)) as client:
        yield client


def changes(http: TestClient, **query: int) -> list[dict[str, Any]]:
    response = http.get("/admin/audit", params=query, headers=BOSS)
    read_answer(AuditList, response.content)
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def test_who_changed_what_can_be_asked(http: TestClient) -> None:
    headers = BOSS | {"x-request-id": "mine"}
    made = http.post("/admin/keys", json={"name": "app"}, headers=headers)
    key = made.json()
    assert http.delete(f"/admin/keys/{key['id']}", headers=BOSS).status_code == 200
    created, revoked = changes(http)
    assert (created["actor"], created["action"]) == ("key/admin-token", "key.create")
    assert created["request_id"] == made.headers["x-request-id"]
    assert (created["target"], created["after"]["name"]) == (f"key/{key['id']}", "app")
    assert revoked["previous_hash"] == created["hash"]
    assert revoked["before"] == {"revoked_at": None}
    page = http.get("/admin/audit?limit=1", headers=BOSS).json()
    assert (page["data"], page["has_more"]) == ([created], True)
    assert changes(http, after=1) == [revoked]
    assert changes(http, after=0) == [created, revoked]
    assert http.get("/admin/audit?after=x", headers=BOSS).json()["error"]["param"] == "after"


def test_other_keys_may_not_read_it(http: TestClient) -> None:
    key = http.post("/admin/keys", json={"name": "app"}, headers=BOSS).json()["key"]
    headers = {"authorization": f"Bearer {key}"}
    assert http.get("/admin/audit", headers=headers).status_code == 403
    assert http.get("/admin/audit").status_code == 401


def test_adapters_and_prompts_are_recorded_without_texts(http: TestClient) -> None:
    body = {"name": "legal", "path": "/nowhere"}
    assert http.post("/admin/adapters", json=body, headers=BOSS).status_code == 200
    assert http.delete("/admin/adapters/other", headers=BOSS).status_code == 404
    prompt = {"messages": [{"role": "system", "content": "CANARY"}], "ttl_s": 60}
    http.put("/admin/prompts/rules", json=prompt, headers=BOSS)
    http.delete("/admin/prompts/rules", headers=BOSS)
    found = changes(http)
    actions = [(each["action"], each["target"]) for each in found]
    assert actions[:3] == [
        ("adapter.load", "adapter/legal"),
        ("adapter.unload", "adapter/other"),
        ("adapter.unload.failed", "adapter/other"),
    ]
    assert found[0]["after"] == {"name": "legal", "path": "/nowhere", "tier": "large"}
    assert ("prompt.keep", "prompts/admin-token") in actions
    assert ("prompt.delete", "prompts/admin-token") in actions
    assert "CANARY" not in str(found)


def test_nothing_is_changed_that_cannot_be_recorded(http: TestClient, world: World) -> None:
    http.post("/admin/keys", json={"name": "app"}, headers=BOSS)
    path = world.database.path
    assert path is not None
    world.database.close()
    moved = path.with_suffix(".away")
    path.rename(moved)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.mkdir()  # the database is away
    assert http.delete("/admin/adapters/legal", headers=BOSS).status_code == 503
    path.rmdir()
    moved.rename(path)
    assert [each["action"] for each in changes(http)] == ["key.create"]
    assert verify_chain(world.database).faults == ()
