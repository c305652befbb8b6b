"""OLMo 2: norms behind attention and MLP, queries and keys normalised as whole rows."""

from outrider.engine.model.config import ModelConfig, TensorNames
from outrider.engine.model.families.source import ConfigSource

_NAMES = TensorNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def describe_olmo2(source: ConfigSource) -> ModelConfig:
    """OLMo 2 of all sizes."""
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        names=_NAMES, qk_norm="row", attention_bias=has_bias, output_bias=has_bias
    )
