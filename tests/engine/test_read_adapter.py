"""Adapters' files: what is read, and what is refused by name, bounded and in one piece."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider.engine.adapters.peft_config import read_scales
from outrider.engine.adapters.read_adapter import Adapter, read_adapter
from outrider.engine.errors import InvalidAdapterError
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.verifier.params import SamplingParams
from tests.adapters import make_adapter
from tests.engines import make_engine, make_request, random_prompt, tiny_pair
from tests.models import make_hf_model
from tests.transformers_models import make_transformers_model

MAX_BYTES = 1 << 22


def read(folder: Path, max_bytes: int = MAX_BYTES) -> Adapter:
    model = tiny_pair("qwen3").large
    return read_adapter(
        folder, model.config, dtype=model.dtype, device=model.device, max_bytes=max_bytes
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "own", tiny_pair("qwen3").large_reference, seed=1, rank=4)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return found


def change(folder: Path, **fields: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(config_of(folder) | fields))


def weights(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(weights(folder))
    change(tensors)
    save_file(tensors, weights(folder))


def refusal(folder: Path, max_bytes: int = MAX_BYTES) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        read(folder, max_bytes)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_what_is_read(folder: Path) -> None:
    info = read(folder).info
    assert (info.max_rank, info.num_modules) == (4, 7 * 2)
    assert info.num_bytes == 4 * sum(each.numel() for each in load_file(weights(folder)).values())
    assert info.digest == read(folder).info.digest
    change(folder, lora_alpha=99)
    assert read(folder).info.digest != info.digest


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["w"]}, "target_parameters"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"something_new": {"a": 1}}, "something_new"),
        ({"r": 257}, "ranks from 1 to 256"),
        ({"r": 0}, "ranks from 1 to 256"),
        ({"r": 5}, "adapter_config.json says 5"),
        ({"rank_pattern": {"q_proj": 2}}, "adapter_config.json says 2"),
        ({"rank_pattern": {"(a+)+b": 2}}, "regular expressions"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
    ],
)
def test_other_kinds_are_refused_by_name(
    folder: Path, fields: dict[str, Any], complaint: str
) -> None:
    change(folder, **fields)
    assert complaint in refusal(folder)


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda t: rename(t, "q_proj", "c_proj"), "may change"),
        (lambda t: rename(t, "layers.1", "layers.7"), "may change"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}), "head"),
        (lambda t: t.pop(next(n for n in t if "lora_B" in n)), "lora_B is missing"),
        (lambda t: rename(t, "o_proj.lora_A", "o_proj.lora_magnitude_vector"), "may change"),
        (
            lambda t: t.update(
                {k: v[:, :-1].clone() for k, v in t.items() if "q_proj.lora_A" in k}
            ),
            "another",
        ),
        (lambda t: t.update({k: v.long() for k, v in t.items() if "q_proj.lora_A" in k}), "F32"),
        (lambda t: t.update({k: v / 0 for k, v in t.items() if "q_proj.lora_A" in k}), "finite"),
        (lambda t: t.clear(), "no low-rank products"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    folder: Path, spoil: Callable[[dict[str, torch.Tensor]], None], complaint: str
) -> None:
    change_tensors(folder, lambda tensors: (spoil(tensors), None)[1])
    assert complaint in refusal(folder)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    other = make_hf_model("qwen3", hidden_size=96, num_hidden_layers=2)
    assert "another one" in refusal(make_adapter(tmp_path / "other", other, seed=1))


def test_sizes_are_bounded_before_reading(folder: Path) -> None:
    assert "adapters.memory_mib" in refusal(folder, max_bytes=1000)
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.truncate(1 << 40)  # a hole: nothing of it is on the disk
    assert "at most" in refusal(folder)
    (folder / "adapter_config.json").write_bytes(b" " * (2 << 20))
    assert "at most" in refusal(folder)


def test_files_that_are_none_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "nowhere")
    weights(folder).unlink()
    os.mkfifo(weights(folder))
    assert "not a regular file" in refusal(folder)


@given(data=st.data())
def test_broken_files_are_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut short anywhere, or with any byte of the header changed."""
    folder = tmp_path_factory.mktemp("broken")
    make_adapter(folder, tiny_pair("qwen3").large_reference, seed=1, rank=1, modules=("q_proj",))
    content = bytearray(weights(folder).read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, header_end - 1))] = data.draw(st.integers(0, 255))
    weights(folder).write_bytes(content)
    try:
        read(folder)
    except InvalidAdapterError:
        return


