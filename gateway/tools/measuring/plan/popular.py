"""Sizes of popular models, for a plan where the hub cannot be asked."""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.read_config import read_model_config

# Models that were tuned from one of the table have its sizes.
_TUNED: Final = re.compile(r"-(Instruct|it|pt)(?=-v0\.3$|$)")


@dataclass(frozen=True, slots=True)
class _Published:
    """Sizes as the makers publish them in config.json. `window`: of the layers that have one."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    vocab_size: int
    max_context: int
    is_tied: bool = False
    window: int | None = None
    experts: Mapping[str, int | bool] = field(default_factory=dict)


_QWEN3, _LLAMA, _GEMMA3 = "Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM"
_QWEN3_EXPERTS: Final = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_GPT_OSS_EXPERTS: Final = {"num_local_experts": 32, "num_experts_per_tok": 4}
_MODEL_TYPES: Final = {
    _QWEN3: "qwen3",
    _LLAMA: "llama",
    _GEMMA3: "gemma3_text",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "GptOssForCausalLM": "gpt_oss",
}
# fmt: off
_MODELS: Final[Mapping[str, _Published]] = {
    # layers, hidden, heads, KV heads, head, inner, vocabulary, context
    "Qwen/Qwen3-0.6B": _Published(_QWEN3, 28, 1024, 16, 8, 128, 3072, 151936, 40960, is_tied=True),
    "Qwen/Qwen3-1.7B": _Published(_QWEN3, 28, 2048, 16, 8, 128, 6144, 151936, 40960, is_tied=True),
    "Qwen/Qwen3-4B": _Published(_QWEN3, 36, 2560, 32, 8, 128, 9728, 151936, 40960, is_tied=True),
    "Qwen/Qwen3-8B": _Published(_QWEN3, 36, 4096, 32, 8, 128, 12288, 151936, 40960),
    "Qwen/Qwen3-14B": _Published(_QWEN3, 40, 5120, 40, 8, 128, 17408, 151936, 40960),
    "Qwen/Qwen3-32B": _Published(_QWEN3, 64, 5120, 64, 8, 128, 25600, 151936, 40960),
    "Qwen/Qwen3-30B-A3B": _Published(
        "Qwen3MoeForCausalLM", 48, 2048, 32, 4, 128, 6144, 151936, 40960, experts=_QWEN3_EXPERTS
    ),
    "meta-llama/Llama-3.1-8B": _Published(_LLAMA, 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "meta-llama/Llama-3.2-1B": _Published(
        _LLAMA, 16, 2048, 32, 8, 64, 8192, 128256, 131072, is_tied=True
    ),
    "meta-llama/Llama-3.2-3B": _Published(
        _LLAMA, 28, 3072, 24, 8, 128, 8192, 128256, 131072, is_tied=True
    ),
    "meta-llama/Llama-3.3-70B": _Published(_LLAMA, 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "mistralai/Mistral-7B-v0.3": _Published(
        "MistralForCausalLM", 32, 4096, 32, 8, 128, 14336, 32768, 32768
    ),
    "google/gemma-3-1b": _Published(
        _GEMMA3, 26, 1152, 4, 1, 256, 6912, 262144, 32768, is_tied=True, window=512
    ),
    "google/gemma-3-4b": _Published(
        _GEMMA3, 34, 2560, 8, 4, 256, 10240, 262208, 131072, is_tied=True, window=1024
    ),
    "google/gemma-3-12b": _Published(
        _GEMMA3, 48, 3840, 16, 8, 256, 15360, 262208, 131072, is_tied=True, window=1024
    ),
    "google/gemma-3-27b": _Published(
        _GEMMA3, 62, 5376, 32, 16, 128, 21504, 262208, 131072, is_tied=True, window=1024
    ),
    "microsoft/phi-4": _Published("Phi3ForCausalLM", 40, 5120, 40, 10, 128, 17920, 100352, 16384),
    "openai/gpt-oss-20b": _Published(
        "GptOssForCausalLM", 24, 2880, 64, 8, 64, 2880, 201088, 131072, window=128,
        experts=_GPT_OSS_EXPERTS,
    ),
}
# fmt: on


def popular_model(model_id: str) -> ModelConfig | None:
    """Return the description of a model of the table, or of one tuned from it; None for others."""
    published = _MODELS.get(_TUNED.sub("", model_id))
    if published is None:
        return None
    with tempfile.TemporaryDirectory(prefix="outrider-") as place:
        folder = Path(place) / model_id.rpartition("/")[2]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(_config(published)))
        return read_model_config(folder)


def _config(published: _Published) -> dict[str, Any]:
    """Return what decides the sizes in a model's config.json."""
    return {
        "architectures": [published.architecture],
        "model_type": _MODEL_TYPES[published.architecture],
        "dtype": "bfloat16",
        "num_hidden_layers": published.num_layers,
        "hidden_size": published.hidden_size,
        "num_attention_heads": published.num_heads,
        "num_key_value_heads": published.num_kv_heads,
        "head_dim": published.head_dim,
        "intermediate_size": published.inner_size,
        "vocab_size": published.vocab_size,
        "max_position_embeddings": published.max_context,
        "tie_word_embeddings": published.is_tied,
        "sliding_window": published.window,
        **published.experts,
    }
