"""Random heads as training tools write them, and their published forward passes in plain torch."""

import json
import math
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from outrider.engine.model.decoder import DecoderModel
from tests.models import save_hf_model

HIDDEN: Final = 64  # of the targets of `tests.models`
VOCAB: Final = 131
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
EPS: Final = 1e-5

Weights = dict[str, Tensor]


def make_target(folder: Path, name: str = "llama") -> DecoderModel:
    """A random large model: three layers, 64 numbers a row, 131 tokens."""
    save_hf_model(name, folder)
    return DecoderModel.load(str(folder))


def eagle3_weights(
    *,
    num_tokens: int = 50,
    width: int = HIDDEN,
    num_layers: int = 1,
    qk_norm: bool = False,
    own_embedding: bool = False,
    norms: str | None = None,
    seed: int = 0,
) -> Weights:
    """Tensors of an EAGLE-3 head, as speculators names them; norms: of hidden states, if any."""
    made = _Random(seed)
    weights = {
        "fc.weight": made(width, 3 * HIDDEN),
        "norm.weight": made.norm(width),
        "lm_head.weight": made(num_tokens, width),
        "layers.0.hidden_norm.weight": made.norm(width),
    }
    for index in range(num_layers):
        reads = 2 * width if index == 0 else width
        weights |= _layer(made, f"layers.{index}.", width=width, reads=reads, qk_norm=qk_norm)
    if own_embedding:
        weights["embed_tokens.weight"] = made(VOCAB, width)
    if norms == "norm_before_fc":
        weights["input_norm.weight"] = made.norm(3 * HIDDEN)
    if norms == "fc_norm":
        weights |= {f"fc_norm.{index}.weight": made.norm(HIDDEN) for index in range(3)}
    if num_tokens < VOCAB:
        token_ids = made.choose(VOCAB, num_tokens)
        weights["d2t"] = token_ids - torch.arange(num_tokens)
        weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, token_ids, True)
    return weights


def peagle_weights(**options: Any) -> Weights:
    """Tensors of a P-EAGLE head: an EAGLE-3 head with hidden states for masks."""
    return eagle3_weights(**options) | {"mask_hidden": _Random(9)(1, 1, 3 * HIDDEN)}


def dflash_weights(*, width: int = HIDDEN, num_layers: int = 2, seed: int = 0) -> Weights:
    """Tensors of a DFlash drafter, which has the large model's tables of tokens."""
    made = _Random(seed)
    weights = {
        "fc.weight": made(width, 2 * width),
        "hidden_norm.weight": made.norm(width),
        "norm.weight": made.norm(width),
    }
    for index in range(num_layers):
        weights |= _layer(made, f"layers.{index}.", width=width, reads=width, qk_norm=True)
    return weights


def dflash_config(weights: Weights, **changes: Any) -> dict[str, Any]:
    """config.json as DFlash's authors and SpecForge write it."""
    return layer_fields(weights) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 5,
        "dflash_config": {"mask_token_id": 130, "target_layer_ids": [0, 2]},
        "num_target_layers": 3,
        **changes,
    }


def specforge_names(weights: Weights) -> Weights:
    """The names of SafeAILab's and SpecForge's files."""
    return {name.replace("layers.0.", "midlayer."): each for name, each in weights.items()}


def layer_fields(weights: Weights, **changes: Any) -> dict[str, Any]:
    """The fields of config.json that describe a head's layers."""
    width = weights["norm.weight"].numel()
    return {
        "model_type": "qwen3" if any("q_norm" in name for name in weights) else "llama",
        "hidden_size": width,
        "intermediate_size": 96,
        "num_hidden_layers": sum("q_proj" in name for name in weights),
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,  # fewer than the large model's
        "rms_norm_eps": EPS,
        "rope_theta": 500.0,
        **HEADS,
        **changes,
    }


def specforge_config(weights: Weights, **changes: Any) -> dict[str, Any]:
    """config.json as SpecForge writes it: layers are named by what they put out."""
    return layer_fields(weights) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": weights["lm_head.weight"].shape[0],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1 + tap for tap in (1, 2, 3)]},
        **changes,
    }


def speculators_config(weights: Weights, kind: str = "eagle3", **changes: Any) -> dict[str, Any]:
    """config.json as speculators 0.9 writes it."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "dtype": "float32",
        "draft_vocab_size": weights["lm_head.weight"].shape[0],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/model"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_fields(weights),
        "transformers_version": "5.17.0",
        **changes,
    }


def write_head(folder: Path, weights: Weights, config: dict[str, Any]) -> str:
    """Write a head's folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


# ---- the published forward passes -------------------------------------------------------------


def rms(rows: Tensor, weight: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * weight


def turned(heads: Tensor, positions: Tensor, theta: float = 500.0) -> Tensor:
    """Rotary embedding as Llama has it: [n, heads, size]."""
    size = heads.shape[-1]
    angles = positions[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat((f, f), -1)[:, None] for f in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor) -> Tensor:
    """Attention of [n, 4, size] over [m, 2, size]; sees: bool [n, m]."""
    key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~sees, -math.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, value).flatten(1)


