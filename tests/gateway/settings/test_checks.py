"""Settings of checks that cannot work are refused, each by its name."""

from typing import Any

import pytest

from outrider.gateway.settings.concealing import shown_settings
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.wiring.checks import build_checks, build_redaction

URL = "https://checks.example/verdict"


@pytest.mark.parametrize(
    ("check", "what"),
    [
        ({}, "checks.guard: set one of url, function and redact"),
        ({"url": URL, "redact": "email"}, "set one of"),
        ({"url": "http://checks.example"}, "https:// address"),
        ({"url": "ftp://localhost"}, "https:// address"),
        ({"function": "module"}, "write MODULE:FUNCTION"),
        ({"redact": "email", "where": "after"}, "covers every request"),
        ({"redact": "email", "keys": "one"}, "covers every request"),
        ({"url": URL, "secret": "hunter2"}, "must be whsec_"),
    ],
)
def test_a_check_that_cannot_be_made(check: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Settings.model_validate({"checks": {"guard": check}})


@pytest.mark.parametrize("path", ["no.such.module:check", "json:check", "json:__name__"])
def test_a_function_that_is_not_there(path: str) -> None:
    settings = Settings.model_validate({"checks": {"guard": {"function": path}}})
    with pytest.raises(SettingsError, match=r"checks\.guard\.function"):
        build_checks(settings, None)


def test_presidio_names_its_extra() -> None:
    settings = Settings.model_validate({"checks": {"guard": {"redact": "email,presidio"}}})
    with pytest.raises(SettingsError, match=r"outrider\[presidio\]|spacy download"):
        build_redaction(settings)


def test_the_address_of_a_service_is_not_shown() -> None:
    """It often holds a token, and settings go to the audit log and the pages."""
    check = {"url": f"{URL}?token=CANARY"}
    settings = Settings.model_validate({"checks": {"guard": check}})
    assert "CANARY" not in str(shown_settings(settings))


def test_redaction_alone_asks_nobody() -> None:
    settings = Settings.model_validate({"checks": {"guard": {"redact": "email"}}})
    assert build_checks(settings, None) is None
