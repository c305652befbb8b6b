"""A config.json as transformers completes it, and what most families read from it alike."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.checkpoint_files import end_token_ids, merged_ids
from outrider.engine.model.config import LayerConfig, ModelConfig
from outrider.kernels.layers.gated_mul import Activation
from outrider.kernels.layers.rope import ROPE_TYPES, RopeConfig

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """The fields of a config.json (`config`, with its defaults filled in) and where it is from."""

    model_id: str
    architecture: str
    config: Any

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default where it is absent or null."""
        value = getattr(self.config, name, None)
        return default if value is None else value

    @property
    def head_dim(self) -> int:
        """Return the size of a head."""
        size: int = self.get("head_dim") or (
            self.config.hidden_size // self.config.num_attention_heads
        )
        return size

    @property
    def activation(self) -> Activation:
        """Return the MLP's activation. Raises UnsupportedModelError for one the engine lacks."""
        name = self.get("hidden_activation") or self.get("hidden_act", "silu")
        if name not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{self.model_id} uses the activation {name!r}; the engine has "
                f"{', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[name]

    def describe(self, **differences: Any) -> ModelConfig:
        """Return the description of a Llama-shaped decoder with the family's differences.

        Raises UnsupportedModelError for settings that the engine lacks.
        """
        config = self.config
        dtype = self.get("dtype") or self.get("torch_dtype")
        fields: dict[str, Any] = {
            "model_id": self.model_id,
            "architecture": self.architecture,
            "hidden_size": config.hidden_size,
            "num_query_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads or config.num_attention_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.get("intermediate_size"),
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "activation": self.activation,
            "tie_word_embeddings": bool(config.tie_word_embeddings),
            "bos_token_id": config.bos_token_id,
            "eos_token_ids": self._eos_token_ids(),
            "dtype": "float32" if dtype is None else str(dtype).removeprefix("torch."),
        }
        fields |= differences
        if "norm_eps" not in fields:
            fields["norm_eps"] = config.rms_norm_eps
        if "layers" not in fields:
            fields["layers"] = self.layers()
        return ModelConfig(**fields)

    # ---- layers ---------------------------------------------------------------------------

    def layers(
        self,
        *,
        window: int | None = None,
        windows: Callable[[int], int | None] | None = None,
        ropes: Callable[[int], RopeConfig] | None = None,
    ) -> tuple[LayerConfig, ...]:
        """Return all layers' attention; `windows`, `ropes`: by layer, where layers differ."""
        rope = None if ropes is not None else self.rope()
        found = []
        for index in range(self.config.num_hidden_layers):
            turned = rope if ropes is None else ropes(index)
            assert turned is not None
            seen = window if windows is None else windows(index)
            found.append(LayerConfig(rope=turned, window=seen))
        return tuple(found)

    def typed_window(self, index: int) -> int | None:
        """Return the window of a layer that `layer_types` calls a sliding one."""
        kinds = self.get("layer_types", ())
        window: int | None = self.get("sliding_window")
        return window if kinds and kinds[index] == "sliding_attention" else None

    def rope(
        self,
        parameters: Mapping[str, Any] | None = None,
        *,
        is_interleaved: bool = False,
        is_off: bool = False,
    ) -> RopeConfig:
        """Return a layer's rotation, from `rope_parameters` unless others are given.

        Transformers 5 keeps everything there, 4 in rope_scaling and rope_theta. `is_off`: the
        layer's heads do not turn, but its dimensions are in the others' order.
        """
        config = self.config
        found = parameters or self.get("rope_parameters") or self.get("rope_scaling") or {}
        rope_type = found.get("rope_type") or found.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"{self.model_id} uses rotary embeddings of type {rope_type!r}; the engine has "
                f"{', '.join(ROPE_TYPES)}."
            )
        partial = found.get("partial_rotary_factor") or self.get("partial_rotary_factor", 1.0)
        original = int(
            found.get("original_max_position_embeddings")
            or self.get("original_max_position_embeddings")
            or config.max_position_embeddings
        )
        factor = found.get("factor")
        if factor is None and rope_type in ("yarn", "longrope"):
            factor = config.max_position_embeddings / original
        factor = float(factor or 1.0)
        size = int(self.head_dim * partial)
        return RopeConfig(
            head_dim=self.head_dim,
            theta=float(found.get("rope_theta") or self.get("rope_theta", 10000.0)),
            rope_type=rope_type,
            factor=factor,
            low_freq_factor=float(found.get("low_freq_factor") or 1.0),
            high_freq_factor=float(found.get("high_freq_factor") or 4.0),
            original_max_positions=original,
            beta_fast=float(found.get("beta_fast") or 32.0),
            beta_slow=float(found.get("beta_slow") or 1.0),
            truncate=bool(found.get("truncate", True)),
            short_factors=tuple(found.get("short_factor") or ()),
            long_factors=tuple(found.get("long_factor") or ()),
            attention_factor=_attention_factor(found, rope_type, factor, original),
            rotary_dim=0 if is_off else None if size == self.head_dim else size,
            is_interleaved=is_interleaved,
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, the class's own default among them."""
        return merged_ids(self.config.eos_token_id, end_token_ids(self.model_id))


def _attention_factor(
    parameters: Mapping[str, Any], rope_type: str, factor: float, original: int
) -> float:
    """Return what yarn and longrope multiply sines and cosines by."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    if factor <= 1.0 or rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and all_dim:
        return _yarn_length(factor, scale) / _yarn_length(factor, all_dim)
    return _yarn_length(factor, 1.0)


def _yarn_length(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0
