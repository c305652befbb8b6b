"""Grow a trained checkpoint to any larger shape without changing what it computes.

The shipped pair is small: grown, it has the *cost* of larger models with the answers and the
*acceptance* of a pair that was really trained.

Method (Net2Net: Chen et al., ICLR 2016; LLaMA Pro: Wu et al., 2024). What is added cannot reach the
output, and is random wherever it need not be zero, so nothing can be skipped:

- width: the residual stream gets channels that are always zero. The embedding and the projections
  that write into the stream (o_proj, down_proj) have zeros there; everything that reads them is
  random. RMSNorm would see a smaller mean square over more channels, so the stream is scaled by
  s = sqrt(new / old), which keeps the mean square and with it eps, and norm weights by 1/s. (An
  unscaled stream with a smaller eps is the same in exact arithmetic, but Qwen3's norms of queries
  and keys share the config's eps.) Tied embeddings: the final norm takes another 1/s.
- heads and MLP units: new ones are random, their columns in o_proj and down_proj are zero. Each old
  query head stays with its old key-value head, which is repeated if groups become smaller.
- depth: new layers are spread between the old ones; their o_proj and down_proj are zero.

If s is a power of two (width times 4, 16 ...), scaling is exact in every dtype and the weights
survive bf16 without another rounding; any other width is exact in fp32 only up to rounding, so
write float32 there if logits are to agree to 1e-5. `shape_for_parameters` picks such a width.

`python -m benchmarks.shared.expand` does it from the command line, and compares the logits.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.draft.training.expand_files import Checkpoint, ExpandError, write_shards
from outrider.draft.training.expand_shape import Shape

# What a projection reads and writes: hidden (the residual stream), query, key (key-value heads) or
# unit (MLP).
_READERS = {
    "self_attn.q_proj": "query",
    "self_attn.k_proj": "key",
    "self_attn.v_proj": "key",
    "mlp.gate_proj": "unit",
    "mlp.up_proj": "unit",
}
_WRITERS = {"self_attn.o_proj": "query", "mlp.down_proj": "unit"}
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownAxis:
    """Growth of an axis."""

    size: int
    places: torch.Tensor
    """Its new place, for each entry of `sources`."""
    sources: torch.Tensor
    """The old entry that stands at that place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPlan:
    """Everything that decides a tensor of the new checkpoint, apart from the old tensor."""

    axes: dict[str, GrownAxis]
    """By the names hidden, query, key, unit."""
    layers: tuple[int | None, ...]
    """The old layer that each new layer is; None for an added one."""
    stream_scale: float
    """s of the module's docstring."""
    head_dim: int
    is_tied: bool
    dtype: torch.dtype
    seed: int


