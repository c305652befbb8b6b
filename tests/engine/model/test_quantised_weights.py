"""Quantised checkpoints are read as their formats say, and run as their decoded weights do."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.load import load_model
from outrider.engine.model.quantised.floats import Mxfp4, Scaled
from outrider.engine.model.quantised.integers import unpack
from outrider.engine.model.read_config import read_model_config
from tests.engine.model.architectures import largest_difference
from tests.models import edit_config, save_hf_model
from tests.mutated_checkpoints import damage
from tests.sizes import repeats

GROUP = 16
Parts = dict[str, Tensor]
Quantise = Callable[[Tensor], tuple[Parts, Tensor]]  # (what the file has, the numbers it means)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """The other way round than `unpack`: unsigned numbers [..., n] into int32 words."""
    per_word = 32 // bits
    parts = numbers.long().unflatten(-1, (-1, per_word)) << (torch.arange(per_word) * bits)
    words = parts.sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@settings(max_examples=repeats(60, 15), deadline=None)
@given(bits=st.sampled_from([4, 8]), seed=st.integers(0, 1000), words=st.integers(1, 9))
def test_unpacking_undoes_packing(bits: int, seed: int, words: int) -> None:
    torch.manual_seed(seed)
    numbers = torch.randint(0, 2**bits, (3, words * 32 // bits))
    assert torch.equal(unpack(pack(numbers, bits), bits).long(), numbers)


# ---- quantised by the published layouts -----------------------------------------------------


def affine(weight: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers [out, in], scales [out, groups], zeros [out, groups]) of a weight."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-5).half().float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    numbers = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return numbers.flatten(1), scales, zeros


def meaning(numbers: Tensor, scales: Tensor, zeros: Tensor, group: int = GROUP) -> Tensor:
    return (numbers - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


def gptq(bits: int, *, offset: int = 1, shuffled: bool = False) -> Quantise:
    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        width = weight.shape[1]
        order = torch.randperm(width) if shuffled else torch.arange(width)
        numbers, scales, zeros = affine(weight[:, order], bits)
        decoded = meaning(numbers, scales, zeros)
        place = torch.argsort(order)
        parts = {
            "qweight": pack(numbers[:, place], bits).T.contiguous(),
            "qzeros": pack(zeros.T.contiguous() - offset, bits),
            "scales": scales.T.contiguous().half(),
            "g_idx": (place // GROUP).to(torch.int32),
        }
        return parts, decoded[:, place]

    return quantise


def awq(weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, scales, zeros = affine(weight, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(columns: Tensor) -> Tensor:  # [n, out]
        return pack(columns.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    parts = {
        "qweight": words(numbers.T),
        "qzeros": words(zeros.T),
        "scales": scales.T.contiguous().half(),
    }
    return parts, meaning(numbers, scales, zeros)


def block_fp8(weight: Tensor) -> tuple[Parts, Tensor]:
    rows, width = weight.shape
    high, wide = -(-rows // 24), -(-width // 24)
    padded = torch.nn.functional.pad(weight, (0, wide * 24 - width, 0, high * 24 - rows))
    blocks = padded.view(high, 24, wide, 24)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    stored = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :width]
    stored = stored.to(torch.float8_e4m3fn)
    spread = scale.repeat_interleave(24, 0)[:rows].repeat_interleave(24, 1)[:, :width]
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * spread


def compressed(compressor: Any, **options: Any) -> Quantise:
    """Quantise with the official package, which also says what the numbers are."""
    args = QuantizationArgs(**options)
    strategy = options["strategy"]
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def quantise(weight: Tensor) -> tuple[Parts, Tensor]:
        groups = weight.shape[1] // GROUP if strategy == "group" else 1
        grouped = weight.unflatten(1, (groups, -1))
        if strategy == "tensor":
            grouped = weight.reshape(1, 1, -1)
        top = 448.0 if options.get("type") == "float" else 2.0 ** (args.num_bits - 1) - 1
        state = {"weight": weight}
        state["weight_scale"] = (grouped.abs().amax(-1) / top).clamp(min=1e-6)
        zeros = torch.zeros_like(state["weight_scale"], dtype=torch.int8)
        if not args.symmetric:
            zeros += 2
        state["weight_zero_point"] = zeros
        if strategy == "tensor":
            state["weight_scale"] = state["weight_scale"].reshape(1)
            state["weight_zero_point"] = zeros.reshape(1)
        parts = compressor.compress(state, scheme)
        decoded = compressor.decompress(parts, scheme)["weight"].float()
        return {name: part.contiguous() for name, part in parts.items()}, decoded

    return quantise


PACKED, INTEGERS, FLOATS = (
    PackedQuantizationCompressor,
    IntQuantizationCompressor,
    FloatQuantizationCompressor,
)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
GROUPS: dict[str, Any] = {"strategy": "group", "group_size": GROUP}


def _compressed_config(num_bits: int, kind: str = "int") -> dict[str, Any]:
    weights = {"num_bits": num_bits, "type": kind}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }


CASES: dict[str, tuple[Quantise, dict[str, Any]]] = {
    "gptq-4": (gptq(4), GPTQ),
    "gptq-8": (gptq(8), {**GPTQ, "bits": 8}),
    "gptq-act-order": (gptq(4, shuffled=True), {**GPTQ, "desc_act": True}),
    "gptq-v2": (gptq(4, offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}),
    "fp8-blocks": (block_fp8, {"quant_method": "fp8", "weight_block_size": [24, 24]}),
    "w4a16": (compressed(PACKED, num_bits=4, **GROUPS), _compressed_config(4)),
    "w4a16-zeros": (
        compressed(PACKED, num_bits=4, symmetric=False, **GROUPS),
        _compressed_config(4),
    ),
    "w8a16": (compressed(PACKED, num_bits=8, strategy="channel"), _compressed_config(8)),
    "w8a8": (compressed(INTEGERS, num_bits=8, strategy="channel"), _compressed_config(8)),
    "fp8-rows": (
        compressed(FLOATS, num_bits=8, type="float", strategy="channel"),
        _compressed_config(8, "float"),
    ),
    "fp8-tensors": (
        compressed(FLOATS, num_bits=8, type="float", strategy="tensor"),
        _compressed_config(8, "float"),
    ),
}
QUICK = {"gptq-act-order", "awq", "fp8-blocks", "w4a16-zeros", "w8a8"}


def quantise_folder(folder: Path, case: str, **overrides: Any) -> Any:
    """Save a tiny Qwen 3 with quantised projections; returns transformers' with what they mean."""
    reference = save_hf_model("qwen3", folder)
    with torch.no_grad():
        weights = reference.state_dict()
        for name, decoded in quantise_projections(folder, case, **overrides).items():
            weights[name].copy_(decoded)
    return reference


