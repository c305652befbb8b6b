"""Checkpoints with weights in packed whole numbers, made of plain ones."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.kernels.quantised.weight import Bits, rounded_to_int4, rounded_to_int8

_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Pack numbers [n, m], signed, into int32 [n, m * bits / 32] as compressed-tensors does."""
    per_word = _WORD_BITS // bits
    unsigned = (codes.long() + (1 << (bits - 1))).view(len(codes), -1, per_word)
    words = (unsigned << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def store_quantised(plain: Path, folder: Path, bits: Bits, *, group_size: int = 32) -> None:
    """Write a checkpoint's copy whose projections have 4 bits in groups, or 8 bits by row."""
    weights: dict[str, object] = {"num_bits": bits, "type": "int"}
    options = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    _store(plain, folder, partial(_packed_parts, bits=bits, group_size=group_size), options)


def store_awq(plain: Path, folder: Path, *, group_size: int = 32) -> None:
    """Write a checkpoint's copy whose projections have 4 bits in groups, as AutoAWQ stores them."""
    options = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": group_size}
    _store(plain, folder, partial(_awq_parts, group_size=group_size), options)


def _store(
    plain: Path, folder: Path, parts: Callable[[Tensor], dict[str, Tensor]], options: object
) -> None:
    """Write a checkpoint's copy, each projection in parts."""
    shutil.copytree(plain, folder)
    for file in folder.glob("*.safetensors"):
        stored: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            if name.endswith("_proj.weight"):
                stem = name.removesuffix("weight")
                stored |= {f"{stem}{part}": tensor for part, tensor in parts(weight).items()}
            else:
                stored[name] = weight
        save_file(stored, file, metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": options}))


def _packed_parts(weight: Tensor, *, bits: Bits, group_size: int) -> dict[str, Tensor]:
    found = rounded_to_int4(weight, group_size=group_size) if bits == 4 else rounded_to_int8(weight)
    return {
        "weight_packed": words_of(found.codes, bits),
        "weight_scale": found.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _awq_parts(weight: Tensor, *, group_size: int) -> dict[str, Tensor]:
    grouped = weight.float().view(len(weight), -1, group_size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / 15).clamp(min=1e-5).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1)
    return {
        "qweight": _awq_words(codes.T),
        "qzeros": _awq_words(zeros.T),
        "scales": scales.T.contiguous().half(),
    }


def _awq_words(codes: Tensor) -> Tensor:
    """Pack numbers from 0 to 15 in AWQ's order; `words_of` takes signed ones."""
    return words_of(codes.reshape(len(codes), -1, 8)[..., _AWQ_ORDER].flatten(-2) - 8, 4)
