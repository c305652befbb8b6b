"""engine.kv_folder: from settings to a store, its mistakes, and `outrider cache`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outrider.engine.cache.block_pool import owner_tag
from outrider.engine.cache.extent_erasing import erase_owners
from outrider.engine.cache.extent_folder import ExtentFolder, space_folders
from outrider.engine.cache.extent_space import read_extent, stored_extents
from outrider.engine.cache.sealing import Seal, read_key
from outrider.engine.core import Engine
from outrider.engine.errors import EngineError
from outrider.gateway.cli import app
from outrider.gateway.engines.backends.step_loop import no_progress
from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.wiring.build import build_engine
from tests.engines import Answer, chat_prompt, make_request, serve
from tests.stores import stored_files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keys and measured times of these tests alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "outrider"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def settings_of(folder: Path, **options: Any) -> Settings:
    flags = {f"engine.{name}": value for name, value in options.items()}
    return load_settings(flags={"engine.kv_folder": folder, **flags}, environ={})


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_folder_gib": 0}, "engine.kv_folder_gib"),
        ({"kv_folder_ttl_s": 0}, "engine.kv_folder_ttl_s"),
        ({"tensor_parallel": 2}, "is not possible with engine.tensor_parallel"),
        ({"prefix_caching": False}, "needs engine.prefix_caching"),
    ],
)
def test_settings_that_make_a_folder_useless_are_named(
    folder: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_of(folder, **options)


def test_a_key_does_not_lie_in_the_folder_that_it_seals(folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"lies in engine\.kv_folder: who copies"):
        settings_of(folder, kv_folder_key=folder / "keys" / "kv.key")


def serve_once(folder: Path, name: str = "r") -> tuple[Engine, Answer]:
    engine = build_engine(settings_of(folder, num_blocks=128), no_progress)
    request = make_request(name, chat_prompt("What is 25 + 17? " * 20), max_tokens=4)
    return engine, serve(engine, [request])[name]


@pytest.fixture
def filled(folder: Path) -> Iterator[Path]:
    engine, _ = serve_once(folder)
    while engine.has_work:
        engine.step()
    while engine.stats().store.num_written_bytes == 0:
        engine.step()
    yield folder
    del engine


@pytest.mark.slow
def test_a_prompt_comes_back_in_another_engine(filled: Path, home: Path) -> None:
    assert (home / "kv.key").stat().st_mode & 0o777 == 0o600
    engine, answer = serve_once(filled)
    assert answer.stats.num_cached_tokens is not None
    assert answer.stats.num_cached_tokens > 100
    assert engine.stats().store.num_restored_tokens == answer.stats.num_cached_tokens


@pytest.mark.slow
def test_a_tenant_s_prompts_are_erased_from_the_folder(folder: Path, home: Path) -> None:
    engine = build_engine(settings_of(folder, num_blocks=256), no_progress)
    for salt in ("mine", "theirs"):
        prompt = chat_prompt(f"{salt}: what is 25 + 17? " * 20)
        serve(engine, [make_request(salt, prompt, max_tokens=4, cache_salt=salt)])
        while engine.has_work:
            engine.step()
    seal = Seal(read_key(home / "kv.key"))
    opened = ExtentFolder(folder, seal=seal, budget_bytes=2**30, ttl_s=1e6)

    def owners() -> set[str]:
        return {
            read_extent(space, stored, seal).header.owner
            for space in space_folders(folder)
            for stored in stored_extents(space)
        }

    while owners() != {owner_tag("mine"), owner_tag("theirs")}:
        engine.step()
    assert erase_owners(opened, seal, {owner_tag("mine")}) > 0
    assert owners() == {owner_tag("theirs")}
    again = [*chat_prompt("mine: what is 25 + 17? " * 20)]
    answer = serve(engine, [make_request("again", again, max_tokens=4, cache_salt="mine")])
    assert answer["again"].finish_reason == "length"  # what is gone is computed again


@pytest.mark.slow
def test_the_command_lists_cleans_and_checks_a_folder(filled: Path, home: Path) -> None:
    (filled / "notes.txt").write_text("mine", encoding="utf-8")
    listed = invoke("ls", filled)
    assert listed.exit_code == 0
    assert "MiB, used" in listed.stdout
    assert "left alone, of another version or not ours: notes.txt" in listed.stdout
    spaces = json.loads(invoke("ls", filled, "--json").stdout)["spaces"]
    assert sum(each["files"] for each in spaces) == len(stored_files(filled))
    assert sum(each["tokens"] for each in spaces) >= 100

    assert "0 are not" in invoke("verify", filled).stdout
    damaged = stored_files(filled)[0]
    damaged.write_bytes(b"garbage")
    checked = invoke("verify", filled)
    assert checked.exit_code == 1
    assert str(damaged) in checked.stdout
    assert damaged.exists()

    assert invoke("gc", filled).stdout.startswith("removed 0 files")
    (home / "kv.key").chmod(0o644)
    refused = invoke("verify", filled)
    assert refused.exit_code == 1
    assert "chmod 600" in refused.stderr


def test_the_command_says_which_folder_is_missing(folder: Path) -> None:
    assert "no folder: name one, or set engine.kv_folder" in invoke("ls").stderr
    missing = invoke("gc", folder)
    assert missing.exit_code == 2
    assert f"{folder} is no folder" in missing.stderr


def test_a_folder_that_others_may_read_stops_the_start(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(EngineError, match="chmod 700"):
        build_engine(settings_of(folder, num_blocks=64), no_progress)
