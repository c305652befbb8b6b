"""Read a LoRA adapter in PEFT's layout for a loaded model; nothing of the files is trusted.

Both files are read once, whole, within bounds that are checked before; what is hashed is what is
used, whatever becomes of the folder.
"""

import hashlib
import json
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from outrider.engine.adapters.peft_config import LoraScales, read_scales
from outrider.engine.errors import InvalidAdapterError
from outrider.engine.events import AdapterInfo
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.lora_modules import LoraModule, lora_modules, num_sites
from outrider.engine.model.shard import Shard
from outrider.engine.model.shard_reader import Cuts
from outrider.kernels.layers.lora import LoraPart, LoraWeights

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_HEADER_BYTES: Final = 8 << 20
_LENGTH_BYTES: Final = 8  # of the header's length, in front of it
_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of a module below the model itself, whatever wrappers PEFT or a text part put in front.
_NAME: Final = re.compile(
    r"(?:base_model\.model\.)?(?:model\.|language_model\.)*(layers\.\d+\..+)\.lora_([AB])\.weight"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter's weights, and what there is to tell of them."""

    weights: LoraWeights
    info: AdapterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor in the file."""

    dtype: torch.dtype
    shape: tuple[int, int]
    begin: int
    end: int


def read_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_bytes: int,
) -> Adapter:
    """Read an adapter for a model of this config; `max_bytes`: of its weights as they are kept.

    Raises InvalidAdapterError for an adapter of another base, for what is more than low-rank
    products, and for files that are missing, cut short or too large.
    """
    file = read_adapter_file(folder, config, dtype=dtype, max_bytes=max_bytes)
    return Adapter(weights=file.weights(config, device), info=file.info)


def read_adapter_file(
    folder: Path, config: ModelConfig, *, dtype: torch.dtype, max_bytes: int
) -> "AdapterFile":
    """Read an adapter's files for a model of this config, and check them; see `read_adapter`."""
    try:
        return _read(folder, config, dtype=dtype, max_bytes=max_bytes)
    except InvalidAdapterError as error:
        raise InvalidAdapterError(f"{folder}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter's tensors, checked, as PEFT stores them.

    All are on the CPU, of the type that they are kept in.
    """

    modules: dict[str, tuple[Tensor, Tensor, float]]
    """A and B of each module, and its scale."""
    digest: str
    """The digest of all files together."""

    def weights(self, config: ModelConfig, device: torch.device) -> LoraWeights:
        """Return the products of a model of this config."""
        modules = lora_modules(config)
        sites: list[list[LoraPart]] = [[] for _ in range(num_sites(config))]
        for name in sorted(self.modules, key=lambda name: modules[name].start):
            (a, b, scale), module = self.modules[name], modules[name]
            if module.order is not None:
                b = b.index_select(0, module.order)
            part = LoraPart(
                a=a.to(device).contiguous(),
                b=b.T.to(device).contiguous(),
                start=module.start,
                scale=scale,
            )
            sites[module.site].append(part)
        return LoraWeights(sites, digest=self.digest)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(a.nbytes + b.nbytes for a, b, _ in self.modules.values())

    @property
    def info(self) -> AdapterInfo:
        """Describe it."""
        return AdapterInfo(
            digest=self.digest,
            num_bytes=self.num_bytes,
            max_rank=max(a.shape[0] for a, _, _ in self.modules.values()),
            num_modules=len(self.modules),
        )

    def share(self, config: ModelConfig, shard: Shard) -> "AdapterFile":
        """Return the rank's part: of outputs that are cut B's rows, of inputs A's columns.

        `config`: of the whole model.
        """
        cuts, own = Cuts(config, shard), {}
        for name, (a, b, scale) in self.modules.items():
            cut = cuts(f"model.{name}.weight")
            assert cut is not None, "every projection is cut"
            own[name] = (a, cut.of(b), scale) if cut.dim == 0 else (cut.of(a), b, scale)
        return AdapterFile(modules=own, digest=self.digest)


def _read(folder: Path, config: ModelConfig, *, dtype: torch.dtype, max_bytes: int) -> AdapterFile:
    modules = lora_modules(config)
    if not modules:
        raise InvalidAdapterError(
            f"{config.model_id} is run by transformers' own modules or has recurrent layers; such "
            "models take no adapters here"
        )
    settings = _content(folder / CONFIG_FILE, _MAX_CONFIG_BYTES)
    scales = read_scales(settings)
    # Stored numbers may be wider than those that are kept.
    limit = max_bytes * 4 // dtype.itemsize + _MAX_HEADER_BYTES
    content = _content(folder / WEIGHTS_FILE, limit)
    stored = _stored_tensors(content)
    pairs = _pairs(stored, modules)
    num_bytes = sum(math.prod(each.shape) for each in stored.values()) * dtype.itemsize
    if num_bytes > max_bytes:
        raise InvalidAdapterError(
            f"its weights take {num_bytes} bytes; adapters may have {max_bytes} together "
            "(adapters.memory_mib)"
        )
    found = {}
    for name, (stored_a, stored_b) in pairs.items():
        scale = _check_shapes(name, modules[name], stored_a, stored_b, scales)
        a, b = (_tensor(content, each).to(dtype) for each in (stored_a, stored_b))
        if not bool(a.isfinite().all() and b.isfinite().all()):
            raise InvalidAdapterError(f"{name} has weights that are not finite in {dtype}")
        found[name] = (a, b, scale)
    digest = hashlib.blake2b(digest_size=16)
    for each in (settings, content):
        digest.update(len(each).to_bytes(8, "little") + each)
    return AdapterFile(modules=found, digest=digest.hexdigest())


def _content(path: Path, max_bytes: int) -> bytes:
    """Return a regular file's content; nothing is read of one that is too large."""
    try:
        # Not to wait for a pipe's other end.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidAdapterError(f"{path.name} is not a regular file")
            if status.st_size > max_bytes:
                raise InvalidAdapterError(
                    f"{path.name} has {status.st_size} bytes; at most {max_bytes} are read here"
                )
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidAdapterError(f"{path.name} cannot be read ({reason})") from None
    if len(content) > max_bytes:
        raise InvalidAdapterError(f"{path.name} grew while it was read")
    return content


def _stored_tensors(content: bytes) -> dict[str, _Stored]:
    """Return the tensors that a safetensors file holds, checked against its size."""
    size = int.from_bytes(content[:_LENGTH_BYTES], "little")
    first = _LENGTH_BYTES + size
    if len(content) < _LENGTH_BYTES or size > _MAX_HEADER_BYTES or first > len(content):
        raise InvalidAdapterError(f"{WEIGHTS_FILE} is no safetensors file, or is cut short")
    try:
        header = json.loads(content[_LENGTH_BYTES:first])
    except (ValueError, RecursionError):
        raise InvalidAdapterError(f"{WEIGHTS_FILE} has a broken header") from None
    if not isinstance(header, dict):
        raise InvalidAdapterError(f"{WEIGHTS_FILE} has a broken header")
    header.pop("__metadata__", None)
    return {name: _stored(name, entry, first, len(content)) for name, entry in header.items()}


def _stored(name: str, entry: Any, first: int, num_bytes: int) -> _Stored:
    """Check one entry of the header."""
    try:
        dtype = _DTYPES[entry["dtype"]]
        rows, columns = entry["shape"]
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise InvalidAdapterError(
            f"{name[:200]} is no matrix of F32, F16 or BF16 numbers"
        ) from None
    numbers = (rows, columns, begin, end)
    if not all(type(each) is int and 0 <= each <= num_bytes for each in numbers):
        raise InvalidAdapterError(f"{name[:200]} has a shape or a place that cannot be")
    if end - begin != rows * columns * dtype.itemsize or first + end > num_bytes:
        raise InvalidAdapterError(f"{name[:200]} is cut short, or the file's header is wrong")
    return _Stored(dtype=dtype, shape=(rows, columns), begin=first + begin, end=first + end)


def _pairs(
    stored: dict[str, _Stored], modules: dict[str, LoraModule]
) -> dict[str, tuple[_Stored, _Stored]]:
    """Return A and B of each changed module, by the module's name."""
    found: dict[str, dict[str, _Stored]] = {}
    for name, each in stored.items():
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in modules:
            raise InvalidAdapterError(_unknown(name, modules))
        sides = found.setdefault(match[1], {})
        if match[2] in sides:
            raise InvalidAdapterError(f"{name[:200]} is there twice")
        sides[match[2]] = each
    for name, sides in found.items():
        if len(sides) < 2:
            missing = "B" if "A" in sides else "A"
            raise InvalidAdapterError(f"{name}: lora_{missing} is missing")
    if not found:
        raise InvalidAdapterError(f"{WEIGHTS_FILE} holds no low-rank products")
    return {name: (sides["A"], sides["B"]) for name, sides in found.items()}


def _unknown(name: str, modules: dict[str, LoraModule]) -> str:
    kinds = sorted({module.split(".", 2)[2] for module in modules})
    num_layers = 1 + max(int(module.split(".")[1]) for module in modules)
    return (
        f"it changes {name[:200]}, which this base does not have or which adapters may not change; "
        f"they may change {', '.join(kinds)} of {num_layers} layers (no embeddings, heads, norms, "
        "routers or experts)"
    )


def _check_shapes(
    name: str, module: LoraModule, a: _Stored, b: _Stored, scales: LoraScales
) -> float:
    """Return the module's scale. Raises InvalidAdapterError for shapes of another base or rank."""
    rank, scale = scales.of(f"model.{name}")
    if a.shape[0] != rank or b.shape[1] != rank:
        raise InvalidAdapterError(
            f"{name} has ranks {a.shape[0]} and {b.shape[1]}, {CONFIG_FILE} says {rank}"
        )
    if a.shape[1] != module.width or b.shape[0] != module.size:
        raise InvalidAdapterError(
            f"{name} maps {a.shape[1]} features to {b.shape[0]}, in this base {module.width} to "
            f"{module.size}: the adapter belongs to another one"
        )
    return scale


def _tensor(content: bytes, stored: _Stored) -> Tensor:
    """Return a matrix of its own, in the stored type."""
    raw = bytearray(content[stored.begin : stored.end])
    return torch.frombuffer(raw, dtype=stored.dtype).view(stored.shape)
