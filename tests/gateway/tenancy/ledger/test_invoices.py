"""`outrider usage export`: by month and group, with the prices as they were."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import keys, teams
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tools.commands.usage_cli import app
from tests.gateway.tenancy.ledger.ledgers import NOON, row
from tests.gateway.tenancy.ledger.rows import DAY_S, PRICES, some_rows, store

LATER = PriceBook.from_settings(
    load_settings(flags={"routing.prices.small.prompt": 0.2}, environ={})
)
NEXT_MONTH_S = NOON + 10 * DAY_S


@pytest.fixture
def filled(database: Database) -> Database:
    """Two keys in two teams, two months, and a change of prices in the second."""
    store(database, some_rows(), PRICES)
    of_two = {"key_id": "two", "team_id": "blue"}
    store(
        database,
        [
            row(11, **of_two, ended_at=NEXT_MONTH_S, charge_nanos=7, end_user="ann",
                price_version=PRICES.version),
            row(12, **of_two, ended_at=NEXT_MONTH_S, charge_nanos=8, end_user="bob",
                price_version=LATER.version),
            row(13, **of_two, ended_at=NEXT_MONTH_S, charge_nanos=9, end_user="bob",
                price_version=LATER.version),
            row(14, **of_two, ended_at=NEXT_MONTH_S, charge_nanos=10, end_user="=1+1",
                price_version="gone"),
            row(15, **of_two, ended_at=NEXT_MONTH_S, charge_nanos=11, num_charged_tokens=0,
                end_user="-images", price_version=LATER.version),
        ],
        LATER,
    )  # fmt: skip
    owned = {"limits": "{}", "weight": 1.0, "labels": "{}", "created_at": NOON}
    key = {"hash": "", "hashed_with": "", "is_admin": False, **owned}
    with database.write() as connection:
        connection.execute(teams.insert(), [{"id": "blue", "name": '@SUM("1", 2)', **owned}])
        connection.execute(keys.insert(), [{"id": "two", "name": "app", **key}])
    return database


def run(database: Database, *arguments: str) -> tuple[int, bytes]:
    url = database.engine.url.render_as_string(hide_password=False)
    environ = {"COLUMNS": "200", "OUTRIDER_DATABASE_URL": url}
    result = CliRunner().invoke(app, ["export", *arguments], env=environ, catch_exceptions=False)
    return result.exit_code, result.stdout_bytes + result.stderr_bytes


def exported(database: Database, *arguments: str) -> list[dict[str, Any]]:
    status, text = run(database, *arguments, "--json")
    assert status == 0, text
    lines: list[dict[str, Any]] = json.loads(text)
    return lines


def test_each_month_is_charged_at_the_prices_of_its_time(filled: Database) -> None:
    lines = exported(filled, "--by", "key", "--key", "app")
    assert [(line["month"], line["price_version"], line["charge_nanos"]) for line in lines] == [
        ("2026-09", PRICES.version, 14_000),
        *sorted(
            (
                ("2026-10", PRICES.version, 7),
                ("2026-10", LATER.version, 8 + 9 + 11),
                ("2026-10", "gone", 10),
            ),
            key=lambda line: line[1],
        ),
    ]
    by_version = {line["price_version"]: line for line in lines if line["month"] == "2026-10"}
    old, new, gone = (by_version[version] for version in (PRICES.version, LATER.version, "gone"))
    assert (old["prompt_usd_per_million"], old["completion_usd_per_million"]) == (0.1, 0.4)
    assert (new["prompt_usd_per_million"], new["completion_usd_per_million"]) == (0.2, 0.0)
    assert gone["prompt_usd_per_million"] is None
    assert (new["requests"], new["charge_usd"]) == (3, "0.000000028")
    assert {line["key_name"] for line in lines} == {"app"}
    assert {line["team"] for line in lines} == {None}


def test_an_export_sums_up_to_the_ledger(filled: Database) -> None:
    every = sum(line["charge_nanos"] for line in exported(filled))
    assert every == 20_000 + 200_000 + 14_000 + 7 + 8 + 9 + 10 + 11
    for groups in (("team",), ("key", "team"), ("end_user",), ("team", "key", "end_user")):
        flags = [word for group in groups for word in ("--by", group)]
        assert sum(line["charge_nanos"] for line in exported(filled, *flags)) == every
    september = exported(filled, "--month", "2026-09")
    assert {line["month"] for line in september} == {"2026-09"}
    since = exported(filled, "--since", "2026-10-01")
    assert sum(line["charge_nanos"] for line in (*september, *since)) == every
    assert exported(filled, "--month", "2026-11") == []
    assert [line["end_user"] for line in exported(filled, "--by", "end_user", "--end-user", "ann")]


def test_a_spreadsheet_opens_it_and_runs_nothing(filled: Database, tmp_path: Path) -> None:
    """RFC 4180, in UTF-8 that says so."""
    path = tmp_path / "october.csv"
    arguments = ("--month", "2026-10", "--by", "team", "--by", "end_user")
    assert run(filled, *arguments, "--out", str(path)) == (0, b"")
    written = path.read_bytes()
    assert written == run(filled, *arguments)[1]
    assert written.startswith(b"\xef\xbb\xbfmonth,team,team_name,")
    assert written.count(b"\r\n") == written.count(b"\n") == 5
    lines = list(csv.DictReader(io.StringIO(written.decode("utf-8-sig"), newline="")))
    assert {line["team_name"] for line in lines} == {'\'@SUM("1", 2)'}
    assert {line["end_user"] for line in lines} == {"ann", "bob", "'=1+1", "'-images"}
    assert {line["charge_usd"] for line in lines} >= {"0.000000007", "0.000000017"}
    assert [line["key"] for line in lines] == [""] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--month", "2026-13"), "--month 2026-13: write it as 2026-01"),
        (("--month", "9999-12"), "--month 9999-12: write it as 2026-01"),
        (("--month", "May"), "--month May: write it as 2026-01"),
        (("--month", "2026-09", "--since", "7d"), "--month excludes --since and --until"),
        (("--by", "tier"), "--by tier: it is one of team, key, end_user"),
        (("--until", "soon"), "--until: 'soon' is not a time"),
    ],
)
def test_wrong_flags_are_told(database: Database, arguments: tuple[str, ...], words: str) -> None:
    status, text = run(database, *arguments)
    assert status == 2
    assert words in text.decode()


def test_a_file_that_cannot_be_written_is_told(filled: Database, tmp_path: Path) -> None:
    status, text = run(filled, "--out", str(tmp_path / "no" / "folder.csv"))
    assert status == 1
    assert b"Traceback" not in text
