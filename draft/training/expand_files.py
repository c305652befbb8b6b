"""Checkpoint folders: tensors read one at a time, and written in shards of bounded size."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

EXPANDABLE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_MAX_SHARD_BYTES = 2**30


class ExpandError(ValueError):
    """The checkpoint or the shape asked for cannot be expanded. The message says why."""


class Checkpoint:
    """Read access to the tensors of a folder, single or sharded safetensors, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                self._files.update(dict.fromkeys(tensors.keys(), file))
        if not self._files:
            raise ExpandError(f"{folder} holds no safetensors")
        if self.config.get("model_type") not in EXPANDABLE_TYPES:
            raise ExpandError(
                f"model_type {self.config.get('model_type')} is not {EXPANDABLE_TYPES}"
            )
        self.head_dim = int(
            self.config.get("head_dim")
            or self.config["hidden_size"] // self.config["num_attention_heads"]
        )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in the dtype of the file."""
        with safe_open(self._files[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor


def write_shards(out: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Hold one shard at a time; name the files when their number is known."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, out / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        size_bytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size_bytes > _MAX_SHARD_BYTES:
            flush()
            pending_bytes = 0
        pending[name] = tensor.contiguous()
        pending_bytes += size_bytes
        total_bytes += size_bytes
    flush()
    if len(shards) == 1:
        (out / "part-0.safetensors").rename(out / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (out / f"part-{index}.safetensors").rename(out / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index_file = out / "model.safetensors.index.json"
    index_file.write_text(
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2)
    )
