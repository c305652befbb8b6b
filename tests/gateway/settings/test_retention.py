"""One setting bounds how long anything is kept, and one command lists all of it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.gateway.cli import app
from outrider.gateway.settings.retention import KEPT, kept_s
from outrider.gateway.settings.tree import Settings, load_settings, setting_paths

DAY_S = 86_400


def kept(settings: Settings) -> dict[str, float | None]:
    return {each.what: kept_s(settings, each) for each in KEPT}


def test_each_time_has_a_setting_that_exists() -> None:
    known = set(setting_paths())
    assert {each.setting for each in KEPT if each.setting is not None} <= known


def test_one_setting_shortens_all_that_have_a_time() -> None:
    usual = kept(load_settings(environ={}))
    assert usual["stored responses"] == 30 * DAY_S
    assert usual["the ledger"] is None
    flags = {"retention.days": 3, "engine.kv_folder_ttl_s": 60.0}
    short = kept(load_settings(flags=flags, environ={}))
    assert short["stored responses"] == short["captured texts"] == short["the ledger"] == 3 * DAY_S
    assert usual["requests and both answers of mirrors"] is None
    assert short["requests and both answers of mirrors"] == 3 * DAY_S
    assert short["keys and values on a disk"] == 60
    assert short["cached answers"] == usual["cached answers"] == 3600
    assert short["the audit log"] is None


def test_all_that_is_kept_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    lines = runner.invoke(app, ["retention"]).stdout.splitlines()
    assert "captured texts: 7 days, telemetry.capture.folder  " in lines[3]
    assert "the ledger: for ever, database  [ledger.retention_days]" in lines
    monkeypatch.setenv("OUTRIDER_RETENTION__DAYS", "2")
    found = json.loads(runner.invoke(app, ["retention", "--json"]).stdout)
    assert {each["what"]: each["kept"] for each in found}["the ledger"] == "2 days"
