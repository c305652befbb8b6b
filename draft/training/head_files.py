"""Heads on disk: what they take from the large model's checkpoint, and the files they become.

EAGLE-3 heads are written as SpecForge and SafeAILab publish them, MTP modules, which stand alone
here, as speculators does.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.draft.training.distill import DistillError
from outrider.draft.training.head_model import HeadSizes, TargetEnds, TrainedHead, TrainedHeadKind
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.decoder import DTYPES
from outrider.engine.model.fingerprint import checkpoint_fingerprint
from outrider.engine.model.read_config import read_model_config
from outrider.engine.model.weights import CheckpointReader

DEFAULT_DRAFT_VOCAB = 32000
_WIDE = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
_SPECULATORS = {
    "fc": "input_proj",
    "pre_fc_norm_embedding": "token_layernorm",
    "pre_fc_norm_hidden": "hidden_layernorm",
    "norm": "final_layernorm",
}
_FROM_TARGET = {"hidden_norm.weight": "input_layernorm.weight"}
# Of what stands beside copied weights, in parts of what it is at random.
_BESIDE = 0.3


def default_taps(kind: TrainedHeadKind, num_layers: int) -> tuple[int, ...]:
    """The hidden states that a head reads: EAGLE-3's low, middle and high one; the last for MTP.

    vLLM and SGLang read the same three where a config names none.
    """
    if kind == "mtp":
        return (num_layers,)
    if num_layers < 6:  # the usual ones would coincide or not exist
        first = max(0, min(1, num_layers - 3))
        return tuple(sorted({first, first + 1, num_layers - 1}))
    return (2, num_layers // 2, num_layers - 3)


def head_sizes(kind: TrainedHeadKind, target: ModelConfig, draft_vocab_size: int) -> HeadSizes:
    """The sizes of a head: a plain layer as wide as the large model's."""
    is_dense_beside_experts = kind == "eagle3" and any(layer.is_sparse for layer in target.layers)
    return HeadSizes(
        hidden_size=target.hidden_size,
        num_heads=target.num_query_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        # An MTP file says its sizes by the large model's config, an EAGLE-3 one by its own.
        mlp_size=3 * target.hidden_size if is_dense_beside_experts else target.intermediate_size,
        draft_vocab_size=draft_vocab_size,
        tap_layers=default_taps(kind, target.num_layers),
        rope_theta=target.layers[0].rope.theta,
        norm_eps=target.norm_eps,
        has_head_norms=kind == "mtp" and target.qk_norm == "head",
    )


def read_target_ends(folder: Path) -> TargetEnds:
    """The large model's token vectors, last norm and output matrix, decoded where quantised."""
    config = read_model_config(folder)
    shape = (config.vocab_size, config.hidden_size)
    with CheckpointReader(
        folder,
        dtype=DTYPES.get(config.dtype, torch.float32),
        text_only=config.is_text_part,
        weight_format=config.weight_format,
    ) as reader:
        embedding = reader.read("model.embed_tokens.weight", shape)
        is_tied = config.tie_word_embeddings
        return TargetEnds(
            embedding=embedding,
            norm=reader.read("model.norm.weight", shape[1:]).float() + config.norm_offset,
            head=embedding if is_tied else reader.read("lm_head.weight", shape),
        )


def begin_from_target(head: TrainedHead, folder: Path) -> None:
    """Copy the large model's last layer into the head's, as far as it has such parts.

    A layer that knows the hidden states learns faster than a random one. What reads token vectors
    beside them begins at random, and small.
    """
    config = read_model_config(folder)
    prefix = f"model.layers.{config.num_layers - 1}."
    width = config.hidden_size
    layer = head.layer
    with (
        torch.no_grad(),
        CheckpointReader(
            folder,
            dtype=torch.float32,
            text_only=config.is_text_part,
            weight_format=config.weight_format,
        ) as reader,
    ):
        for name, weight in layer.named_parameters():
            stored = prefix + _FROM_TARGET.get(name, name)
            if stored not in reader or (name, head.kind) == ("input_layernorm.weight", "eagle3"):
                continue
            is_wide = name in _WIDE and head.kind == "eagle3"
            try:
                found = reader.read(stored, (len(weight), width) if is_wide else weight.shape)
            except UnsupportedModelError:
                continue  # a part of another shape, as gated queries are
            if is_wide:
                weight[:, :width] *= _BESIDE
                weight[:, width:] = found
            else:
                weight.copy_(found + config.norm_offset if weight.ndim == 1 else found)


