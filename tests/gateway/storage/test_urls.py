"""Addresses of databases: what is taken, what is refused and how, and that no password shows."""

import stat
from pathlib import Path

import pytest

from outrider.gateway.settings import extras
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.storage.urls import default_database_url, describe, read_url, state_folder


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgresql_by_any_of_its_names(scheme: str) -> None:
    url = read_url(f"{scheme}://me:geheim@db.example:6000/outrider?sslmode=require")
    assert url.drivername == "postgresql+psycopg"
    assert url.password == "geheim"
    assert url.query["sslmode"] == "require"
    assert describe(url) == "postgresql://db.example:6000/outrider"


def test_a_file_is_found_from_the_working_folder_and_from_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_url("sqlite:///my.db").database == str(tmp_path / "my.db")
    assert read_url("sqlite:///~/my.db").database == str(tmp_path / "my.db")
    assert read_url(f"sqlite:///{tmp_path}/my.db").database == str(tmp_path / "my.db")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("outrider.db", "not the address of a database"),
        ("", "not the address of a database"),
        ("postgresql://me:geheim@host:port/x", "not the address of a database"),
        ("mysql://me:geheim@host/x", "mysql cannot be used"),
        ("postgresql+asyncpg://me:geheim@host/x", "asyncpg cannot be used"),
        ("sqlite+aiosqlite:///x.db", "aiosqlite cannot be used"),
        ("sqlite://", "needs a file"),
        ("sqlite:///:memory:", "needs a file"),
        ("sqlite:///file:x?mode=memory", "only a file"),
        ("sqlite://host/geheim.db", "only a file"),
        ("sqlite:////no/such/folder/x.db", "the folder /no/such/folder does not exist"),
        ("sqlite:////tmp", "is a folder"),
    ],
)
def test_unusable_database_urls_are_refused_with_a_message(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as refusal:
        read_url(text)
    assert "geheim" not in str(refusal.value)


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r'pip install "outrider\[postgres\]"'):
        read_url("postgresql://host/x")


def test_the_default_is_a_private_folder_of_the_state(tmp_path: Path) -> None:
    url = default_database_url({"XDG_STATE_HOME": str(tmp_path / "a" / "b")})
    assert url == f"sqlite:///{tmp_path}/a/b/outrider/outrider.db"
    assert stat.S_IMODE((tmp_path / "a" / "b" / "outrider").stat().st_mode) == 0o700


def test_a_relative_state_home_is_passed_over() -> None:
    assert state_folder({"XDG_STATE_HOME": "here"}) == state_folder({})


def test_a_default_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="Set database_url"):
        default_database_url({"XDG_STATE_HOME": str(tmp_path / "file")})
