"""/v1/usage and `outrider usage`: each key sees its own usage and no more."""

import asyncio
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
)
from outrider.gateway.settings.ledger import LedgerSettings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import keys
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal, Scopes
from outrider.gateway.tenancy.ledger.book import Ledger, NullLedger
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.ledger.storing import RowStore
from outrider.gateway.tenancy.ledger.usage_api import USAGE_OPERATION, UsageApi
from outrider.gateway.tenancy.ledger.usage_report import UsageReport
from outrider.gateway.tools.commands.usage_cli import app
from tests.gateway.answers import read_answer
from tests.gateway.tenancy.ledger.ledgers import NOON, FrailDatabase, make_ledger, row
from tests.gateway.tenancy.ledger.rows import DAY_S, PRICES, some_rows, store

ONE = Principal(key_id="one", name="app", tenant="red", team_id="red")
ADMIN = Principal(key_id="root", name="root", tenant="root", scopes=Scopes(is_admin=True))
COSTS = ("cost_usd", "cost_nanos", "cost_usd_per_million_tokens")


async def asked(
    database: Database | None,
    principal: Principal,
    query: str = "",
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    scope = {"type": "http", "method": "GET", "path": "/v1/usage", "headers": []}
    request = Request(scope | {"query_string": query.encode()})
    api = UsageApi(database, ledger or NullLedger(), wall_clock=lambda: NOON + DAY_S + 60)
    response = await api.usage(request, principal)
    assert response.headers["cache-control"] == "private, no-store"
    report: dict[str, Any] = json.loads(bytes(response.body))
    read_answer(UsageReport, report)
    return report


def ask(database: Database | None, principal: Principal, query: str = "") -> dict[str, Any]:
    return asyncio.run(asked(database, principal, query))


@pytest.fixture
def filled(database: FrailDatabase) -> FrailDatabase:
    store(database, some_rows(), PRICES)
    return database


def test_a_key_sees_what_it_pays_for_and_nothing_of_others(filled: Database) -> None:
    report = ask(filled, ONE, "by=tier")
    assert [group["group"] for group in report["data"]] == ["large", "small"]
    totals = report["totals"]
    assert (totals["requests"], totals["attempts"], totals["charged_tokens"]) == (2, 2, 230)
    assert (totals["charge_nanos"], totals["charge_usd"]) == (220_000, 0.00022)
    assert report["savings"] is None
    for sums in (totals, *report["data"]):
        assert {sums[name] for name in COSTS} == {None}
    for by in ("key", "team", "kind", "outcome"):
        named = [group["group"] for group in ask(filled, ONE, f"by={by}")["data"]]
        assert not {"two", "draft", "mirror", "escalated", "failed", ""} & {*named}
    assert ask(filled, ONE, "key=one") == ask(filled, ONE)
    assert ask(filled, ANONYMOUS)["totals"]["attempts"] == 0


@pytest.mark.parametrize("scopes", [Scopes(reveals="nothing"), Scopes(models=frozenset({"gpt"}))])
def test_a_key_that_may_not_see_tiers_gets_no_usage_by_them(
    filled: Database, scopes: Scopes
) -> None:
    veiled = replace(ONE, scopes=scopes)
    report = ask(filled, veiled)
    assert (report["by"], report["totals"]["charged_tokens"]) == ("day", 230)
    for query in ("by=tier", "by=model", "by=day&tier=large", "by=kind&model=x"):
        with pytest.raises(PermissionDeniedError, match="does not see"):
            ask(filled, veiled, query)


@pytest.mark.parametrize("query", ["key=two", "key=root", "key=ONE", "key=one'%20OR%20'1"])
def test_another_keys_usage_is_refused(filled: Database, query: str) -> None:
    with pytest.raises(PermissionDeniedError, match="own usage only"):
        ask(filled, ONE, query)


async def test_a_report_has_the_rows_that_wait_for_the_database(
    database: FrailDatabase, tmp_path: Path
) -> None:
    slow = LedgerSettings(flush_ms=60_000, batch_ms=600_000)
    ledger = make_ledger(database, tmp_path / "journal", slow)
    await ledger.start()
    for number in (1, 2):
        ledger.add(row(number, key_id="one"))
    assert (await asked(database, ONE, ledger=ledger))["totals"]["requests"] == 2
    database.is_away = True
    ledger.add(row(3, key_id="one"))
    assert (await asked(database, ONE, ledger=ledger))["totals"]["requests"] == 2
    database.is_away = False
    assert (await asked(database, ONE, ledger=ledger))["totals"]["requests"] == 3
    await ledger.close()


def test_another_team_shows_nothing(filled: Database) -> None:
    store(filled, [row(20, key_id="two", team_id="blue")])
    assert ask(filled, ONE, "team=blue")["data"] == []
    assert ask(filled, ONE, "team=red")["totals"]["attempts"] == 2


def test_administrators_see_all_and_what_it_cost(filled: Database) -> None:
    report = ask(filled, ADMIN, "by=key&since=7d&until=2030-01-01")
    assert [(group["group"], group["attempts"]) for group in report["data"]] == [
        ("one", 4),
        ("two", 3),
    ]
    assert report["totals"]["cost_nanos"] == 1_212_000
    assert report["savings"]["always_usd"] == 0.00044
    assert report["savings"]["saved_usd"] == pytest.approx(0.00044 - 0.000213)
    assert report["since"] == NOON + DAY_S + 60 - 7 * DAY_S
    only = ask(filled, ADMIN, "by=day&key=two&tier=small&limit=1")
    assert [group["group"] for group in only["data"]] == ["2026-09-21"]
    assert only["has_more"]
    assert only["totals"]["attempts"] == 2


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("by=price", "by"),
        ("by=", "by"),
        ("since=yesterday", "since"),
        ("until=2026-02-30", "until"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=%D9%A3", "limit"),  # an Arabic three
        ("limit=" + "9" * 200, "limit"),
        ("model=%00", "model"),
        ("key=" + "x" * 300, "key"),
        ("sinse=7d", "sinse"),
    ],
)
def test_bad_parameters_are_named(filled: Database, query: str, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(filled, ADMIN, query)
    assert caught.value.param == param


def test_without_a_ledger_nothing_can_be_said() -> None:
    with pytest.raises(NotFoundError, match="no ledger"):
        ask(None, ONE)


def test_the_operation_names_its_parameters() -> None:
    parameters = {parameter["name"] for parameter in USAGE_OPERATION["parameters"]}
    chosen = {"key", "team", "tier", "model", "end_user"}
    assert parameters == {"by", "since", "until", "limit", *chosen}
    assert {*USAGE_OPERATION["responses"]} == {"200", "400", "401", "403", "404", "503"}


# ---- the command


def run(database: Database, *arguments: str) -> tuple[int, str]:
    url = database.engine.url.render_as_string(hide_password=False)
    # Wide, so that no cell of a table is cut.
    environ = {"COLUMNS": "200", "OUTRIDER_DATABASE_URL": url}
    result = CliRunner().invoke(app, arguments, env=environ)
    return result.exit_code, result.output


def test_the_command_writes_json_and_csv(filled: Database) -> None:
    status, text = run(filled, "--by", "tier", "--json")
    report = json.loads(text)
    assert status == 0
    assert report == ask(filled, ADMIN)
    status, text = run(filled, "--by", "tier", "--csv")
    assert status == 0
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [line["tier"] for line in lines] == ["large", "small", "cloud"]
    assert sum(int(line["charge_nanos"]) for line in lines) == report["totals"]["charge_nanos"]


def test_the_command_prints_a_table(filled: Database) -> None:
    with filled.write() as connection:
        key = {"id": "one", "name": "[red]app", "hash": "", "hashed_with": "", "is_admin": False}
        key |= {"limits": "{}", "weight": 1.0, "labels": "{}", "created_at": NOON}
        connection.execute(keys.insert(), [key])
    status, text = run(filled, "--by", "key")
    assert status == 0
    assert "[red]app (one)" in text
    assert "$0.000189" in text
    assert "saved $0.000227 (51.6%): had large answered everything, it would" in text
    status, text = run(filled, "--by", "day", "--key", "[red]app", "--since", "2026-09-21")
    assert "2026-09-21" in text
    assert "2026-09-22" not in text


def test_the_command_says_what_is_missing(database: Database) -> None:
    assert run(database) == (0, "no usage\n")
    store(database, [row(1)])
    assert "Set routing.prices.large" in run(database)[1]


def test_wrong_flags_end_with_a_sentence(database: Database) -> None:
    for arguments, words in (
        (("--since", "soon"), "--since: 'soon' is not a time; write 7d"),
        (("--csv", "--json"), "--csv and --json exclude each other: choose one"),
        (("--database-url", "none"), "there is no ledger"),
        (("--database-url", "mysql://x"), "cannot be used"),
    ):
        status, text = run(database, *arguments)
        assert status == 2
        assert words in text
        assert "Traceback" not in text


def test_names_that_spreadsheets_would_run_are_tamed(database: Database) -> None:
    rows: Sequence[LedgerRow] = [row(1, model='=HYPERLINK("http://x")')]
    RowStore(database, lambda *_: None).store(rows)
    _, text = run(database, "--by", "model", "--csv")
    (line,) = csv.DictReader(io.StringIO(text))
    assert line["model"] == '\'=HYPERLINK("http://x")'
