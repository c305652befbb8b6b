"""Tiny random models of any causal architecture of transformers."""

import warnings
from dataclasses import fields
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
# Given only to configurations that have them.
_SMALL: Final[dict[str, Any]] = {
    "head_dim": 16,
    "ffn_dim": 96,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "word_embed_proj_dim": 64,
}
SMALL_DELTA: Final[dict[str, Any]] = {
    **{name: _SMALL[name] for name in ("head_dim", "num_experts", "num_experts_per_tok")},
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "initializer_range": 0.08,
}
# What a type needs besides.
_OWN: Final[dict[str, dict[str, Any]]] = {
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "longcat_flash": {"head_dim": 8},
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "gemma4_text": {"sliding_window": 7, "global_head_dim": 32, "vocab_size_per_layer_input": 131},
    "gemma4_unified_text": {"sliding_window": 7, "global_head_dim": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 131},
    "hrm_text": {"initializer_range": 0.02},  # its rounds would multiply rounding
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"]},
    "qwen3_5": {"text_config": {**_SHAPE, **SMALL_DELTA}},
    "qwen3_5_moe": {"text_config": {**_SHAPE, **SMALL_DELTA}},
    "qwen3_5_moe_text": SMALL_DELTA,
    "qwen3_5_text": SMALL_DELTA,
    "qwen3_next": SMALL_DELTA,
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},
    "starcoder2": {"sliding_window": 7},
    "xlnet": {"d_head": 16},
}
# What a type does not let a caller choose.
_FIXED: Final[dict[str, str]] = {
    "dots3_note": "hidden_size",
    "prophetnet": "num_hidden_layers",
    "xlnet": "max_position_embeddings",
}


def tiny_config(model_type: str, **settings: Any) -> PreTrainedConfig:
    """A small configuration of a type that transformers has."""
    config_class = CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = _OWN.get(model_type, {})
        named = {each.name for each in fields(config_class)} | config_class.attribute_map.keys()
        small = {name: value for name, value in _SMALL.items() if name in named}
        if "qk_rope_head_dim" in named:  # latent attention: the parts of a head have their sizes
            small.pop("head_dim", None)
            small["num_key_value_heads"] = 4
        shape = {name: _SHAPE[name] for name in _SHAPE if name != _FIXED.get(model_type)}
        config: PreTrainedConfig = config_class(**{**shape, **small, **own, **settings})
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    return config


def make_transformers_model(model_type: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model in float32, norms and biases included."""
    config = tiny_config(model_type, **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    evaluated: PreTrainedModel = model.eval().float()
    return evaluated
