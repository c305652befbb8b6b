"""The tensors of a GGUF file, by the names and in the order that transformers' checkpoints have."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.gguf.blocks import packed_blocks
from outrider.engine.model.gguf.config import ROPE_FACTORS
from outrider.engine.model.gguf.header import TENSOR_TYPES, GgufHeader, StoredTensor, read_header
from outrider.kernels.quantised.stored_weight import StoredWeight

_WHOLE: Final[Mapping[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Blocks are decoded so many numbers at a time: their float32 form is not to fill the memory.
_NUMBERS_AT_ONCE: Final = 16 << 20


class GgufFile:
    """Hands out tensors by transformers' names, once or often: quantised ones in float32."""

    def __init__(self, path: Path) -> None:
        """Raises UnsupportedModelError for what is no sound GGUF file."""
        self._header = read_header(path)
        self._stored = tensor_names(self._header)
        self._path = path

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor. Raises UnsupportedModelError where a package is missing."""
        stored = self._stored[name]
        tensor = self.decoded(stored)
        order = self._order_of_rows(stored, len(tensor))
        return tensor if order is None else tensor[order]

    def packed(self, name: str) -> StoredWeight | None:
        """Return a weight as it is stored; None for one that has to be decoded, or is plain."""
        stored = self._stored[name]
        tensor = self._header.tensors[stored]
        kind = TENSOR_TYPES[tensor.kind]
        if kind.name in _PLAIN or len(tensor.shape) != 2:
            return None
        blocks = self._bytes(tensor).reshape(-1, kind.block_bytes)
        found = packed_blocks(kind.name, torch.from_numpy(blocks), tensor.shape[0])
        order = self._order_of_rows(stored, tensor.shape[0])
        return found if found is None or order is None else found.rows(order)

    def num_bytes(self, name: str) -> int:
        """Return what a tensor takes in the file."""
        return self._header.tensors[self._stored[name]].num_bytes

    def decoded(self, stored: str) -> Tensor:
        """Return a tensor by llama.cpp's name, as it lies in the file."""
        tensor = self._header.tensors[stored]
        data = self._bytes(tensor)
        kind = TENSOR_TYPES[tensor.kind].name
        if kind in _PLAIN:
            return torch.from_numpy(data).view(_PLAIN[kind]).view(tensor.shape)
        return _decode(data, tensor)

    def _bytes(self, tensor: StoredTensor) -> Any:
        """Return a copy of a tensor's bytes: uint8 [num_bytes]."""
        # A map of its own: what has been read of it counts as resident until it is gone.
        return np.memmap(
            self._path,
            dtype=np.uint8,
            mode="r",
            offset=tensor.first_byte,
            shape=(tensor.num_bytes,),
        ).copy()

    def _order_of_rows(self, stored: str, num_rows: int) -> Tensor | None:
        """Return which row comes where; None where each stays.

        Raises UnsupportedModelError for rows that are no whole heads.
        """
        count = self._interleaved_heads(stored)
        if count is None:
            return None
        if num_rows % (2 * count):
            raise UnsupportedModelError(
                f"{self._path}: the tensor {stored} has {num_rows} rows, which are not {count} "
                "heads of an even size."
            )
        return _halves_of_heads(torch.arange(num_rows), count)

    def _interleaved_heads(self, stored: str) -> int | None:
        """Return how many heads a projection has whose dimensions turn in pairs of neighbours."""
        fields = self._header.fields
        part = stored.rpartition(".")[0].rpartition(".")[2]
        if fields["general.architecture"] != "llama" or part not in ("attn_q", "attn_k"):
            return None
        heads: int = fields["llama.attention.head_count"]
        return heads if part == "attn_q" else fields.get("llama.attention.head_count_kv", heads)


def tensor_names(header: GgufHeader) -> dict[str, str]:
    """Return llama.cpp's name of each tensor by transformers'; unknown ones keep their own."""
    return {_name(stored): stored for stored in header.tensors if stored != ROPE_FACTORS}


def rope_factors(path: Path, header: GgufHeader) -> list[float] | None:
    """Return the divisors of the frequencies that a file brings; None for none."""
    if ROPE_FACTORS not in header.tensors:
        return None
    tensor = header.tensors[ROPE_FACTORS]
    if TENSOR_TYPES[tensor.kind].name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise UnsupportedModelError(f"{path}: {ROPE_FACTORS} is no short list of F32 numbers.")
    found: list[float] = GgufFile(path).decoded(ROPE_FACTORS).tolist()
    if not all(math.isfinite(each) and each > 0 for each in found):
        raise UnsupportedModelError(f"{path}: {ROPE_FACTORS} holds other than positive numbers.")
    return found


def _name(stored: str) -> str:
    if stored in _WHOLE:
        return _WHOLE[stored]
    match = _LAYER.fullmatch(stored)
    if match is None or match[2] not in _PARTS:
        return stored
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def _decode(data: Any, tensor: StoredTensor) -> Tensor:
    """`data`: uint8 [num_bytes] -> float32 of the tensor's shape, by the `gguf` package."""
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as error:
        raise UnsupportedModelError(
            "quantised GGUF files need the package gguf: pip install gguf."
        ) from error
    stored = TENSOR_TYPES[tensor.kind]
    width = tensor.shape[-1]
    rows = data.reshape(-1, width // stored.block_numbers * stored.block_bytes)
    found = torch.empty((len(rows), width), dtype=torch.float32)
    rows_at_once = max(_NUMBERS_AT_ONCE // width, 1)
    for first in range(0, len(rows), rows_at_once):
        part = np.asarray(rows[first : first + rows_at_once])
        with np.errstate(all="ignore"):  # a scale that is no number is the file's own
            decoded = dequantize(part, GGMLQuantizationType(tensor.kind))
        found[first : first + rows_at_once] = torch.from_numpy(decoded)
    return found.view(tensor.shape)


def _halves_of_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Return a projection's rows so that i turns with i + head_dim / 2, not with its neighbour.

    `rows`: [num_heads * head_dim, ...]. What llama.cpp's converter does to Llama's files, undone.
    """
    heads = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
