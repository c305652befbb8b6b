"""Reading checkpoints: single and sharded files, and refusals that say what is wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model import weights
from outrider.engine.model.decoder import DecoderModel
from outrider.engine.model.freed_memory import give_back_freed_memory
from outrider.engine.model.read_config import describe, read_model_config
from outrider.engine.model.weights import CheckpointReader, resolve_checkpoint
from tests.engines import PAIR_FOLDER
from tests.models import HF_CONFIGS, edit_config, save_hf_model


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    names = (
        load_file(folder / "model.safetensors") if (folder / "model.safetensors").exists() else {}
    )
    for shard in folder.glob("model-*.safetensors"):
        names.update(load_file(shard))
    with CheckpointReader(folder, dtype=torch.float32) as reader:
        return {name: reader.read(name, tensor.shape) for name, tensor in names.items()}


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    hf = save_hf_model("qwen3", tmp_path / "single")
    hf.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single, sharded = read_all(tmp_path / "single"), read_all(tmp_path / "sharded")
    assert single.keys() == sharded.keys() == hf.state_dict().keys()
    for name, tensor in hf.state_dict().items():
        assert torch.equal(single[name], tensor)
        assert torch.equal(sharded[name], tensor)
    assert DecoderModel.load(str(tmp_path / "sharded")).num_parameters == hf.num_parameters()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    save_hf_model("llama3", tmp_path)
    seen: list[tuple[int, int]] = []
    DecoderModel.load(str(tmp_path), on_progress=lambda done, total: seen.append((done, total)))
    done = [pair[0] for pair in seen]
    total = (tmp_path / "model.safetensors").stat().st_size
    assert done == sorted(done)
    assert done[-1] == total
    assert 0 < done[0] < total
    assert {pair[1] for pair in seen} == {total}


def test_a_read_tensor_outlives_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path, dtype=torch.float32) as reader:
        tensor = reader.read("a", (6,))
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 200)
    assert torch.equal(tensor, torch.arange(6.0))


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_hf_model("llama2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norm = "model.layers.1.input_layernorm.weight"

    save_file({name: t for name, t in tensors.items() if name != norm}, file)
    with pytest.raises(UnsupportedModelError, match=f"{norm} is missing"):
        DecoderModel.load(str(tmp_path))

    save_file({**tensors, "model.layers.3.extra.weight": torch.zeros(2)}, file)
    with pytest.raises(UnsupportedModelError, match=r"1 unexpected .*model\.layers\.3\.extra"):
        DecoderModel.load(str(tmp_path))

    save_file({**tensors, norm: torch.zeros(63)}, file)
    with pytest.raises(UnsupportedModelError, match=rf"{norm} has the shape \[63\].*\[64\]"):
        DecoderModel.load(str(tmp_path))

    save_file({**tensors, norm: torch.zeros(64, dtype=torch.int8)}, file)
    with pytest.raises(UnsupportedModelError, match=r"int8, but config.json names no format"):
        DecoderModel.load(str(tmp_path))


def test_stored_frequencies_and_a_copied_tied_head_may_be_left_over(tmp_path: Path) -> None:
    hf = save_hf_model("llama3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    save_file({**tensors, **extra}, file)
    assert DecoderModel.load(str(tmp_path)).num_parameters == hf.num_parameters()


def test_layers_for_predicting_several_tokens_may_be_left_over(tmp_path: Path) -> None:
    hf = save_hf_model("glm4-moe", tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {"model.layers.3.eh_proj.weight": torch.zeros(2)}
    save_file({**load_file(file), **extra}, file)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModelError, match=r"1 unexpected .*layers\.3\.eh_proj"):
        DecoderModel.load(str(tmp_path))
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert DecoderModel.load(str(tmp_path)).num_parameters >= hf.num_parameters()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "not a checkpoint: it has no config.json"),
        ({"config.json": None}, r"has no model\.safetensors"),
        ({"config.json": None, "pytorch_model.bin": b""}, r"pytorch_model\.bin, a format"),
        ({"config.json": None, "model.safetensors": b"junk"}, "cannot be read"),
        (
            {
                "config.json": None,
                "model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}',
            },
            r"gone\.safetensors, which does not exist",
        ),
    ],
)
def test_folders_that_are_no_checkpoints(
    content: dict[str, bytes | None], message: str, tmp_path: Path
) -> None:
    config_class, settings = HF_CONFIGS["llama2"]
    for name, data in content.items():
        if data is None:
            config = config_class(**settings, architectures=["LlamaForCausalLM"])
            config.save_pretrained(tmp_path)
        else:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderModel.load(str(tmp_path))


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for load in (resolve_checkpoint, read_model_config):
        with pytest.raises(UnsupportedModelError, match=r"outrider-tests/no-such-model.*fetched"):
            load("outrider-tests/no-such-model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM.*calls it a llama"),
        ({"architectures": None}, "of type llama"),
        ({"hidden_act": "relu2"}, "'relu2'; the engine has silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"num_key_value_heads": 3}, "4 query heads .* 3 key-value heads"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_hf_model("llama2", tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        DecoderModel.load(str(tmp_path))


def test_a_tied_model_with_a_head_of_its_own(tmp_path: Path) -> None:
    """A copy of the embedding is no harm; another matrix is what transformers would use."""
    save_hf_model("llama2", tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    DecoderModel.load(str(tmp_path))
    head[3, 2] += 0.5
    save_file({**tensors, "lm_head.weight": head}, file)
    with pytest.raises(UnsupportedModelError, match="Set tie_word_embeddings to false"):
        DecoderModel.load(str(tmp_path))


def test_a_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match="config"):
        read_model_config(tmp_path)


def test_config_fields(tmp_path: Path) -> None:
    save_hf_model("qwen2-mixed-windows", tmp_path)
    generation = {"eos_token_id": [2, 7], "bos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = read_model_config(tmp_path)
    assert config.architecture == "Qwen2ForCausalLM"
    assert [layer.window for layer in config.layers] == [None, 7, 7]
    assert config.sliding_window == 7
    assert config.has_mixed_windows
    assert config.attention_bias
    assert not config.output_bias
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1
    assert config.head_dim == 16
    assert config.dtype == "float32"
    assert config.max_position_embeddings == 256


def test_rope_settings_of_older_checkpoints(tmp_path: Path) -> None:
    """Transformers 4 wrote rope_theta and rope_scaling."""
    save_hf_model("llama2", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["rope_parameters"]
    raw["rope_theta"] = 77000.0
    raw["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 100,
    }
    path.write_text(json.dumps(raw))
    rope = read_model_config(tmp_path).layers[0].rope
    assert rope.theta == 77000.0
    assert rope.rope_type == "llama3"
    assert rope.factor == 8.0
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.5, 5.0)
    assert rope.original_max_positions == 100


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [*HF_CONFIGS, "bundled pair"])
def test_a_config_read_from_its_file_is_what_transformers_makes_of_it(
    name: str, tmp_path: Path
) -> None:
    folder = PAIR_FOLDER / "large" if name == "bundled pair" else tmp_path
    if name != "bundled pair":
        save_hf_model(name, folder)
    config = read_model_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    theirs = describe(str(folder), raw["architectures"][0], AutoConfig.from_pretrained(folder))
    assert config == theirs


def test_the_bundled_pair_is_read_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read_model_config(PAIR_FOLDER / "small").num_layers


def test_memory_that_was_freed_is_given_back_while_a_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({f"{n}": torch.zeros(100) for n in range(5)}, tmp_path / "model.safetensors")
    given: list[int] = []
    monkeypatch.setattr(weights, "give_back_freed_memory", lambda: given.append(reader.done_bytes))
    monkeypatch.setattr(weights, "_GIVE_BACK_AFTER_BYTES", 500)
    with CheckpointReader(tmp_path, dtype=torch.float32) as reader:
        for n in range(5):
            reader.read(f"{n}", (100,))
    assert given == [800, 1600, 2000]


def test_freed_memory_can_be_given_back_on_every_system() -> None:
    give_back_freed_memory()
