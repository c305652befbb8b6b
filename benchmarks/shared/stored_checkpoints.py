"""Checkpoints with weights in packed whole numbers, made of plain ones."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.kernels.quantised.weight import Bits, rounded_to_int4, rounded_to_int8

_WORD_BITS = 32


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Pack numbers [n, m], signed, into int32 [n, m * bits / 32] as compressed-tensors does."""
    per_word = _WORD_BITS // bits
    unsigned = (codes.long() + (1 << (bits - 1))).view(len(codes), -1, per_word)
    words = (unsigned << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def store_quantised(plain: Path, folder: Path, bits: Bits, *, group_size: int = 32) -> None:
    """Write a checkpoint's copy whose projections have 4 bits in groups, or 8 bits by row."""
    shutil.copytree(plain, folder)
    for file in folder.glob("*.safetensors"):
        _store_file(file, bits, group_size)
    path = folder / "config.json"
    weights: dict[str, object] = {"num_bits": bits, "type": "int"}
    options = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": options}))


def _store_file(file: Path, bits: Bits, group_size: int) -> None:
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(file).items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        stem = name.removesuffix("weight")
        found = (
            rounded_to_int4(weight, group_size=group_size) if bits == 4 else rounded_to_int8(weight)
        )
        stored |= {
            f"{stem}weight_packed": words_of(found.codes, bits),
            f"{stem}weight_scale": found.scales.bfloat16(),
            f"{stem}weight_shape": torch.tensor(weight.shape),
        }
    save_file(stored, file, metadata={"format": "pt"})
