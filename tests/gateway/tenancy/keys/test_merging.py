"""A change of one limit leaves the others as they are; null deletes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.tenancy.keys.admin_schema import KeyUpdate, limits_report
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.keys.merging import merged_changes
from outrider.gateway.tenancy.keys.records import KeyOrder
from outrider.gateway.tools.commands.keys_cli import app

BEFORE = KeyOrder(
    name="a",
    limits=LimitSpec(
        tokens_per_minute=1000,
        usd_per_day=5,
        models={"large": LimitSpec(requests_per_day=10, tokens_per_day=20)},
    ),
    labels={"env": "prod", "team": "x"},
)
LARGE = {"requests_per_day": 10, "tokens_per_day": 20}
ALL = {"tokens_per_minute": 1000, "usd_per_day": 5.0, "models": {"large": LARGE}}


@pytest.mark.parametrize(
    ("patch", "after"),
    [
        ({}, ALL),
        ({"requests_per_minute": 6}, ALL | {"requests_per_minute": 6}),
        ({"usd_per_day": 7}, ALL | {"usd_per_day": 7.0}),
        ({"usd_per_day": None}, {"tokens_per_minute": 1000, "models": {"large": LARGE}}),
        ({"usd_per_day": 0}, ALL | {"usd_per_day": 0.0}),
        (
            {"models": {"large": {"tokens_per_day": None}, "small": {"tokens_per_day": 3}}},
            ALL | {"models": {"large": {"requests_per_day": 10}, "small": {"tokens_per_day": 3}}},
        ),
        ({"models": {"large": None}}, {"tokens_per_minute": 1000, "usd_per_day": 5.0}),
        ({"models": None}, {"tokens_per_minute": 1000, "usd_per_day": 5.0}),
        (None, {}),
    ],
)
def test_one_limit_drops_no_others(patch: Any, after: dict[str, Any]) -> None:
    changes = merged_changes(BEFORE, KeyUpdate.model_validate({"limits": patch}))
    assert limits_report(changes["limits"]) == after
    assert "labels" not in changes


def test_labels_are_merged() -> None:
    wanted = KeyUpdate.model_validate({"labels": {"env": None, "tier": "gold"}})
    assert merged_changes(BEFORE, wanted) == {"labels": {"team": "x", "tier": "gold"}}
    assert merged_changes(BEFORE, KeyUpdate.model_validate({"labels": None})) == {"labels": {}}
    assert merged_changes(BEFORE, KeyUpdate.model_validate({"name": "b"})) == {}


def test_merging_does_not_get_round_the_bounds() -> None:
    full = KeyOrder(name="a", labels={f"l{n}": "x" for n in range(64)})
    more = KeyUpdate.model_validate({"labels": {"another": "x"}})
    with pytest.raises(BadRequestError, match="too many"):
        merged_changes(full, more)


def test_the_command_line_merges_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"

    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--database-url", url, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    run("create", "--name", "a", "--tokens-per-minute", "1000", "--usd-per-day", "5")
    run("team", "create", "--name", "t", "--tokens-per-day", "9", "--label", "a=b")
    changed = run(
        *("update", "a", "--limit", "usd_per_day=none", "--model-limit", "large:usd_per_month=2.5"),
        *("--label", "env=prod", "--name", "b"),
    )
    assert changed["limits"] == {
        "tokens_per_minute": 1000,
        "models": {"large": {"usd_per_month": 2.5}},
    }
    assert (changed["name"], changed["labels"]) == ("b", {"env": "prod"})
    team = run("team", "update", "t", "--limit", "requests_per_day=3", "--label", "a=none")
    assert team["limits"] == {"tokens_per_day": 9, "requests_per_day": 3}
    assert team["labels"] == {}
    refused = CliRunner().invoke(
        app, ["update", "b", "--limit", "tokens_per_year=3", "--database-url", url]
    )
    assert refused.exit_code != 0
