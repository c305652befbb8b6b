"""Turns what a GGUF file says of its model into the config.json of such a model."""

from collections.abc import Mapping
from typing import Any, Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import FIM_NAMES
from outrider.engine.model.gguf.header import TENSOR_TYPES, GgufHeader

# llama.cpp's name for a family, and transformers'. "llama" is also what Mistral's files say.
ARCHITECTURES: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS: Final = "rope_freqs.weight"
_OLDER_FIM_NAMES: Final = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_REFUSED: Final = {
    "expert_count": "mixtures of experts are not read from GGUF",
    "attention.sliding_window": "windows are not read from GGUF",
}


def config_of(header: GgufHeader, rope_factors: list[float] | None = None) -> dict[str, Any]:
    """Return the contents of config.json.

    `rope_factors`: what `rope_freqs.weight` holds, by which Llama 3's files divide frequencies.
    Raises UnsupportedModelError for a family or a setting that is not read.
    """
    return _Config(header).describe(rope_factors)


class _Config:
    """The fields of one file."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        name = header.fields.get("general.architecture")
        if name not in ARCHITECTURES:
            raise self._error(
                f"it is of the architecture {str(name)[:50]!r}; read are {', '.join(ARCHITECTURES)}"
            )
        self._family = str(name)

    def describe(self, rope_factors: list[float] | None) -> dict[str, Any]:
        for name, sentence in _REFUSED.items():
            if self._header.fields.get(f"{self._family}.{name}"):
                raise self._error(sentence)
        tensors = self._header.tensors
        if "token_embd.weight" not in tensors:
            raise self._error("the tensor token_embd.weight is missing")
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden // heads)
        if self._size("rope.dimension_count", head_dim) != head_dim:
            raise self._error("only a part of each head is rotated, which is not read from GGUF")
        context = self._size("context_length")
        return {
            "architectures": [ARCHITECTURES[self._family]],
            "model_type": self._family,
            "hidden_size": hidden,
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": self._size("feed_forward_length"),
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "rope_parameters": self._rope(context, rope_factors),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self._token("bos"),
            "eos_token_id": self._ends(),
            "fim_token_ids": self._fim_tokens(),
            "dtype": self._dtype(),
        }

    # ---- parts ----------------------------------------------------------------------------

    def _rope(self, context: int, factors: list[float] | None) -> dict[str, Any]:
        theta = self._number("rope.freq_base", 10000.0)
        kind = self._header.fields.get(f"{self._family}.rope.scaling.type", "none")
        if factors is not None:  # a divisor for each pair of dimensions: what longrope is, too
            return {
                "rope_type": "longrope",
                "rope_theta": theta,
                "short_factor": factors,
                "long_factor": factors,
                "original_max_position_embeddings": context,
                "attention_factor": 1.0,
            }
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind not in ("linear", "yarn"):
            raise self._error(f"its rotations are scaled as {str(kind)[:50]!r}, which is not read")
        scaled = {
            "rope_type": kind,
            "rope_theta": theta,
            "factor": self._number("rope.scaling.factor"),
        }
        if kind == "yarn":
            original = self._size("rope.scaling.original_context_length")
            scaled["original_max_position_embeddings"] = original
        return scaled

    def _dtype(self) -> str:
        """Return what activations are computed in: half precision, where weights have no more."""
        kinds = {TENSOR_TYPES[each.kind].name for each in self._header.tensors.values()}
        if kinds == {"F32"}:
            return "float32"
        return "float16" if kinds <= {"F32", "F16"} else "bfloat16"

    def _ends(self) -> list[int] | None:
        found = [self._token("eos"), self._token("eot")]
        ends = list(dict.fromkeys(each for each in found if each is not None))
        return ends or None

    def _fim_tokens(self) -> dict[str, int]:
        """Return the tokens for text in the middle, by the names of their keys."""
        found = {name: self._token(f"fim_{name}") for name in FIM_NAMES}
        for name, older in _OLDER_FIM_NAMES.items():
            found[name] = self._token(older) if found[name] is None else found[name]
        return {name: token for name, token in found.items() if token is not None}

    def _token(self, name: str) -> int | None:
        value = self._header.fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int else None

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._header.fields.get(f"{self._family}.{name}", default)
        if type(value) is not int or not 1 <= value < 1 << 31:
            shown = "missing" if value is None else f"{str(value)[:50]}, not a size"
            raise self._error(f"{self._family}.{name} is {shown}")
        return value

    def _number(self, name: str, default: float | None = None) -> float:
        value = self._header.fields.get(f"{self._family}.{name}", default)
        if not isinstance(value, float):
            shown = "missing" if value is None else f"{str(value)[:50]}, not a number"
            raise self._error(f"{self._family}.{name} is {shown}")
        return value

    def _error(self, sentence: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._header.path}: {sentence}.")