@given(content=st.binary(max_size=200))
def test_any_config_is_read_or_refused(content: bytes) -> None:
    with pytest.raises(InvalidAdapterError):
        read_scales(content)


def test_patterns_are_pefts() -> None:
    fields = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 4, "^model.layers.0.mlp.up_proj$": 2},
        "alpha_pattern": {"q_proj": 6},
    }
    scales = read_scales(json.dumps(fields).encode())
    assert scales.of("model.layers.1.self_attn.q_proj") == (4, 6 / 2)
    assert scales.of("model.layers.11.self_attn.q_proj") == (8, 6 / 8**0.5)
    assert scales.of("model.layers.0.mlp.up_proj") == (2, 16 / 2**0.5)
    assert scales.of("model.layers.1.mlp.up_proj") == (8, 16 / 8**0.5)


def test_transformers_modules_take_none(tmp_path: Path) -> None:
    reference = make_transformers_model("starcoder2", seed=1)
    from tests.engines import engine_model

    model = engine_model(reference)
    folder = make_adapter(tmp_path / "own", reference, seed=1)
    with pytest.raises(InvalidAdapterError, match="transformers' own modules"):
        read_adapter(
            folder, model.config, dtype=model.dtype, device=model.device, max_bytes=MAX_BYTES
        )


# ---- in the engine --------------------------------------------------------------------------


def adapted(request: EngineRequest, folder: Path, version: str = "") -> EngineRequest:
    from dataclasses import replace

    ref = AdapterRef(name=folder.name, tier="large", folder=str(folder), version=version)
    return replace(request, adapters=(ref,))


def events_of(engine: Any, requests: list[EngineRequest]) -> dict[str, Any]:
    for request in requests:
        engine.submit(request)
    last: dict[str, Any] = {}
    while engine.has_work:
        for event in engine.step():
            last[event.request_id] = event
    return last


def test_a_broken_adapter_fails_its_request_alone(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(tiny_pair("qwen3"))
    last = events_of(
        engine,
        [
            adapted(make_request("bad", random_prompt(20)), tmp_path / "nowhere"),
            adapted(make_request("good", random_prompt(20)), folder),
            make_request("base", random_prompt(20)),
        ],
    )
    assert last["bad"].code == "invalid_adapter"
    assert "nowhere" in last["bad"].message
    assert {last[name].finish_reason for name in ("good", "base")} == {"length"}
    assert not engine.stats().tiers["large"].num_used_blocks


def test_requests_that_leave_hold_nothing(folder: Path) -> None:
    engine = make_engine(tiny_pair("qwen3"))
    engine.submit(adapted(make_request("a", random_prompt(20)), folder))
    engine.abort("a")
    assert engine.stats().tiers["large"].num_waiting == 0
    engine.submit(adapted(make_request("b", random_prompt(20)), folder))
    while not engine.scheduler.num_running:
        engine.step()
    engine.abort("b")
    assert events_of(engine, [adapted(make_request("c", random_prompt(20)), folder)])["c"]
    (entry,) = engine.adapters._banks["large"]._entries.values()
    assert entry.num_users == 0


def test_two_adapters_of_one_tier_are_no_request(folder: Path) -> None:
    ref = AdapterRef(name="a", tier="large", folder=str(folder))
    with pytest.raises(ValueError, match="two of one tier"):
        EngineRequest(
            request_id="r",
            prompt_token_ids=(1,),
            tier="large",
            sampling=SamplingParams(max_tokens=1),
            adapters=(ref, ref),
        )
