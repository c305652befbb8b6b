"""Checkpoints that take images, too: their text models give transformers' logits on text."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.families.text_parts import ARCHITECTURES, PREFIXES
from outrider.engine.model.load import load_model
from outrider.engine.model.read_config import read_model_config
from tests.engine.model.architectures import largest_difference
from tests.models import edit_config, save_hf_model
from tests.multimodal_models import make_multimodal_model

QUICK = ("gemma3", "qwen3_vl")
MODEL_TYPES = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            *(
                "idefics3",
                "internvl",
                "llava",
                "llava_next",
                "llava_onevision",
                "mistral3",
                "qwen3_5",
                "qwen3_5_moe",
            ),
            *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "smolvlm"),
        )
    ),
]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_text_model_gives_transformers_logits(model_type: str, tmp_path: Path) -> None:
    reference = make_multimodal_model(model_type)
    reference.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.architecture == type(reference).__name__
    assert config.is_native
    assert config.is_text_part
    assert largest_difference(load_model(str(tmp_path)), reference) < 1e-4


@pytest.mark.slow_cases
@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified", "llama4"])
def test_others_run_through_transformers(model_type: str, tmp_path: Path) -> None:
    reference = make_multimodal_model(model_type)
    reference.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.architecture == type(reference).__name__
    assert not config.is_native
    assert largest_difference(load_model(str(tmp_path)), reference) < 1e-4


def test_every_architecture_of_the_table_is_tested() -> None:
    tested = {getattr(each, "values", (each,))[0] for each in MODEL_TYPES}
    assert len(tested) == len(ARCHITECTURES)


@pytest.mark.parametrize("prefix", PREFIXES[:2])
def test_both_layouts_of_tensor_names_are_read(prefix: str, tmp_path: Path) -> None:
    reference = make_multimodal_model("mistral3")
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    own = next(each for each in PREFIXES if each + "embed_tokens.weight" in weights)
    renamed = {
        (prefix + name.removeprefix(own) if name.startswith(own) else name): tensor
        for name, tensor in weights.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    assert largest_difference(load_model(str(tmp_path)), reference) < 1e-4


def test_a_missing_tensor_of_the_text_model_is_named(tmp_path: Path) -> None:
    make_multimodal_model("gemma3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    gone = next(name for name in weights if "layers.1.mlp.up_proj" in name and "vision" not in name)
    del weights[gone]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(str(tmp_path))


def test_a_checkpoint_without_a_text_model_says_so(tmp_path: Path) -> None:
    make_multimodal_model("gemma3").save_pretrained(tmp_path)
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="has no text model"):
        load_model(str(tmp_path))


def test_another_text_model_than_a_family_is_refused(tmp_path: Path) -> None:
    save_hf_model("llama2", tmp_path)
    edit_config(tmp_path, architectures=["LlavaForConditionalGeneration"])
    with pytest.raises(UnsupportedModelError, match="LlavaForConditionalGeneration"):
        read_model_config(tmp_path)
