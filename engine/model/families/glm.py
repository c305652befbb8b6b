"""GLM 4 (dense): norms around attention and MLP, half of each head rotated in pairs."""

from outrider.engine.model.config import ModelConfig, TensorNames
from outrider.engine.model.families.source import ConfigSource

_NAMES = TensorNames(
    gate_up=("mlp.gate_up_proj",),
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)
_PLAIN_NAMES = TensorNames(gate_up=("mlp.gate_up_proj",))


def describe_glm(source: ConfigSource) -> ModelConfig:
    """GLM 4 of 2024 (GlmForCausalLM): norms before attention and MLP only."""
    return _describe(source, _PLAIN_NAMES)


def describe_glm4(source: ConfigSource) -> ModelConfig:
    """GLM 4 of 2025 (0414)."""
    return _describe(source, _NAMES)


def _describe(source: ConfigSource, names: TensorNames) -> ModelConfig:
    rope = source.rope(is_interleaved=True)
    return source.describe(
        names=names,
        attention_bias=bool(source.get("attention_bias", False)),
        layers=source.layers(ropes=lambda _: rope),
    )
