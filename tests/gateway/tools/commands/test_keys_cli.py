"""`outrider keys`: as people and programs use it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.keys.key_parts import key_store
from outrider.gateway.tenancy.keys.keys import id_in
from outrider.gateway.tools.commands.keys_cli import app
from outrider.gateway.tools.commands.keys_tables import visible
from tests.databases import with_tables

Invoke = Callable[..., Result]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return with_tables(tmp_path / "keys.db")


@pytest.fixture
def keys(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command on a new database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_DATABASE_URL", url)
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_key_with_everything(keys: Invoke, url: str) -> None:
    team = as_json(keys("team", "create", "--name", "t", "--usd-per-month", "9.5", "--json"))
    made = as_json(
        keys(
            *("create", "--name", "app", "--team", "t", "--requests-per-minute", 1),
            *("--tokens-per-minute", 2, "--requests-per-day", 3, "--tokens-per-day", 4),
            *("--concurrent-requests", 5, "--usd-per-day", 0.25, "--usd-per-month", 7),
            *("--usd-per-week", 3, "--usd-per-7-days", 2, "--usd-per-30-days", 6),
            *("--end-user-limit", "usd_per_day=0.5", "--end-user-limit", "tokens_per_minute=9"),
            *(
                "--model-limit",
                "large:tokens_per_minute=10",
                "--model-limit",
                "large:usd_per_day=1.5",
            ),
            *("--model-limit", "cloud:requests_per_day=0", "--model", "auto", "--model", "cloud/x"),
            *("--tier", "small", "--admin", "--expires", "2999-01-01", "--label", "env=prod=1"),
            *("--weight", 2.5, "--json"),
        )
    )
    assert id_in(made["key"]) == made["id"]
    assert made["prefix"] == made["key"][:11]
    assert made["team"] == team["id"]
    assert made["limits"] == {
        "requests_per_minute": 1,
        "tokens_per_minute": 2,
        "requests_per_day": 3,
        "tokens_per_day": 4,
        "concurrent_requests": 5,
        "usd_per_day": 0.25,
        "usd_per_week": 3.0,
        "usd_per_month": 7.0,
        "usd_per_7_days": 2.0,
        "usd_per_30_days": 6.0,
        "end_user": {"usd_per_day": 0.5, "tokens_per_minute": 9},
        "models": {
            "large": {"tokens_per_minute": 10, "usd_per_day": 1.5},
            "cloud": {"requests_per_day": 0},
        },
    }
    assert (made["models"], made["tiers"], made["admin"]) == (["auto", "cloud/x"], ["small"], True)
    assert (made["labels"], made["weight"]) == ({"env": "prod=1"}, 2.5)
    assert made["expires_at"] == 32_472_144_000
    (listed,) = as_json(keys("list", "--json"))
    assert listed == {name: value for name, value in made.items() if name != "key"}
    database = open_database(Settings(database_url=url))
    assert database is not None
    assert key_store(Settings(database_url=url), database).get(made["id"]).scopes.is_admin
    database.close()


@pytest.mark.parametrize("make", [("create",), ("team", "create")])
def test_a_limit_of_an_unknown_tier_is_warned_of(keys: Invoke, make: tuple[str, ...]) -> None:
    named = (*make, "--name", "a", "--model-limit")
    warned = keys(*named, "lagre:tokens_per_day=5")
    assert "the settings have no tier 'lagre'" in warned.stderr
    assert "available: small, large" in warned.stderr
    assert (
        "no tier"
        not in keys(*make, "--name", "b", "--model-limit", "large:tokens_per_day=5").stderr
    )


def test_the_key_is_shown_once_to_people_too(keys: Invoke) -> None:
    made = keys("create", "--name", "app")
    assert made.exit_code == 0
    key = made.stdout.split()[5]
    assert id_in(key)
    assert "not shown again" in made.stdout
    assert "first key" in made.stderr
    assert "first key" not in keys("create", "--name", "other").stderr
    listed = keys("list")
    assert key[:11].removeprefix("or-") in listed.stdout
    assert key not in listed.stdout


def test_what_a_key_prefers_is_listed(keys: Invoke) -> None:
    assert (
        as_json(keys("create", "--name", "a", "--prefer", "price", "--json"))["prefer"] == "price"
    )
    assert "prefers price" in keys("list").stdout.replace("\n", " ")
    refused = keys("create", "--name", "b", "--prefer", "speed")
    assert refused.exit_code != 0
    assert "prefer" in refused.stderr


def test_rotation_and_revocation(keys: Invoke) -> None:
    made = as_json(keys("create", "--name", "app", "--json"))
    rotated = as_json(keys("rotate", "app", "--grace", "1h", "--json"))
    assert rotated["id"] == made["id"]
    assert rotated["key"] != made["key"]
    assert rotated["old_secret_until"] > made["created_at"] + 3590
    assert rotated["key"] not in keys("rotate", made["prefix"]).stdout
    assert "Revoked key app" in keys("revoke", made["id"]).stdout
    assert as_json(keys("list", "--json"))[0]["status"] == "revoked"
    again = keys("rotate", made["id"])
    assert again.exit_code == 1
    assert "revoked" in again.stderr


def test_teams_are_listed(keys: Invoke) -> None:
    assert "no teams" in keys("team", "list").stdout
    keys("team", "create", "--name", "research", "--tokens-per-day", "5000", "--label", "a=b")
    listed = keys("team", "list").stdout
    for word in ("research", "tokens/day 5,000", "a=b"):
        assert word in listed
    assert as_json(keys("team", "list", "--json"))[0]["limits"] == {"tokens_per_day": 5000}
    taken = keys("team", "create", "--name", "research")
    assert taken.exit_code == 1
    assert "Another team has the name" in taken.stderr


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--name", ""), "name: string should have at least 1 character"),
        (("--name", "a\nb"), "name: string should match pattern"),
        (("--name", "a", "--label", "x"), "write it as --label name=text"),
        (("--name", "a", "--expires", "soon"), "--expires soon: write it as 30d"),
        (("--name", "a", "--expires", "2001-01-01"), "in the past"),
        (("--name", "a", "--weight", "0"), "weight: input should be greater"),
        (("--name", "a", "--model-limit", "large=5"), "--model-limit large=5: write it as"),
        (("--name", "a", "--model-limit", "large:x=5"), "limits.models.large.x: extra inputs"),
        (("--name", "a", "--database-url", "mysql://me:geheim@h/x"), "mysql cannot be used"),
        (("--name", "a", "--database-url", "none"), "no database of keys"),
        (("--name", "a", "--tokens-per-minute", "-1"), "tokens-per-minute"),
        (("--name", "a", "--usd-per-day", "nan"), "usd-per-day"),
        (("--name", "a", "--model-limit", "large:usd_per_day=nan"), "write it as large:"),
        (("--name", "a", "--model-limit", "large:usd_per_day=inf"), "usd_per_day: input should"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    keys: Invoke, arguments: tuple[str, ...], says: str
) -> None:
    result = keys("create", *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.output
    assert "geheim" not in result.output


def test_an_unknown_key_is_named(keys: Invoke) -> None:
    for arguments in (("revoke", "nobody"), ("create", "--name", "a", "--team", "nobody")):
        result = keys(*arguments)
        assert result.exit_code == 1
        assert "No " in result.stderr


def test_names_cannot_write_to_a_terminal(keys: Invoke) -> None:
    name = "[bold]a[/bold]\u202eb\u009bc"
    as_json(keys("create", "--name", name, "--label", f"x={name}", "--json"))
    listed = keys("list").stdout
    assert "[bold]a[/bold]" in listed
    assert "\\u202eb\\x9bc" in listed
    assert "\u202e" not in listed
    assert visible("a\x1b[31m") == "a\\x1b[31m"


def test_help_has_examples(keys: Invoke) -> None:
    text = keys("create", "--help").stdout
    for flag in ("--tokens-per-minute 100000", "--expires 90d", "--admin --json", "--model-limit"):
        assert flag in text