def write_head(head: TrainedHead, target: Path, out: Path, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors to `out`, each replaced in one step."""
    config = read_model_config(target)
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if head.kind == "eagle3":
        tensors |= _vocabulary_tables(head, config.vocab_size)
    else:
        tensors = {_mtp_name(name): tensor for name, tensor in tensors.items()}
        if config.norm_offset:
            offset = config.norm_offset
            tensors |= {
                n: (t.float() - offset).to(dtype) for n, t in tensors.items() if t.ndim == 1
            }
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_config(head, target, config, dtype), indent=2) + "\n"
    with tempfile.TemporaryDirectory(dir=out) as partial:
        (Path(partial) / "config.json").write_text(text)
        save_file(tensors, Path(partial) / "model.safetensors", {"format": "pt"})
        for file in Path(partial).iterdir():
            file.chmod(0o644)
            os.replace(file, out / file.name)


def _mtp_name(name: str) -> str:
    """Return speculators' name of a tensor of an MTP module."""
    stem, _, rest = name.partition(".")
    if stem == "layers":
        return f"mtp_layers.0.{rest.removeprefix('0.')}"
    return f"mtp_layers.0.{_SPECULATORS[stem]}.{rest}"


def check_can_have_mtp(config: ModelConfig) -> None:
    """Raise DistillError for a large model whose kind of layer cannot be trained here."""
    rope = config.layers[-1].rope
    obstacles = {
        "biases": config.attention_bias or config.output_bias or config.mlp_bias,
        "norms over rows of heads": config.qk_norm == "row",
        "LayerNorm": config.norm_kind != "rms",
        "gated attention": config.has_output_gate,
        "sinks": config.has_sinks,
        "windows": config.sliding_window is not None,
        "recurrent layers": config.recurrence is not None,
        "parallel layers": config.is_parallel,
        "norms behind its parts": config.names.after_attention or config.names.after_mlp,
        "fused projections": len(config.names.qkv) != 3,
        f"{rope.rope_type} rotation": rope.rope_type != "default",
        "partial rotation": rope.num_rotated != config.head_dim,
        "scores of its own scale": config.attention_scale or config.attention_softcap,
        "scaled outputs": (config.embedding_scale, config.residual_scale, config.logit_scale)
        != (1.0, 1.0, 1.0)
        or config.logit_softcap,
        "another activation": config.activation != "silu",
    }
    if found := [name for name, is_there in obstacles.items() if is_there]:
        raise DistillError(
            f"{config.model_id} is {config.architecture}, with {', '.join(found)}: an MTP module "
            "is a layer of the large model's kind, and this kind cannot be trained here. Train an "
            "EAGLE-3 head: --kind eagle3."
        )


def _vocabulary_tables(head: TrainedHead, vocab_size: int) -> dict[str, Tensor]:
    """d2t: what to add to a token of the head to get the large model's; t2d: which ones it has."""
    token_ids = head.token_ids.cpu()
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": known}


def _config(
    head: TrainedHead, folder: Path, target: ModelConfig, dtype: torch.dtype
) -> dict[str, Any]:
    sizes = head.sizes
    if head.kind == "mtp":
        return {
            "architectures": ["MTPSpeculator"],
            "speculators_model_type": "mtp",
            "dtype": str(dtype).removeprefix("torch."),
            "num_nextn_predict_layers": 1,
            "target_fingerprint": checkpoint_fingerprint(folder),
            "transformer_layer_config": json.loads((folder / "config.json").read_text()),
        }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": target.bos_token_id,
        "draft_vocab_size": sizes.draft_vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": list(target.eos_token_ids),
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.mlp_size,
        "max_position_embeddings": target.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": sizes.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": sizes.norm_eps,
        "rope_scaling": None,
        "rope_theta": sizes.rope_theta,
        "target_fingerprint": checkpoint_fingerprint(folder),
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
    }
    if target.num_layers < 6:
        # SGLang's numbers name the layer that a hidden state comes out of, vLLM's the one behind.
        config["eagle_aux_hidden_state_layer_ids"] = list(sizes.tap_layers)
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in sizes.tap_layers],
        }
    return config