def expand(
    source: Path,
    out: Path,
    shape: Shape,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    track: Callable[[range], Iterable[int]] = iter,
) -> None:
    """Write the grown checkpoint with config, tokenizer and generation config to `out`.

    `dtype`: None keeps the source's. `track` is given the layers' numbers and may show progress.
    Raises ExpandError if the shape is smaller anywhere.
    """
    checkpoint = Checkpoint(source)
    if out.exists() and any(out.iterdir()):
        raise ExpandError(f"{out} is not empty")
    dtype = dtype or checkpoint.tensor(checkpoint.names[0]).dtype
    plan = _plan(checkpoint, shape, dtype=dtype, seed=seed)
    _check_names(checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(file, out / file.name)
    config = _new_config(checkpoint, shape, plan)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_shards(out, _tensors(checkpoint, plan, track))


def _plan(checkpoint: Checkpoint, shape: Shape, *, dtype: torch.dtype, seed: int) -> GrowthPlan:
    old = Shape.of(checkpoint.config)
    for name in ("hidden_size", "num_layers", "intermediate_size", "num_heads", "num_kv_heads"):
        if getattr(shape, name) < getattr(old, name):
            raise ExpandError(
                f"{name}={getattr(shape, name)} is below the checkpoint's {getattr(old, name)}"
            )
    query_heads, key_heads = _head_places(old, shape)
    if shape.hidden_size % shape.num_heads:
        # Not needed when head_dim is given, but transformers refuses such a config.
        raise ExpandError(
            f"hidden_size={shape.hidden_size} is not a multiple of num_heads={shape.num_heads}"
        )
    return GrowthPlan(
        axes={
            "hidden": _prefix_axis(old.hidden_size, shape.hidden_size),
            "unit": _prefix_axis(old.intermediate_size, shape.intermediate_size),
            "query": _head_axis(query_heads, shape.num_heads, checkpoint.head_dim),
            "key": _head_axis(key_heads, shape.num_kv_heads, checkpoint.head_dim),
        },
        layers=spread(old.num_layers, shape.num_layers),
        stream_scale=math.sqrt(shape.hidden_size / old.hidden_size),
        head_dim=checkpoint.head_dim,
        is_tied="lm_head.weight" not in checkpoint,
        dtype=dtype,
        seed=seed,
    )


def _head_places(old: Shape, new: Shape) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(old head, new head) of query heads and of key-value heads.

    Query head h reads key-value head h // (num_heads / num_kv_heads), before and after.
    """
    if new.num_heads % new.num_kv_heads:
        raise ExpandError(f"{new.num_heads} heads do not divide into {new.num_kv_heads} groups")
    old_group, new_group = old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads
    copies = -(-old_group // new_group)
    if old.num_kv_heads * copies > new.num_kv_heads:
        raise ExpandError(
            f"{old.num_kv_heads} groups of {old_group} query heads do not fit into "
            f"{new.num_kv_heads} groups of {new_group}"
        )
    query_heads = []
    for head in range(old.num_heads):
        key_head, member = divmod(head, old_group)
        copy, place = divmod(member, new_group)
        query_heads.append((head, (key_head * copies + copy) * new_group + place))
    key_heads = [(place // copies, place) for place in range(old.num_kv_heads * copies)]
    return query_heads, key_heads


def _prefix_axis(old_size: int, new_size: int) -> GrownAxis:
    places = torch.arange(old_size)
    return GrownAxis(size=new_size, places=places, sources=places)


def _head_axis(heads: list[tuple[int, int]], num_heads: int, head_dim: int) -> GrownAxis:
    channels = torch.arange(head_dim)
    sources = torch.cat([old * head_dim + channels for old, _ in heads])
    places = torch.cat([new * head_dim + channels for _, new in heads])
    return GrownAxis(size=num_heads * head_dim, places=places, sources=sources)


def spread(num_old: int, num_new: int) -> tuple[int | None, ...]:
    """Return the old layer that each new one is, in order, evenly between added ones (None)."""
    layers: list[int | None] = [None] * num_new
    for old in range(num_old):
        layers[old * num_new // num_old] = old
    return tuple(layers)


def _tensors(
    checkpoint: Checkpoint, plan: GrowthPlan, track: Callable[[range], Iterable[int]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every tensor of the new checkpoint, one layer after the other."""
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    hidden = plan.axes["hidden"]
    grown = torch.zeros(len(embedding), hidden.size)
    grown[:, hidden.places] = embedding.float() * plan.stream_scale
    yield "model.embed_tokens.weight", grown.to(plan.dtype)
    for layer in track(range(len(plan.layers))):
        for name in _layer_names(checkpoint):
            yield f"model.layers.{layer}.{name}", _layer_tensor(checkpoint, plan, layer, name)
    norm = _grown_norm(plan, "model.norm.weight", checkpoint.tensor("model.norm.weight"))
    if plan.is_tied:
        norm[hidden.places] /= plan.stream_scale
    yield "model.norm.weight", norm.to(plan.dtype)
    if not plan.is_tied:
        head = checkpoint.tensor("lm_head.weight").float()
        grown = _random(plan, "lm_head.weight", (len(head), hidden.size))
        grown[:, hidden.places] = head
        yield "lm_head.weight", grown.to(plan.dtype)


def _layer_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    prefix = "model.layers.0."
    return tuple(name.removeprefix(prefix) for name in checkpoint.names if name.startswith(prefix))


def _layer_tensor(checkpoint: Checkpoint, plan: GrowthPlan, layer: int, name: str) -> torch.Tensor:
    """One tensor of one new layer; for an added layer there is no old one."""
    source = plan.layers[layer]
    old = None if source is None else checkpoint.tensor(f"model.layers.{source}.{name}").float()
    module, _, kind = name.rpartition(".")
    key = f"model.layers.{layer}.{name}"
    hidden = plan.axes["hidden"]
    if module in _LAYER_NORMS:
        new = _grown_norm(plan, key, old)
    elif module in _HEAD_NORMS:
        new = old if old is not None else 1.0 + 0.1 * _normal(plan, key, (plan.head_dim,))
    elif module in _READERS:
        axis = plan.axes[_READERS[module]]
        if kind == "bias":
            new = 0.02 * _normal(plan, key, (axis.size,))
            if old is not None:
                new[axis.places] = old[axis.sources]
        else:
            new = _random(plan, key, (axis.size, hidden.size))
            if old is not None:
                new[axis.places[:, None], hidden.places] = old[axis.sources]
    else:
        axis = plan.axes[_WRITERS[module]]
        new = torch.zeros(hidden.size) if kind == "bias" else torch.zeros(hidden.size, axis.size)
        if old is not None and kind == "bias":
            new[hidden.places] = old * plan.stream_scale
        elif old is not None:
            # A repeated key-value head does not repeat its query heads: each column occurs once.
            new[hidden.places[:, None], axis.places] = old[:, axis.sources] * plan.stream_scale
    return new.to(plan.dtype)


def _grown_norm(plan: GrowthPlan, key: str, old: torch.Tensor | None) -> torch.Tensor:
    hidden = plan.axes["hidden"]
    new = 1.0 + 0.1 * _normal(plan, key, (hidden.size,))
    if old is not None:
        new[hidden.places] = old.float() / plan.stream_scale
    return new


def _random(plan: GrowthPlan, key: str, shape: tuple[int, int]) -> torch.Tensor:
    """Draw weights of a size that keeps activations of order one."""
    return _normal(plan, key, shape) / math.sqrt(shape[1])


def _normal(plan: GrowthPlan, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal numbers that depend on the seed and the tensor's name only."""
    digest = hashlib.sha256(f"{plan.seed}/{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator)


def _check_names(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with tensors that would be lost."""
    known = {*_READERS, *_WRITERS, *_LAYER_NORMS, *_HEAD_NORMS}
    outer = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for name in checkpoint.names:
        parts = name.split(".")
        is_layer = parts[:2] == ["model", "layers"] and ".".join(parts[3:-1]) in known
        if name not in outer and not is_layer:
            raise ExpandError(f"tensor {name} is not one of a Llama-family model")


def _new_config(checkpoint: Checkpoint, shape: Shape, plan: GrowthPlan) -> dict[str, Any]:
    config = dict(checkpoint.config)
    config.pop("torch_dtype", None)
    config |= {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": checkpoint.head_dim,
        "tie_word_embeddings": plan.is_tied,
        "dtype": str(plan.dtype).removeprefix("torch."),
    }
    kinds = checkpoint.config.get("layer_types")
    if kinds:
        # An added layer attends like the old one before it; the first is always an old one.
        latest, grown = 0, []
        for source in plan.layers:
            latest = latest if source is None else source
            grown.append(kinds[latest])
        config["layer_types"] = grown
    return config
