"""The settings that a gateway starts with are in the audit log, without their secrets."""

import socket
from contextlib import closing
from pathlib import Path

import pytest

from outrider.gateway.audit.log import AuditLog
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.storage.database import Database
from outrider.gateway.wiring.audit import record_settings
from tests.databases import with_tables

SECRETS = ("tok-SECRET-1", "pw-SECRET-2", "head-SECRET-3", "pw-SECRET-4")


def test_settings_are_recorded_where_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(
        f'redis_url = "redis://user:{SECRETS[1]}@cache/0"\n'
        f'[keys]\nadmin_token = "{SECRETS[0]}"\n'
        '[tiers.cloud]\nserver = "openai"\nurl = "https://a.example/v1"\nmodel = "m"\n'
        f'headers = {{x-team = "{SECRETS[2]}"}}\n'
    )
    settings = load_settings(config_file=file, environ={})
    louder = settings.model_copy(update={"log_level": "DEBUG"})
    with closing(Database(with_tables(tmp_path / "keys.db"))) as database:
        audit = AuditLog(database)
        record_settings(audit, settings)
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        for each in (settings, louder):  # the first of the two changes nothing
            record_settings(audit, each)
        first, second = audit.rows()
    assert first.before is None
    assert second.target == "gateway/another"
    assert second.before == first.after
    assert second.after == {**(first.after or {}), "log_level": "DEBUG"}
    assert "tiers" in (first.after or {})
    assert not any(secret in str(first.details) for secret in SECRETS)
