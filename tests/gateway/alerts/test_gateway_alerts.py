"""Alerts of a whole gateway, and the command that tries the webhook."""

import asyncio
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from outrider.gateway.alerts.conditions import Alert
from outrider.gateway.alerts.delivery import Webhook
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.audit.log import AuditLog
from outrider.gateway.cli import app
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.metering.tenancy import Tenancy
from outrider.gateway.wiring.application import build_app
from tests.engines import PAIR_FOLDER
from tests.gateway.checks.services import SECRET, Service, running_service
from tests.gateway.conftest import parts_over, running
from tests.gateway.scripted_client import Script, ScriptedClient
from tests.gateway.tenancy.keys.world import ADMIN_TOKEN, World
from tests.gateway.tenancy.ledger.ledgers import row
from tests.gateway.tenancy.ledger.rows import store
from tests.gateway.waiting import wait_for

BOSS = {"authorization": f"Bearer {ADMIN_TOKEN}"}


@pytest.mark.slow
def test_a_gateway_tells_that_a_budget_is_nearly_used(tmp_path: Path) -> None:
    world = World(tmp_path)
    database: Database = world.database
    tenancy = Tenancy(keys=world.parts, database=database, audit=AuditLog(database))
    engine = ScriptedClient(vocab_size=4096, script=lambda _: Script())
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "large"))
    with running_service(lambda _: 204) as service:
        settings = service.alert_settings()
        parts = parts_over(engine, tokenizer, tenancy=tenancy, alerts=settings)
        with running(build_app(parts)) as address, httpx.Client(base_url=address) as http:
            wanted = {"name": "app", "limits": {"tokens_per_day": 1000}}
            key_id = http.post("/admin/keys", json=wanted, headers=BOSS).json()["id"]
            now_s = parts.wall_clock()
            store(database, [row(1, key_id=key_id, num_charged_tokens=810, ended_at=now_s)])
            sent = 'outrider_alerts_total{state="sent"} 1.0'
            wait_for(lambda: sent in http.get("/metrics", headers=BOSS).text)
    (alert,) = service.questions
    assert alert["type"] == "budget.reached"
    data = alert["data"]
    assert (data["id"], data["share"]) == (key_id, 0.8)
    assert (data["used"], data["allowed"]) == (810, 1000)


def test_a_webhook_that_is_the_gateway_itself_does_no_harm(tmp_path: Path) -> None:
    world = World(tmp_path)
    engine = ScriptedClient(vocab_size=4096, script=lambda _: Script())
    tokenizer = ChatTokenizer.load(str(PAIR_FOLDER / "large"))
    parts = parts_over(engine, tokenizer, tenancy=Tenancy(keys=world.parts))
    with running(build_app(parts)) as address:
        for path in ("/v1/chat/completions", "/admin/keys", "/nothing"):
            webhook = Webhook(Service(address + path).alert_settings())
            outcome = asyncio.run(webhook.post(Alert(event="router.drifted", at_s=1.0)))
            assert outcome in {400, 401, 404}
    assert engine.submitted == []
    assert world.store.load().keys == ()


def test_the_webhook_can_be_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(app, ["alerts", "test"]).exit_code == 2
    statuses = [204, 404]
    with running_service(lambda _: statuses.pop(0)) as service:
        monkeypatch.setenv("OUTRIDER_ALERTS__URL", service.url)
        monkeypatch.setenv("OUTRIDER_ALERTS__SECRET", SECRET)
        tried, refused = (runner.invoke(app, ["alerts", "test"]) for _ in range(2))
    assert (tried.exit_code, tried.stdout[-5:]) == (0, " 204\n")
    assert (refused.exit_code, refused.stdout[-5:]) == (1, " 404\n")
    assert [each["type"] for each in service.questions] == ["test"] * 2