def heads_of(weights: Weights, prefix: str, rows: Tensor, positions: Tensor) -> list[Tensor]:
    """Queries, keys and values of rows, turned: [n, heads, size] each."""
    found = []
    for name in "qkv":
        each = (rows @ weights[f"{prefix}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 32))
        norm = weights.get(f"{prefix}self_attn.{name}_norm.weight")
        each = each if norm is None else rms(each, norm)
        found.append(each if name == "v" else turned(each, positions))
    return found


def mlp(weights: Weights, prefix: str, rows: Tensor) -> Tensor:
    gate, up = (rows @ weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (F.silu(gate) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T


def eagle3_features(weights: Weights, taps: Tensor) -> Tensor:
    """fc, behind the norms that the file has."""
    if "input_norm.weight" in weights:
        taps = rms(taps, weights["input_norm.weight"])
    if "fc_norm.0.weight" in weights:
        pieces = taps.chunk(3, -1)
        taps = torch.cat([rms(p, weights[f"fc_norm.{i}.weight"]) for i, p in enumerate(pieces)], -1)
    return taps @ weights["fc.weight"].T


def eagle3_reference(
    weights: Weights,
    config: dict[str, Any],
    embedding: Tensor,
    token_ids: Tensor,
    features: Tensor,
    positions: Tensor,
    sees: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits and what the next level carries, of all rows; sees: bool [n, n]."""
    residual = features
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        if index == 0:
            hidden = rms(features, weights[f"{prefix}hidden_norm.weight"])
            tokens = rms(embedding[token_ids], weights[f"{prefix}input_layernorm.weight"])
            residual = hidden if config.get("norm_before_residual") else features
            rows = torch.cat((tokens, hidden), -1)
        else:
            rows = rms(residual, weights[f"{prefix}input_layernorm.weight"])
        attended = attention(*heads_of(weights, prefix, rows, positions), sees)
        residual = residual + attended @ weights[f"{prefix}self_attn.o_proj.weight"].T
        normed = rms(residual, weights[f"{prefix}post_attention_layernorm.weight"])
        residual = residual + mlp(weights, prefix, normed)
    normed = rms(residual, weights["norm.weight"])
    return normed @ weights["lm_head.weight"].T, normed if config.get("norm_output") else residual


def dflash_reference(
    weights: Weights,
    embedding: Tensor,
    taps: Tensor,
    block: Tensor,
    behind: Tensor | None = None,
    sees: Tensor | None = None,
) -> Tensor:
    """Final hidden rows of a block behind the text that the taps are of.

    behind, sees: positions and what rows see, [m] and bool [m, n + m], of blocks elsewhere in it.
    """
    text = rms(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    residual = embedding[block]
    before = torch.arange(len(text))
    behind = len(text) + torch.arange(len(block)) if behind is None else behind
    sees = torch.ones(len(block), len(text) + len(block)).bool() if sees is None else sees
    for index in range(sum("q_proj" in name for name in weights)):
        prefix = f"layers.{index}."
        normed = rms(residual, weights[f"{prefix}input_layernorm.weight"])
        query, *own = heads_of(weights, prefix, normed, behind)
        _, *of_text = heads_of(weights, prefix, text, before)
        key, value = (torch.cat(both) for both in zip(of_text, own, strict=True))
        attended = attention(query, key, value, sees)
        residual = residual + attended @ weights[f"{prefix}self_attn.o_proj.weight"].T
        normed = rms(residual, weights[f"{prefix}post_attention_layernorm.weight"])
        residual = residual + mlp(weights, prefix, normed)
    return rms(residual, weights["norm.weight"])


def _layer(made: "_Random", prefix: str, *, width: int, reads: int, qk_norm: bool) -> Weights:
    """A layer's tensors; reads: the width of what its attention reads."""
    inner, size = 96, HEADS["head_dim"]
    weights = {
        "input_layernorm.weight": made.norm(width),
        "post_attention_layernorm.weight": made.norm(width),
        "self_attn.q_proj.weight": made(4 * size, reads),
        "self_attn.k_proj.weight": made(2 * size, reads),
        "self_attn.v_proj.weight": made(2 * size, reads),
        "self_attn.o_proj.weight": made(width, 4 * size),
        "mlp.gate_proj.weight": made(inner, width),
        "mlp.up_proj.weight": made(inner, width),
        "mlp.down_proj.weight": made(width, inner),
    }
    if qk_norm:
        weights |= {f"self_attn.{name}_norm.weight": made.norm(size) for name in "qk"}
    return {f"{prefix}{name}": each for name, each in weights.items()}


class _Random:
    """Random tensors of one stream, as wide apart as attention needs to differ."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return 0.2 * torch.randn(shape, generator=self._generator)

    def norm(self, width: int) -> Tensor:
        return 1.0 + 0.3 * torch.randn(width, generator=self._generator)

    def choose(self, num_of: int, count: int) -> Tensor:
        return torch.randperm(num_of, generator=self._generator)[:count].sort().values
