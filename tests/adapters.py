"""LoRA adapters with random A and B, in PEFT's layout, and models with their weights merged."""

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.engine.request import AdapterRef
from outrider.verifier.params import Tier

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(  # noqa: PLR0913 - every choice, with defaults
    folder: Path,
    base: PreTrainedModel,
    *,
    seed: int,
    rank: int = 8,
    alpha: float = 16,
    modules: Iterable[str] = ALL_MODULES,
    strength: float = 0.3,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an adapter that changes a layer's weights by `strength` of their own deviation."""
    generator = torch.Generator().manual_seed(seed)
    own = dict(config or {})
    scale = alpha / (rank**0.5 if own.get("use_rslora") else rank)
    tensors: dict[str, Tensor] = {}
    for name, module in base.named_modules():
        if not isinstance(module, nn.Linear) or name.rsplit(".", 1)[-1] not in tuple(modules):
            continue
        own_rank = own.get("rank_pattern", {}).get(name.rsplit(".", 1)[-1], rank)
        out_features, in_features = module.weight.shape
        a = torch.randn(own_rank, in_features, generator=generator)
        b = torch.randn(out_features, own_rank, generator=generator)
        deviation = module.weight.detach().float().std().item()
        b *= strength * deviation / (scale * own_rank**0.5)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    write_adapter(folder, tensors, {"r": rank, "lora_alpha": alpha, **own}, modules)
    return folder


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    modules: Iterable[str] = ALL_MODULES,
) -> None:
    """Write both files as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, _weights(folder))
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "target_modules": list(modules),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def _weights(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


def merged(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of the base whose weights have an adapter's products in them."""
    config = json.loads((folder / "adapter_config.json").read_text())
    model = copy.deepcopy(base)
    tensors = load_file(_weights(folder))
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
        assert isinstance(module, nn.Linear)
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        rank = a.shape[0]
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        with torch.no_grad():
            module.weight += scale * (b.float() @ a.float()).to(module.weight.dtype)
    return model


def adapter_ref(folder: Path, *, tier: Tier = "large", version: str = "") -> AdapterRef:
    return AdapterRef(name=folder.name, tier=tier, folder=str(folder), version=version)
