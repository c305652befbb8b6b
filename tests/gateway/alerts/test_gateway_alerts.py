"""Alerts of a whole gateway, and the command that tries the webhook."""

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from outrider.gateway.alerts.conditions import Alert
from outrider.gateway.alerts.delivery import Webhook
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.cli import app
from outrider.gateway.settings.alerts import AlertSettings
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.application import build_app
from tests.engines import PAIR_FOLDER
from tests.gateway.alerts.receiver import SECRET
from tests.gateway.conftest import parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World
from tests.gateway.tenancy.ledger.ledgers import row
from tests.gateway.tenancy.ledger.rows import store
from tests.gateway.waiting import wait_for

BOSS = {"authorization": f"Bearer {ADMIN_TOKEN}"}


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook in a thread: its address, and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(404 if self.path == "/nowhere" else 204)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/alerts", got
    server.shutdown()
    server.server_close()


def settings_of(url: str) -> AlertSettings:
    return AlertSettings(url=SecretStr(url), secret=SecretStr(SECRET))


@pytest.mark.slow
def test_a_gateway_tells_that_a_budget_is_nearly_used(
    tmp_path: Path, hook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, got = hook
    world = World(tmp_path)
    database: Database = world.database
    tenancy = Tenancy(keys=world.parts, database=database, audit=AuditLog(database))
    engine = ScriptedClient(vocab_size=4096, script=lambda _: Script())
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "large"))
    parts = parts_over(engine, tokenizer, tenancy=tenancy, alerts=settings_of(url))
    with running(build_app(parts)) as address, httpx.Client(base_url=address) as http:
        wanted = {"name": "app", "limits": {"tokens_per_day": 1000}}
        key_id = http.post("/admin/keys", json=wanted, headers=BOSS).json()["id"]
        now_s = parts.wall_clock()
        store(database, [row(1, key_id=key_id, num_charged_tokens=810, ended_at=now_s)])
        wait_for(lambda: bool(got))
        (alert,) = got
        assert alert["type"] == "budget.reached"
        data = alert["data"]
        assert (data["id"], data["share"], data["used"], data["allowed"]) == (
            key_id,
            0.8,
            810,
            1000,
        )
        metrics = http.get("/metrics", headers=BOSS).text
        assert 'outrider_alerts_total{state="sent"} 1.0' in metrics


def test_a_webhook_that_is_the_gateway_itself_does_no_harm(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine = ScriptedClient(vocab_size=4096, script=lambda _: Script())
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "large"))
    parts = parts_over(engine, tokenizer, tenancy=Tenancy(keys=world.parts))
    with running(build_app(parts)) as address:
        for path in ("/v1/chat/completions", "/admin/keys", "/nothing"):
            webhook = Webhook(settings_of(address + path))
            outcome = asyncio.run(webhook.post(Alert(event="router.drifted", at_s=1.0)))
            assert outcome in {400, 401, 404}
    assert engine.submitted == []
    assert world.store.load().keys == ()


def test_the_webhook_can_be_tried(
    hook: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, got = hook
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(app, ["alerts", "test"]).exit_code == 2
    monkeypatch.setenv("OUTRIDER_ALERTS__URL", url)
    monkeypatch.setenv("OUTRIDER_ALERTS__SECRET", "whsec_" + base64.b64encode(b"x" * 32).decode())
    tried = runner.invoke(app, ["alerts", "test"])
    assert (tried.exit_code, tried.stdout[-5:]) == (0, " 204\n")
    assert [each["type"] for each in got] == ["test"]
    monkeypatch.setenv("OUTRIDER_ALERTS__URL", url.replace("/alerts", "/nowhere"))
    refused = runner.invoke(app, ["alerts", "test"])
    assert (refused.exit_code, refused.stdout[-5:]) == (1, " 404\n")
