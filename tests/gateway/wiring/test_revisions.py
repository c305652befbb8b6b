"""A tier's revision on the hub: all of its files are of that commit, and others' are not."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from outrider.engine.errors import EngineError, UnsupportedModelError
from outrider.engine.model.checkpoint_check import ask_hub
from outrider.engine.model.checkpoint_files import hub_commit
from outrider.engine.queue.admission import tier_info
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.tools.commands.doctor.doctor import examine
from outrider.gateway.tools.learning.drafters.shared import DraftEngineFlags
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.wiring import checkpoints
from outrider.gateway.wiring.checkpoints import at_commits, named_models
from outrider.gateway.wiring.drafter import load_head
from outrider.gateway.wiring.engine import load_runners
from outrider.gateway.wiring.routing import build_routing
from outrider.gateway.wiring.start import check_models, engine_recipe
from outrider.gateway.wiring.upstream import build_upstream
from tests.hub import FakeHub, serve_hub

SMALL = bundled_pair() / "small"
MODEL, LARGE = "acme/tiny", "acme/large"


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with another template, end and weight: the revision v2."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(SMALL, tmp_path_factory.mktemp("hub") / "v2")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, folder / "model.safetensors")
    (folder / "chat_template.jinja").write_text("second: {{ messages[0].content }}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    return folder


@pytest.fixture
def hub(changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with two revisions of one model, and an empty cache."""
    with serve_hub(
        {
            MODEL: {"main": SMALL, "v2": changed, "refs/pr/1": changed},
            LARGE: {"main": bundled_pair() / "large"},
        }
    ) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # set where the hub cannot be asked; put back
        forget()
        yield hub
    forget()


def forget() -> None:
    """Act as a new process: the hub is asked again."""
    ask_hub.cache_clear()
    checkpoints._pinned.cache_clear()


def settings_of(**models: object) -> Settings:
    flags = {"models.large": MODEL, "models.small": "none", "engine.device": "cpu"}
    return load_settings(
        environ={}, flags=flags | {f"models.{name}": value for name, value in models.items()}
    )


def test_weights_tokenizer_and_template_are_those_of_the_revision(hub: FakeHub) -> None:
    commit = hub.commit(MODEL, "v2")
    infos = {}
    for revision in ("main", "v2"):
        settings = settings_of(large_revision=revision)
        check_models(settings)
        runner = load_runners(settings, lambda *_: None)["large"]
        infos[revision] = tier_info("large", runner)
        folder = named_models(settings)["large"]
        assert folder == infos[revision].path
        assert hub_commit(folder) == hub.commit(MODEL, revision)
    assert infos["main"].fingerprint != infos["v2"].fingerprint
    assert infos["main"].numerics != infos["v2"].numerics
    assert infos["v2"].model_id == "tiny", "the repository's name, not the commit"
    assert 7 in ChatTokenizer.load(folder).stop_token_ids
    assert ChatTokenizer.load(folder)._tokenizer.chat_template.startswith("second")
    asked = [path for path in hub.paths if "/resolve/" in path and path.endswith("safetensors")]
    assert any(f"/{commit}/" in path for path in asked)


def test_the_engine_gets_the_commit_that_the_gateway_found(hub: FakeHub) -> None:
    settings = settings_of(large_revision="refs/pr/1")
    assert at_commits(settings).large_revision == hub.commit(MODEL, "refs/pr/1")
    assert hub.commit(MODEL, "v2") in engine_recipe(settings).arguments


def test_a_router_is_compared_once_the_weights_are_there(hub: FakeHub) -> None:
    settings = load_settings(
        environ={},
        flags={
            "models.large": LARGE,
            "models.small": MODEL,
            "models.large_revision": "main",
            "models.small_revision": "main",
            "models.router": bundled_pair() / "router",
        },
    )
    _, parts = build_routing(settings, named_models(settings))
    assert parts.pair is not None
    assert not any("safetensors" in path for path in hub.paths)