def quantise_projections(folder: Path, case: str, **overrides: Any) -> dict[str, Tensor]:
    """Quantise the projections of a checkpoint of one file; returns what they mean, by name."""
    quantise, options = CASES[case]
    stored: Parts = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        parts, meant[name] = quantise(weight.float())
        stored |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
    if options["quant_method"] not in ("gptq", "awq"):
        stored["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={**options, **overrides})
    return meant


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in CASES]
)
def test_a_quantised_model_runs_as_its_decoded_weights(case: str, tmp_path: Path) -> None:
    reference = quantise_folder(tmp_path, case)
    config = read_model_config(tmp_path)
    assert config.weight_format is not None
    assert largest_difference(load_model(str(tmp_path)), reference) < 1e-4


def test_gpt_oss_is_read_from_mxfp4(tmp_path: Path) -> None:
    reference = save_hf_model("gpt-oss", tmp_path)
    stored: Parts = {}
    with torch.no_grad():
        weights = reference.state_dict()
        for name, weight in load_file(tmp_path / "model.safetensors").items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                stored[name] = weight
                continue
            experts, width, rows = weight.shape
            torch.manual_seed(len(stored))
            blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 127, blocks.shape[:3], dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weights[name].copy_(convert_moe_packed_tensors(blocks, scales).float())
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert largest_difference(load_model(str(tmp_path)), reference) < 1e-4


