"""Checkpoints that take images, too: their text model is one of the families, and is served."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Final

# By the model_type of their text_config. Rotations by time, height and width (Qwen VL) are the
# ordinary one on text, where the three are equal.
_FAMILY_OF_TEXT: Final[Mapping[str, str]] = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
# Those whose text model, on text alone, is the family's own and nothing else.
ARCHITECTURES: Final = (
    "Gemma3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
# Those whose text model transformers' modules run.
THROUGH_TRANSFORMERS: Final = (
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Llama4ForConditionalGeneration",
)
# Where checkpoints keep the text model's tensors; the first are transformers 5's names.
PREFIXES: Final = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
HEADS: Final = ("lm_head.weight", "language_model.lm_head.weight")


def family_of_text(architecture: str, raw: Mapping[str, Any]) -> str | None:
    """Return the family of a checkpoint's text model; None where it is none of ours."""
    text = raw.get("text_config")
    if architecture not in ARCHITECTURES or not isinstance(text, Mapping):
        return None
    return _FAMILY_OF_TEXT.get(str(text.get("model_type")))


def text_prefix(names: Iterable[str]) -> str | None:
    """Return what stands before the names of a text model's tensors; None without one."""
    found = set(names)
    return next((each for each in PREFIXES if each + "embed_tokens.weight" in found), None)


def text_config(config: Any) -> Any:
    """Return the config of a text model, with what the whole model's config says for it."""
    text = copy.copy(config.get_text_config())
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", False))
    for name in ("dtype", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return text