def test_a_drafter_and_a_tokenizer_have_revisions_of_their_own(hub: FakeHub) -> None:
    settings = settings_of(drafter=MODEL, drafter_revision="none-such", large_revision="v2")
    with pytest.raises(UnsupportedModelError, match="acme/tiny has no revision none-such"):
        check_models(settings)
    settings = settings_of(drafter=MODEL, drafter_revision="v2")
    models = load_runners(settings_of(), lambda *_: None)["large"].model
    with pytest.raises(EngineError, match=hub.commit(MODEL, "v2")):  # it is no drafter
        load_head(settings, {"large": models}, lambda *_: None)
    tier = {"url": "http://127.0.0.1:1", "tokenizer": MODEL, "tokenizer_revision": "none-such"}
    flags = {f"tiers.cloud.{name}": value for name, value in tier.items()}
    with pytest.raises(SettingsError, match="acme/tiny has no revision none-such"):
        build_upstream(load_settings(environ={}, flags=flags), {}, (), UpstreamMetrics())


def test_a_revision_that_is_not_there_is_one_sentence(hub: FakeHub) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        check_models(settings_of(large_revision="v3"))
    assert "acme/tiny has no revision v3 on the Hugging Face hub" in str(caught.value)
    assert "a branch, a tag or a full commit hash" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_hub_a_cached_revision_is_used_and_another_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = settings_of(large_revision="v2")
    load_runners(pinned, lambda *_: None)
    for is_offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        forget()
        with pytest.raises(UnsupportedModelError, match=r"acme/tiny at revision refs/pr/1 is n"):
            check_models(settings_of(large_revision="refs/pr/1"))
        for revision in ("v2", hub.commit(MODEL, "v2")):
            settings = settings_of(large_revision=revision)
            check_models(settings)
            assert hub_commit(named_models(settings)["large"]) == hub.commit(MODEL, "v2")
        load_runners(pinned, lambda *_: None)


def test_the_doctor_tells_the_commit_or_that_there_is_none(hub: FakeHub) -> None:
    def large(revision: str) -> str:
        findings = examine(settings_of(large_revision=revision))
        found = next(each for each in findings if each.name == "large model")
        return f"{found.status} {found.detail}"

    assert large("v2").startswith("ok LlamaForCausalLM at ")
    assert hub.commit(MODEL, "v2") in large("v2")
    assert "without weights" in large("v2")
    assert large("v3").startswith("failed acme/tiny has no revision v3")


@pytest.mark.parametrize("name", [str(SMALL), "./nowhere", "demo", "none", None])
def test_what_is_not_on_the_hub_has_no_revision(name: str | None) -> None:
    flags = {"models.large": name, "models.small": "a/b", "models.large_revision": "v2"}
    with pytest.raises(SettingsError, match=r"--large-revision\).*only models on the Hugging Face"):
        load_settings(environ={}, flags=flags)


def test_a_name_does_not_get_the_revision_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text('[models]\nlarge = "a/b"\nlarge_revision = "v2"\n')
    for large, environ, revision in (
        (None, {}, "v2"),
        ("a/b", {}, "v2"),
        (str(SMALL), {}, None),
        ("c/d", {}, None),
        ("c/d", {"OUTRIDER_MODELS__LARGE_REVISION": "v3"}, "v3"),
        ("a/b", {"OUTRIDER_MODELS__LARGE_REVISION": "v3"}, "v3"),
    ):
        settings = load_settings(config_file=file, environ=environ, flags={"models.large": large})
        assert settings.models.large_revision == revision
    environ = {"OUTRIDER_MODELS__LARGE_REVISION": "v3"}
    settings = load_settings(environ=environ, flags={"models.large": "a/b"})
    assert settings.models.large_revision == "v3"


def test_training_refuses_a_revision(tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text('[models]\nlarge = "a/b"\nlarge_revision = "v2"\n')
    with pytest.raises(SettingsError, match="hf download"):
        DraftEngineFlags(config=file).settings({"models.large": "a/b"})
