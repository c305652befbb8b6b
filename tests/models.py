"""Random-weight Hugging Face models of every supported architecture, tiny, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

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
}


def make_hf_model(name: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model of `HF_CONFIGS` in float32 with random weights, norms and biases included."""
    config_class, settings = HF_CONFIGS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config_class(**{**_SHAPE, **settings, **overrides}), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:  # ones otherwise, which hide a missing weight
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model.eval()


def save_hf_model(name: str, folder: Path, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Make a model, save it into `folder`, and return it."""
    model = make_hf_model(name, seed=seed, **overrides)
    model.save_pretrained(folder)
    return model
