"""`outrider serve` without a model: the bundled pair, grown once, where there is room for it."""

import os
from pathlib import Path

import pytest

from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import Settings, load_settings
from outrider.gateway.tools.demo import grown_pair
from outrider.gateway.tools.demo.grown_pair import grow_pair, kept_pair, with_grown_pair
from outrider.router.scorer import RouterScorer

PARTS = ("large", "small", "router")


def settings(**models: str) -> Settings:
    return load_settings(flags={f"models.{k}": v for k, v in models.items()}, environ={})


def refuse(_: str) -> None:
    raise AssertionError("it is grown again")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(grown_pair, "available_memory_bytes", lambda: 2**33)
    return tmp_path / "outrider"


@pytest.fixture
def kept(cache: Path) -> Path:
    """A cache folder that has what stands for the grown pair."""
    folder = cache / "grown" / grown_pair._key()
    folder.mkdir(parents=True)
    return folder


def test_without_a_name_the_kept_pair_is_served(kept: Path) -> None:
    shown, line = with_grown_pair(settings(), refuse)
    assert shown.models.resolved() == {name: str(kept / name) for name in ("large", "small")}
    assert shown.models.resolved_router() == kept / "router"
    assert "grown to 150M and 15M parameters" in line


@pytest.mark.parametrize(
    "named", [{"large": "demo", "small": "demo"}, {"small": "demo"}, {"router": "somewhere"}]
)
def test_what_is_named_is_served(kept: Path, named: dict[str, str]) -> None:
    assert with_grown_pair(settings(**named), refuse) == (settings(**named), "")


def test_beside_upstream_tiers_nothing_is_grown(kept: Path) -> None:
    given = load_settings(flags={"tiers.cloud.url": ("http://a/v1",)}, environ={})
    assert with_grown_pair(given, refuse) == (given, "")


def test_little_memory_keeps_the_pair_as_it_is(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grown_pair, "available_memory_bytes", lambda: 2**30)
    shown, line = with_grown_pair(settings(), refuse)
    assert shown == settings()
    assert "less than 2 GiB of memory is free" in line


def test_a_cache_that_cannot_be_made_keeps_the_pair_as_it_is(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "outrider").write_text("a file where the folder should be")
    shown, line = with_grown_pair(settings(), refuse)
    assert shown == settings()
    assert "it cannot be grown" in line


@pytest.mark.slow
def test_a_grown_pair_has_the_routers_judgement(tmp_path: Path) -> None:
    grow_pair(tmp_path)
    pair = [checkpoint_fingerprint(tmp_path / name) for name in ("small", "large")]
    assert RouterScorer.load(tmp_path / "router").pair == "-".join(pair)
    assert (tmp_path / "large" / "tokenizer.json").read_bytes() == (
        bundled_pair() / "large" / "tokenizer.json"
    ).read_bytes()


@pytest.mark.slow
def test_it_is_grown_once_in_a_process_of_its_own(cache: Path) -> None:
    told: list[str] = []
    folder = kept_pair(told.append)
    assert sorted(os.listdir(folder)) == sorted(PARTS)
    assert os.listdir(folder.parent) == [folder.name]
    assert "once" in told[0]
    assert kept_pair(refuse) == folder
