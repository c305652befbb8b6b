"""Llama, Mistral, Qwen 2 and 3, SmolLM 3, Granite: norms before, one rotation, silu."""

from outrider.engine.model.config import LayerConfig, ModelConfig
from outrider.engine.model.families.source import ConfigSource


def describe_llama(source: ConfigSource) -> ModelConfig:
    """Llama 1 to 3 and what copies them."""
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=bool(source.get("mlp_bias", False)),
    )


def describe_mistral(source: ConfigSource) -> ModelConfig:
    """Mistral: perhaps a window in every layer."""
    return source.describe(layers=source.layers(window=source.get("sliding_window")))


def describe_qwen2(source: ConfigSource) -> ModelConfig:
    """Qwen 2 and 2.5: biases on queries, keys and values."""
    return source.describe(attention_bias=True, layers=_qwen_layers(source))


def describe_qwen3(source: ConfigSource) -> ModelConfig:
    """Qwen 3: queries and keys are normalised head by head."""
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm="head",
        layers=_qwen_layers(source),
    )


def describe_smollm3(source: ConfigSource) -> ModelConfig:
    """SmolLM 3: every fourth layer does not rotate."""
    rotates = source.get("no_rope_layers")
    has_bias = bool(source.get("attention_bias", False))
    turned, still = source.rope(), source.rope(is_off=True)
    has_windows = bool(source.get("use_sliding_window", False))
    return source.describe(
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=bool(source.get("mlp_bias", False)),
        layers=source.layers(
            windows=source.typed_window if has_windows else None,
            ropes=lambda index: turned if rotates[index] else still,
        ),
    )


def describe_granite(source: ConfigSource) -> ModelConfig:
    """Granite 3 (dense): four scales."""
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=bool(source.get("mlp_bias", False)),
        attention_scale=float(source.config.attention_multiplier),
        embedding_scale=float(source.config.embedding_multiplier),
        residual_scale=float(source.config.residual_multiplier),
        logit_scale=1.0 / float(source.config.logits_scaling),
    )


def _qwen_layers(source: ConfigSource) -> tuple[LayerConfig, ...]:
    has_windows = bool(source.get("use_sliding_window", False))
    return source.layers(windows=source.typed_window if has_windows else None)
