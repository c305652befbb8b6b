"""`outrider experiment`: as people and programs use it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outrider.gateway.tools.commands.experiments_cli import app
from tests.databases import with_tables

Invoke = Callable[..., Result]
ARMS = ("--arm", "control", "--arm", "deep max_draft_nodes=32 weight=3")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command on a new database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_DATABASE_URL", with_tables(tmp_path / "experiments.db"))
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


def as_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_life(run: Invoke) -> None:
    made = as_json(run("create", "drafts", *ARMS, "--unit", "key", "--share", 0.5, "--json"))
    assert (made["state"], made["unit"], made["share"]) == ("draft", "key", 0.5)
    assert [(arm["name"], arm["share"], arm["set"]) for arm in made["arms"]] == [
        ("control", 0.25, {}),
        ("deep", 0.75, {"max_draft_nodes": 32}),
    ]
    started = run("start", "drafts")
    assert started.stdout == "Started drafts, version 1: running, 0.5 of the units take part.\n"
    assert as_json(run("ramp", "drafts", 0.8, "--json"))["share"] == 0.8
    edited = as_json(
        run("edit", "drafts", "--arm", "deep max_draft_nodes=16", "--set", "metric=ttft", "--json")
    )
    assert (edited["version"], edited["metric"]) == (2, "ttft")
    assert [arm["name"] for arm in edited["arms"]] == ["control", "deep"]
    assert "deep 50%" in run("list").stdout
    shown = run("show", "drafts").stdout
    assert all(word in shown for word in ("max_draft_nodes", "edited", "ramped", "0.8"))
    detail = as_json(run("show", "drafts", "--json"))
    assert [version["version"] for version in detail["versions"]] == [1, 2]
    assert "Stop it first" in run("delete", "drafts").stderr
    assert as_json(run("stop", "drafts", "--json"))["state"] == "stopped"
    assert run("delete", "drafts").stdout == "Deleted drafts.\n"
    assert as_json(run("list", "--json")) == []
    assert "no experiments yet" in run("list").stdout


def test_all_fields_from_a_file_and_by_path(run: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"arms": {"a": {}, "b": {"set": {"slo": {"class": "batch"}}}}}))
    made = as_json(
        run(
            *("create", "x", "--file", file, "--set", "guardrails.error_share=0.02"),
            *("--set", "arms.b.set.sources=suffix", "--set", "eligible.keys=k1,k2"),
            *("--set", "slo.ttft_ms=300", "--start", "--json"),
        )
    )
    assert made["state"] == "running"
    assert made["definition"] == {
        "arms": {"a": {}, "b": {"set": {"slo": {"class": "batch"}, "sources": ["suffix"]}}},
        "guardrails": {"error_share": 0.02},
        "eligible": {"keys": ["k1", "k2"]},
        "slo": {"ttft_ms": 300.0},
    }


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("arguments", "says", "status"),
    [
        (("--arm", "a", "--arm", "a"), "two arms have this name", 2),
        (("--arm", "a"), "arms", 2),
        (("--arm", "a", "--arm", "b max_draft_node=3"), "did you mean max_draft_nodes", 2),
        (("--arm", "a weight=0.5", "--arm", "b weight=0.3"), "add up to 0.8, not to 1", 2),
        (("--arm", "a", "--arm", "b tier"), "NAME=VALUE", 2),
        (("--arm", "", "--arm", "b"), 'write it as --arm "NAME', 2),
        ((*ARMS, "--set", "metrik=ttft"), "metrik", 2),
        ((*ARMS, "--set", "unit.x=1", "--unit", "key"), "unit has no fields", 2),
        ((*ARMS, "--file", "absent.json"), "absent.json cannot be read", 2),
        ((*ARMS, "--start"), "0.5 of the layer 'default' is free beside 'other'", 1),
    ],
)
def test_mistakes_are_said_and_leave_nothing(
    run: Invoke, arguments: tuple[str, ...], says: str, status: int
) -> None:
    as_json(run("create", "other", *ARMS, "--share", 0.5, "--start", "--json"))
    result = run("create", "wrong", *arguments)
    assert result.exit_code == status
    assert says in result.stderr
    assert [each["name"] for each in as_json(run("list", "--json"))] == ["other"]


def test_an_unknown_experiment_and_version(run: Invoke) -> None:
    for command in (("start",), ("stop",), ("show",), ("edit",), ("report",), ("check",)):
        result = run(*command, "nobody")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "No experiment has this name" in result.stderr
    run("create", "x", *ARMS)
    assert "has no version 7" in run("report", "x", "--version", 7).stderr
    assert "has no such arm" in run("edit", "x", "--remove-arm", "y").stderr
    assert run("--help").exit_code == 0


def test_a_report_of_nothing_yet(run: Invoke) -> None:
    run("create", "x", *ARMS, "--start")
    report = as_json(run("report", "x", "--json"))
    assert (report["experiment"], report["control"]) == ("x", "control")
    assert report["verdict"]["is_decided"] is False
    assert "deep" in run("report", "x").stdout


def test_deleting_asks_on_a_terminal(run: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.gateway.tools.commands.database_cli._is_terminal", lambda: True)
    run("create", "x", *ARMS)
    refused = run("delete", "x")
    assert refused.exit_code == 1
    assert "cannot be undone" in refused.output
    assert run("show", "x").exit_code == 0
    assert run("delete", "x", "--yes").exit_code == 0
