"""Random-weight Hugging Face models of every supported architecture, tiny, made on the spot."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from tests.transformers_models import make_transformers_model

_SHAPE: dict[str, Any] = {
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
    # The default deviation of 0.02 makes attention of so small a model nearly uniform, and
    # errors in masks and positions invisible.
    "initializer_range": 0.2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.5, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 4,
    "partial_rotary_factor": 0.5,
}
_DELTA = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "full_attention_interval": 2,
    "initializer_range": 0.12,
}
_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

HF_CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama2": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (LlamaConfig, {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": (
        LlamaConfig,
        {"rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "mistral": (MistralConfig, {"sliding_window": 9, "head_dim": 16}),
    "mistral-full": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-mixed-windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "qwen3-tied-mqa": (
        Qwen3Config,
        {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama-yarn": (LlamaConfig, {"rope_parameters": _YARN}),
    "phi3": (Phi3Config, {"sliding_window": 9}),
    "phi3-long": (
        Phi3Config,
        {
            "rope_parameters": _LONGROPE,
            "original_max_position_embeddings": 4,
            "partial_rotary_factor": 0.5,
        },
    ),
    "olmo2": (Olmo2Config, {"attention_bias": True}),
    "gemma": (GemmaConfig, {"head_dim": 24, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 2,
        },
    ),
    "glm": (GlmConfig, {"head_dim": 16, "attention_bias": True}),
    "glm4": (Glm4Config, {"head_dim": 16, "attention_bias": True}),
    "granite": (
        GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere2": (
        Cohere2Config,
        {
            "sliding_window": 7,
            "logit_scale": 0.3,
            "sliding_window_pattern": 2,
        },
    ),
    "smollm3": (
        SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 7},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-next": (Qwen3NextConfig, {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5": (Qwen3_5TextConfig, {**_DELTA, "tie_word_embeddings": True}),
    "qwen3_5-moe": (Qwen3_5MoeTextConfig, {**_DELTA, **_DELTA_EXPERTS}),
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4-moe": (
        Glm4MoeConfig,
        {
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
        },
    ),
}

# For tests of whole answers. Transformers changes longrope's frequencies as a sequence grows, the
# engine does not, so their answers differ. Those that are slow have what others have as well.
_LAW_QUICK = {
    *("cohere2", "gemma2", "gpt-oss", "gpt_neox"),
    *("llama3", "qwen2-mixed-windows", "qwen2-moe", "qwen3", "qwen3-next"),
}
_THROUGH_TRANSFORMERS = (
    "deepseek_v3",
    "gemma4_text",
    "gpt_neox",
    "llama4_text",
    "phimoe",
    "starcoder2",
)


def law_architectures(others: pytest.MarkDecorator) -> list[Any]:
    """Return a parameter for each architecture; `others` marks those that are not quick."""
    names = sorted({*HF_CONFIGS, *_THROUGH_TRANSFORMERS} - {"phi3-long"})
    return [pytest.param(name, marks=[] if name in _LAW_QUICK else [others]) for name in names]


def make_hf_model(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of `HF_CONFIGS` in float32 with random weights, norms and biases included.

    Other names are of transformers' model types.
    """
    if name not in HF_CONFIGS:
        return make_transformers_model(name, seed=seed, **overrides)
    config_class, settings = HF_CONFIGS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config_class(**{**_SHAPE, **settings, **overrides}), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # ones otherwise, which hide a missing weight
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("sinks"):
                parameter.normal_(std=2.0)
            elif parameter_name.endswith("A_log"):  # states that last for 10 to 100 tokens
                parameter.uniform_(-4.5, -1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model.eval()


def save_hf_model(name: str, folder: Path, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a model, save it into `folder`, and return it."""
    model = make_hf_model(name, seed=seed, **overrides)
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, **changes}))