def test_every_number_of_mxfp4_is_what_transformers_reads() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    scales = torch.arange(112, 128, dtype=torch.uint8).view(1, 16, 1)
    stored = _Stored({"w_blocks": blocks, "w_scales": scales})
    decoded = Mxfp4().decode(stored, "w")
    assert decoded is not None
    assert torch.equal(decoded, convert_moe_packed_tensors(blocks, scales))


class _Stored(dict[str, Tensor]):
    def raw(self, name: str) -> Tensor:
        return self[name]


# ---- what does not fit ------------------------------------------------------------------------


def spoil(folder: Path, part: str, change: Callable[[Tensor], Tensor | None]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = f"model.layers.1.mlp.up_proj.{part}"
    changed = change(weights.pop(name))
    if changed is not None:
        weights[name] = changed.contiguous()
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("case", "part", "change", "message"),
    [
        ("gptq-act-order", "scales", lambda t: t[:, :-8], "scales have another width"),
        ("gptq-act-order", "g_idx", lambda t: t + 1000, "g_idx does not name a group"),
        ("gptq-act-order", "qzeros", lambda t: None, "qzeros is missing"),
        ("awq", "qweight", lambda t: t[:-1], "are no whole number of"),
        ("awq", "qweight", lambda t: t.float(), "no int32 matrix"),
        ("fp8-blocks", "weight_scale_inv", lambda t: t[:-1], r"scales \[3, 3\] do not fit"),
        ("fp8-blocks", "weight_scale_inv", lambda t: None, "has no weight_scale_inv"),
        ("w4a16-zeros", "weight_packed", lambda t: t[:, :-1], "neither 4 nor 8 bits"),
        ("w4a16-zeros", "weight_shape", lambda t: t * 2, "neither 4 nor 8 bits"),
        ("w8a8", "weight", lambda t: t[0, 0], "it is no matrix"),
        ("w8a8", "weight_scale", lambda t: None, "has no weight_scale"),
        ("gptq-act-order", "qzeros", lambda t: t.float(), "qzeros is no int32 matrix"),
        ("gptq-act-order", "scales", lambda t: t.int(), "scales is stored as torch.int32"),
        ("awq", "scales", lambda t: t * float("nan"), "scales holds numbers that are not finite"),
        ("awq", "qzeros", lambda t: t[0], "qzeros is no int32 matrix"),
        ("w4a16-zeros", "weight_shape", lambda t: t[:1], "weight_shape is not two sizes"),
        ("w4a16-zeros", "weight_zero_point", lambda t: t[:, :-1], "has another shape"),
        ("w4a16-zeros", "weight_scale", lambda t: t / 0, "weight_scale holds numbers that are not"),
        ("fp8-blocks", "weight_scale_inv", lambda t: t * float("inf"), "that are not finite"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    case: str,
    part: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
    tmp_path: Path,
) -> None:
    quantise_folder(tmp_path, case)
    spoil(tmp_path, part, change)
    with pytest.raises(
        UnsupportedModelError, match=rf"layers\.1\.mlp\.up_proj.*{message}"
    ) as caught:
        load_model(str(tmp_path))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


_LIES = (
    *(0, -1, 1, 3, 4.0, "4", None, True, 10**30, [], {}, float("nan"), [0, 0], [2**70, 1], "gemv"),
    *({"group_0": {"weights": {"num_bits": 4.0, "type": "int", "strategy": "group"}}}, [[]], "x"),
)


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", sorted(QUICK))
def test_a_lie_in_a_file_or_its_config_is_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    quantise_folder(tmp_path, case)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, right = file.read_bytes(), json.loads(config.read_text())
    rng, count = random.Random(case), repeats(150, 16)
    refusals: list[str] = []
    for number in range(count):
        file.write_bytes(whole)
        config.write_text(json.dumps(right))
        if number % 4:
            told = damage(file, rng)
        else:
            told = rng.choice(["version", "checkpoint_format", *right["quantization_config"]])
            edit_config(
                tmp_path,
                quantization_config=right["quantization_config"] | {told: rng.choice(_LIES)},
            )
        try:
            load_model(str(tmp_path))
        except UnsupportedModelError as error:
            refusals.append(str(error))
        except Exception as error:
            raise AssertionError(f"{told} broke the reader") from error
    assert all(str(tmp_path) in refusal and "\n" not in refusal for refusal in refusals)
    assert count / 4 < len(refusals) < count


@pytest.mark.parametrize("case", ["gptq-act-order", "awq"])
def test_groups_of_another_size_than_config_says_are_refused(case: str, tmp_path: Path) -> None:
    quantise_folder(tmp_path, case, group_size=2 * GROUP)
    with pytest.raises(UnsupportedModelError, match=r"config\.json's groups of 32 columns make"):
        load_model(str(tmp_path))


def test_packed_groups_of_another_size_than_config_says_are_refused(tmp_path: Path) -> None:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 2 * GROUP}
    quantise_folder(tmp_path, "w4a16", config_groups={"group_0": {"weights": args}})
    with pytest.raises(UnsupportedModelError, match="groups of 32 columns make"):
        load_model(str(tmp_path))
    args["group_size"] = GROUP
    edit_config(
        tmp_path,
        quantization_config=_compressed_config(4)
        | {"config_groups": {"group_0": {"weights": args}}},
    )
    load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "read as awq, compressed-tensors, fp8, gptq, mxfp4"),
        ({**GPTQ, "group_size": 0}, "group_size is 0; it has to be at least 1"),
        ({"quant_method": "awq", "bits": 4, "q_group_size": "16"}, "q_group_size is '16'"),
        ({"load_in_4bit": True}, r"quantised \(unknown\)"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ is read with 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ is read with 4 as 'gemm'"),
        (_compressed_config(4, "float"), "float weights of 4 bits"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}},
            "is sparse",
        ),
        ("fp8", r"quantised \(unknown\)"),
    ],
)
def test_other_formats_are_refused_before_weights_are_read(
    options: Any, message: str, tmp_path: Path
) -> None:
    save_hf_model("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    edit_config(tmp_path, quantization_config=options)
    with pytest.raises(UnsupportedModelError, match=message):
        read_model_config(tmp_path)


def test_only_native_models_are_read_quantised(tmp_path: Path) -> None:
    save_hf_model("gpt_neox", tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="only unquantised weights do"):
        read_model_config(tmp_path)


def test_quantised_weights_without_a_word_in_config_are_refused(tmp_path: Path) -> None:
    quantise_folder(tmp_path, "fp8-blocks")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="names no format of quantised weights"):
        load_model(str(tmp_path))


def test_one_number_scales_all() -> None:
    weight = torch.tensor([[1, -2], [3, 4]], dtype=torch.int8)
    decoded = Scaled(weight, torch.tensor(0.5), zeros=torch.tensor([1], dtype=torch.int8)).decoded(
        "w"
    )
    assert torch.equal(decoded, torch.tensor([[0.0, -1.5], [1.0, 1.5]]))


def test_a_block_beyond_a_weights_edge_costs_no_memory() -> None:
    """A scale was repeated for each row of a block, of which config.json may name any number."""
    weight, scale = torch.arange(32.0).view(4, 8), torch.tensor([[2.0, 3.0]])
    numbers = Scaled(weight, scale, block=(10**12, 4)).decoded("w")
    assert torch.equal(numbers, weight * scale.repeat_interleave(4, 1))
