"""Settings become an authenticator, or a refusal in words."""

import logging
import random
import secrets
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from outrider.gateway.settings.keys import KeySettings
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.keys.key_parts import build_key_parts, key_store
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, mint_key
from outrider.gateway.tenancy.keys.records import KeyOrder


def settings(folder: Path, **keys: Any) -> Settings:
    return Settings(
        database_url=f"sqlite:///{folder}/keys.db",
        keys=KeySettings(**keys),
    )


async def test_a_key_made_by_one_process_is_accepted_by_another(tmp_path: Path) -> None:
    config = settings(tmp_path)
    for_cli, for_gateway = open_database(config), open_database(config)
    assert for_cli is not None
    assert for_gateway is not None
    shown = key_store(config, for_cli).create(KeyOrder(name="a"))
    for_cli.close()
    parts = build_key_parts(config, for_gateway)

    await parts.authenticator.start()
    principal = parts.authenticator.authenticate(f"Bearer {shown.text}", None, None)
    assert principal.key_id == shown.record.key_id
    assert principal.cache_salt
    await parts.authenticator.close()
    for_gateway.close()


async def test_another_secret_takes_none_of_the_keys(tmp_path: Path) -> None:
    config = settings(tmp_path)
    database = open_database(config)
    assert database is not None
    shown = key_store(config, database).create(KeyOrder(name="a"))
    parts = build_key_parts(settings(tmp_path, secret=SecretStr("another")), database)

    await parts.authenticator.start()
    with pytest.raises(Exception, match="Unknown key"):
        parts.authenticator.authenticate(f"Bearer {shown.text}", None, None)
    await parts.authenticator.close()
    database.close()


async def test_without_a_database_there_are_no_keys() -> None:
    parts = build_key_parts(Settings(database_url="none"), None)
    assert parts.store is None
    assert parts.authenticator.is_open

    await parts.authenticator.start()
    assert parts.authenticator.authenticate("Bearer x", None, None) is ANONYMOUS
    await parts.authenticator.close()


def test_settings_that_contradict_each_other() -> None:
    required = Settings(database_url="none", keys=KeySettings(mode="required"))
    with pytest.raises(SettingsError, match=r"keys\.mode is required"):
        build_key_parts(required, None)
    short = Settings(database_url="none", keys=KeySettings(admin_token=SecretStr("hunter2")))
    with pytest.raises(SettingsError, match="could be guessed") as refusal:
        build_key_parts(short, None)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("hunter2", "shorter than 16"),
        ("abababababababababababab", "fewer than 6 different"),
        ("ein-schlüssel-mit-umlaut-123", "visible ASCII"),
        ("a token with blanks 12345", "visible ASCII"),
        ("0123456789abcdef" * 33, "at most 512"),
        (mint_key(random.Random(1)).text, "form of an API key"),
    ],
)
def test_a_weak_admin_token_is_refused(token: str, said: str) -> None:
    weak = Settings(database_url="none", keys=KeySettings(admin_token=SecretStr(token)))
    with pytest.raises(SettingsError, match=said) as refusal:
        build_key_parts(weak, None)
    assert token not in str(refusal.value)


def test_an_admin_token_of_few_bits_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for token, is_warned in (
        ("correct-horse-18", True),
        (secrets.token_hex(12), True),
        (secrets.token_hex(16), False),
        (secrets.token_urlsafe(24), False),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            build_key_parts(
                Settings(database_url="none", keys=KeySettings(admin_token=SecretStr(token))), None
            )
        assert ("random bits" in caplog.text) is is_warned, token
        assert token not in caplog.text


def test_a_key_of_the_settings_needs_no_database(caplog: pytest.LogCaptureFixture) -> None:
    chosen = "a-key-of-these-settings"
    keys = KeySettings(mode="required", api_key=SecretStr(chosen))
    parts = build_key_parts(Settings(database_url="none", keys=keys), None)
    assert parts.authenticator.authenticate(f"Bearer {chosen}", None, None).key_id == "api-key"
    assert not parts.authenticator.is_open
    assert chosen not in caplog.text
    short = Settings(database_url="none", keys=KeySettings(api_key=SecretStr("hunter2")))
    with pytest.raises(SettingsError, match=r"keys\.api_key is shorter than 16"):
        build_key_parts(short, None)
