"""`outrider audit`: list, export and verify."""

import csv
import io
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import update
from typer.testing import CliRunner, Result

from outrider.gateway.audit.actor import system_user
from outrider.gateway.cli import app
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import audit_log
from tests.databases import with_tables

Invoke = Callable[..., Result]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return with_tables(tmp_path / "keys.db")


@pytest.fixture
def outrider(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_DATABASE_URL", url)
    runner = CliRunner()
    return lambda words: runner.invoke(app, words.split())


def test_commands_are_recorded_with_their_user(outrider: Invoke) -> None:
    assert outrider("audit ls").stdout == "no changes\n"
    key = json.loads(outrider("keys create --name =1+1 --json").stdout)
    outrider("keys update =1+1 --limit usd_per_day=3")
    first, second = outrider("audit ls").stdout.splitlines()
    assert f"{system_user()} key.create key/{key['id']}" in first
    assert second.endswith('{"limits": {}} -> {"limits": {"usd_per_day": 3.0}}')
    assert outrider("audit ls --since 2999-01-01").stdout == "no changes\n"


def test_exports_are_for_programs_and_spreadsheets(outrider: Invoke) -> None:
    outrider("keys create --name =1+1 --json")
    (row,) = csv.DictReader(io.StringIO(outrider("audit export").stdout))
    assert (row["action"], json.loads(row["after"])["name"]) == ("key.create", "=1+1")
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in row.values())
    (line,) = outrider("audit export --format jsonl").stdout.splitlines()
    assert json.loads(line)["hash"] == row["hash"]
    assert outrider("audit export --since soon").exit_code == 2


def test_verify_ends_with_1_where_a_row_was_edited(outrider: Invoke, url: str) -> None:
    outrider("keys create --name app --json")
    sound = outrider("audit verify")
    assert sound.exit_code == 0
    head = sound.stdout.splitlines()[1]
    assert json.loads(outrider("audit verify --json").stdout)["head_hash"] == head
    outrider("keys create --name other --json")
    assert outrider(f"audit verify --head {head}").exit_code == 0
    with closing(Database(url)) as database, database.write() as connection:
        connection.execute(update(audit_log).where(audit_log.c.sequence == 1).values(actor="x"))
    broken = outrider("audit verify")
    assert (broken.exit_code, broken.stderr) == (1, "row 1 was edited\n")
