"""GGUF files of small models, written by the `gguf` package as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.gguf.folder import gguf_folder
from outrider.engine.model.gguf.tensors import _PARTS, _WHOLE
from outrider.engine.model.read_config import read_model_config
from outrider.kernels.layers.rope import RopeConfig, rope_frequencies

_STORED = {ours: theirs for theirs, ours in _WHOLE.items()}
_STORED_PARTS = {ours: theirs for theirs, ours in _PARTS.items()}


def stored_name(name: str) -> str:
    """Return the name that a checkpoint's tensor has in a file."""
    if name in _STORED:
        return _STORED[name]
    _, _, layer, part = name.split(".", 3)
    stem, _, kind = part.rpartition(".")
    return f"blk.{layer}.{_STORED_PARTS[stem]}.{kind}"


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Return rows of a projection in the order in which llama.cpp turns Llama's heads."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def quantised(weight: Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    """Return a weight's bytes in a file."""
    return gguf.quants.quantize(weight.float().numpy(), kind)


def kept(weight: Tensor, kind: Kind) -> Tensor:
    """Return what is left of a weight, float32."""
    return torch.from_numpy(gguf.quants.dequantize(quantised(weight, kind), kind))


def kind_of(tensor: Tensor, kind: Kind) -> Kind:
    """Return a tensor's own kind in a file of another: vectors are never rounded."""
    return kind if tensor.dim() == 2 else Kind.F32


def write_gguf(
    path: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    family: str,
    kind: Kind,
    fields: Mapping[str, int | float | str] | None = None,
) -> None:
    """Write a file whose matrices are of one kind; `fields` are added or take another's place."""
    writer = gguf.GGUFWriter(path, family)
    for name, value in (_fields(config, family) | dict(fields or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name, value)  # type: ignore[operator]
    if factors := _rope_factors(config.layers[0].rope):
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    heads = {"q_proj": config.num_query_heads, "k_proj": config.num_kv_heads}
    for name, weight in weights.items():
        projection = name.split(".")[-2]
        if family == "llama" and projection in heads:
            weight = interleaved(weight, heads[projection])
        own = kind_of(weight, kind)
        writer.add_tensor(stored_name(name), quantised(weight, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def store_gguf(plain: Path, folder: Path) -> Path:
    """Write a Llama's matrices into a GGUF file of 4 bits; return the folder that stands for it."""
    weights: dict[str, Tensor] = {}
    for path in plain.glob("*.safetensors"):
        weights |= load_file(path)
    folder.mkdir()
    file = folder / "model.gguf"
    write_gguf(file, weights, read_model_config(plain), family="llama", kind=Kind.Q4_0)
    return gguf_folder(file, folder, add_tokenizer=lambda *_: None)


def _fields(config: ModelConfig, family: str) -> dict[str, int | float | str]:
    rope = config.layers[0].rope
    fields: dict[str, int | float | str] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_query_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(rope.theta),
    }
    if rope.rope_type in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": rope.factor}
    if rope.rope_type == "yarn":
        fields["rope.scaling.original_context_length"] = rope.original_max_positions
    tokens: dict[str, int | float | str] = {"tokenizer.ggml.bos_token_id": config.bos_token_id or 0}
    tokens["tokenizer.ggml.eos_token_id"] = config.eos_token_ids[0]
    return {f"{family}.{name}": value for name, value in fields.items()} | tokens


def _rope_factors(rope: RopeConfig) -> list[float]:
    if rope.rope_type != "llama3":
        return []
    plain = RopeConfig(head_dim=rope.head_dim, theta=rope.theta)
    factors: list[float] = (rope_frequencies(plain) / rope_frequencies(rope)).tolist()
    return factors
