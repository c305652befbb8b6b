"""What is no checkpoint is refused before torch is imported, with its format and the way out."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from outrider.engine.errors import InvalidAdapterError, UnsupportedModelError
from outrider.engine.model.checkpoint_check import ask_hub, check_checkpoint
from outrider.engine.model.families.table import FAMILIES
from outrider.engine.model.gguf.header import read_header
from outrider.gateway.settings.sections import bundled_pair
from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.wiring import start
from outrider.gateway.wiring.hardware import may_have_gpu
from outrider.gateway.wiring.start import check_models

SMALL = bundled_pair() / "small"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(SMALL, tmp_path / "model")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    ask_hub.cache_clear()
    yield monkeypatch
    ask_hub.cache_clear()


def answer(hub: pytest.MonkeyPatch, result: object) -> None:
    def model_info(*_: object, **__: object) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    hub.setattr(huggingface_hub.HfApi, "model_info", model_info)


def refusal(path: Path | str) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_checkpoint(str(path))
    return str(caught.value)


def test_the_bundled_pair_passes() -> None:
    check_checkpoint(str(SMALL))


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; from outrider.engine.model.checkpoint_check import check_checkpoint\n"
        "check_checkpoint(sys.argv[1]); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(SMALL)], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "huggingface_hub"} & set(done.stdout.split())


def test_a_lora_adapter_names_its_base(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    message = refusal(tmp_path)
    assert "LoRA adapter" in message
    assert "Qwen/Qwen3-0.6B" in message
    assert "--lora" in message


@pytest.mark.parametrize(
    ("name", "kind"), [("pytorch_model.bin", "pickles"), ("flax_model.msgpack", "Flax")]
)
def test_other_weights_are_named(folder: Path, name: str, kind: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message
    assert kind in message
    assert "save_pretrained" in message


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer (tokenizer.json). Copy" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["BertModel"]}, "BertModel: it writes no text"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "an encoder-decoder",
        ),
        ([], "config.json is not a JSON object"),
    ],
)
def test_what_writes_no_text_is_refused(folder: Path, config: object, said: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert said in refusal(folder)


def test_a_pointer_of_git_lfs_is_told_from_the_file(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(folder)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"tjgg" + bytes(40), "old format"),
        (b"<html>" + bytes(40), "download it again"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    ],
)
def test_a_file_that_is_no_gguf_says_what_it_is(tmp_path: Path, begin: bytes, said: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(begin)
    with pytest.raises(UnsupportedModelError, match=said):
        read_header(file)


def test_a_wrong_id_is_asked_about_once(hub: pytest.MonkeyPatch) -> None:
    answer(hub, OSError("Name or service not known"))
    message = refusal("Qwen/Qwen3-0.6Bx")
    assert "cannot be asked (Name or service not known)" in message
    assert "Check the spelling" in message


def test_what_is_cached_is_used_without_the_hub(hub: pytest.MonkeyPatch) -> None:
    answer(hub, OSError("Name or service not known"))
    hub.setenv("HF_HUB_OFFLINE", "0")  # put back at the end
    hub.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    check_checkpoint("some/model")
    assert constants.HF_HUB_OFFLINE


def test_an_id_without_slash_or_with_spaces_is_explained(hub: pytest.MonkeyPatch) -> None:
    answer(hub, AssertionError("not asked"))
    assert "neither a folder here nor a Hugging Face id" in refusal("Qwen 3 0.6B")


def test_a_repository_of_gguf_files_names_one(hub: pytest.MonkeyPatch) -> None:
    files = [_File("README.md"), _File("qwen3-Q4_K_M.gguf")]
    answer(hub, _Info(files))
    assert "qwen3-Q4_K_M.gguf: download it, and name that file" in refusal("some/model-GGUF")


def test_a_model_that_does_not_exist(hub: pytest.MonkeyPatch) -> None:
    answer(hub, errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError))
    assert "Check the spelling; for a private one set HF_TOKEN" in refusal("some/modle")


class _File:
    def __init__(self, name: str) -> None:
        self.rfilename = name


class _Info:
    config = None

    def __init__(self, siblings: list[_File]) -> None:
        self.siblings = siblings


def test_an_architecture_that_transformers_does_not_know_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name in ("Qwen3ForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
        check_checkpoint(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["YiForCausalLM"]}))
    assert "YiForCausalLM, which the installed transformers does not know" in refusal(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_engine_is_known(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    check_checkpoint(str(folder))


def test_a_gpu_that_cannot_be_there_is_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not may_have_gpu(tmp_path, ("libnothing-of-the-kind.so",))
    (tmp_path / "nvidiactl").touch()
    assert may_have_gpu(tmp_path, ())
    assert may_have_gpu(tmp_path / "none", ("libc.so.6",))
    monkeypatch.setattr(start, "may_have_gpu", lambda: False)
    with pytest.raises(SettingsError, match="this machine has no GPU driver"):
        check_models(load_settings(flags={"engine.device": "cuda"}, environ={}, config_file=None))
    only_upstream = {
        "engine.device": "cuda",
        "models.large": "none",
        "models.small": "none",
        "tiers.cloud.url": "http://127.0.0.1:1",
        "tiers.cloud.model": "m",
    }
    check_models(load_settings(flags=only_upstream, environ={}, config_file=None))


@pytest.mark.parametrize(
    ("drafter", "large", "message"),
    [
        ("/nowhere", "", "no such folder. Name a folder with an EAGLE-3, MTP"),
        ("head", "", "no such folder"),
        ("mtp", "none", "there is none on this machine: name one with --large"),
    ],
)
def test_a_drafter_that_cannot_be_there_is_refused_before_torch_is_imported(
    drafter: str, large: str, message: str
) -> None:
    flags: dict[str, object] = {"models.drafter": drafter}
    if large:
        flags["models.large"] = large
    with pytest.raises(SettingsError, match=message):
        check_models(load_settings(flags=flags, environ={}, config_file=None))


@pytest.mark.parametrize("drafter", ["mtp", str(SMALL), "owner/name"])
def test_drafters_that_may_be_there_are_left_to_the_engine(drafter: str) -> None:
    check_models(load_settings(flags={"models.drafter": drafter}, environ={}, config_file=None))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shutil.copytree(bundled_pair() / "small", tmp_path, dirs_exist_ok=True)
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors").rename(tmp_path / weights["a"])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(UnsupportedModelError, match=f"such as {weights['b']}"):
        check_checkpoint(str(tmp_path))


def test_an_adapter_of_another_kind_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    settings = load_settings(flags={"adapters.lora": (f"mine={tmp_path}",)}, environ={})
    with pytest.raises(InvalidAdapterError, match=r"--lora mine=.*use_dora is .rue"):
        check_models(settings)
