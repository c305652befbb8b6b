"""Tiny random models that take images, too, whose text models the engine runs."""

from typing import Any, Final

import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.transformers_models import SMALL_DELTA, tiny_config

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "num_position_embeddings": 16,
}


# Of those that run through transformers.
_TEXT_TYPES: Final = {
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
}


def make_multimodal_model(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """A model of this type in float32 with random weights."""
    config = _through_transformers(model_type) if model_type in _TEXT_TYPES else _native(model_type)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones otherwise, which hide a missing weight
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model.eval()


def _native(model_type: str) -> PreTrainedConfig:
    make_config = CONFIG_MAPPING[model_type]
    default = make_config()
    text, vision = default.get_text_config().to_dict(), default.vision_config.to_dict()
    # Some types take a pair of numbers for the sides of an image or a patch.
    sides = {
        name: [value, value] if isinstance(vision[name], (list, tuple)) else value
        for name, value in _VISION.items()
        if name in vision and not isinstance(value, list)
    }
    lists = {name: _VISION[name] for name in vision if isinstance(_VISION.get(name), list)}
    rope = text.get("rope_parameters")
    if model_type.startswith("qwen"):
        rope = {**rope, "mrope_section": [4, 2, 2]}  # sums up to half a head
    return make_config(
        text_config={
            "model_type": text["model_type"],
            "rope_parameters": rope,
            **{name: value for name, value in _TEXT.items() if name in text},
            **(SMALL_DELTA if "linear_num_key_heads" in text else {}),
        },
        vision_config={"model_type": vision["model_type"], **sides, **lists},
    )


def _through_transformers(model_type: str) -> PreTrainedConfig:
    text = tiny_config(_TEXT_TYPES[model_type]).to_dict()
    if model_type == "llama4":
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 64, "vision_output_dim": 32, "image_size": 28}
        sizes |= {"projector_input_dim": 32, "projector_output_dim": 32}
        return CONFIG_MAPPING[model_type](text_config=text, vision_config=sizes)
    return CONFIG_MAPPING[model_type](text_config=text)
