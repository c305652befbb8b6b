"""Checkpoints with one lie in a header or a tensor, as damage or an attacker would leave them."""

import json
import random
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_DTYPES: Final = ("F32", "F16", "I32", "I64", "U8", "BOOL", "F64", "F8_E4M3", "F4", "X", "", None)
_NUMBERS: Final = (0, 1, -1, 3, 64, 2**31, 2**62, 2**63, 2**64, 10**30, 1.5, "1", None, True, [])
_TORCH_DTYPES: Final = (
    *(torch.float32, torch.float16, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool),
    *(torch.float64, torch.float8_e4m3fn, torch.int16, torch.complex64, torch.uint64),
)
_FLOATS: Final = (float("nan"), float("inf"), 3e38, 0.0, -0.0, 1e-45)
_LENGTH_BYTES: Final = 8


def damage(file: Path, rng: random.Random) -> str:
    """Put one lie into a whole safetensors file; returns what it is."""
    if rng.random() < 0.5:
        return _damage_tensor(file, rng)
    data = file.read_bytes()
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if rng.random() < 0.3:
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            changed[rng.randrange(end)] = rng.randrange(256)
        file.write_bytes(changed)
        return "bytes of the header"
    header = json.loads(data[_LENGTH_BYTES:end])
    told = _damage_header(header, rng)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(_LENGTH_BYTES, "little") + text + data[end:])
    return told


def _damage_header(header: dict[str, Any], rng: random.Random) -> str:
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry = header[name]
    begin, end = entry["data_offsets"]
    match rng.randrange(5):
        case 0:
            places = (header[other]["data_offsets"], [rng.choice(_NUMBERS) for _ in range(2)])
            entry["data_offsets"] = rng.choice([*places, [begin, end + 2**40], [], None])
        case 1:
            entry["dtype"] = rng.choice(_DTYPES)
        case 2:
            shapes = ([rng.choice(_NUMBERS)] * rng.randrange(5), entry["shape"][::-1], [2**40] * 2)
            entry["shape"] = rng.choice([*shapes, [*entry["shape"], 1], None])
        case 3:
            header[name], header[other] = header[other], entry
        case _:
            header[f"{name}x"] = header.pop(name)
    return f"header of {name}: {header.get(name)}"


def _damage_tensor(file: Path, rng: random.Random) -> str:
    tensors = load_file(file)
    name = rng.choice(list(tensors))
    changed = _other(tensors.pop(name), rng)
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, file, metadata={"format": "pt"})
    return f"{name} is {'gone' if changed is None else (changed.dtype, changed.shape)}"


def _other(tensor: Tensor, rng: random.Random) -> Tensor | None:
    """Return another tensor in its place: of another type, shape or value; None for none."""
    match rng.randrange(7):
        case 0:
            return None
        case 1:
            return tensor.to(rng.choice(_TORCH_DTYPES))
        case 2:
            return tensor.flatten().contiguous()
        case 3:
            return tensor[None].contiguous()
        case 4 if tensor.dim():
            rows = len(tensor)
            count = rng.choice((0, 1, rows // 2, rows - 1, rows + 1, 2 * rows))
            return tensor[torch.arange(count) % rows].contiguous()
        case 5 if tensor.dim() == 2:
            return tensor.T.contiguous()
        case _:
            return _with_value(tensor, rng)


def _with_value(tensor: Tensor, rng: random.Random) -> Tensor:
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype == torch.bool:
        value = torch.tensor(rng.choice(_FLOATS)).to(dtype)
    else:
        info = torch.iinfo(dtype)
        value = torch.tensor(rng.choice((info.min, info.max, min(info.max, 131))), dtype=dtype)
    changed = tensor.clone().flatten()
    changed[rng.randrange(len(changed)) if rng.random() < 0.5 else slice(None)] = value
    return changed.view(tensor.shape)
