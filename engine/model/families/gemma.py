"""Gemma 1 to 3: norms that store weight - 1, scaled embeddings, GELU, soft caps."""

import math

from outrider.engine.model.config import ModelConfig, TensorNames
from outrider.engine.model.families.source import ConfigSource

_SANDWICH = TensorNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def describe_gemma(source: ConfigSource) -> ModelConfig:
    """Gemma 1: norms before attention and MLP."""
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        norm_offset=1.0,
        attention_bias=has_bias,
        output_bias=has_bias,
        embedding_scale=math.sqrt(source.config.hidden_size),
    )


def describe_gemma2(source: ConfigSource) -> ModelConfig:
    """Gemma 2: norms around attention and MLP, every second layer with a window, soft caps."""
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        names=_SANDWICH,
        norm_offset=1.0,
        attention_bias=has_bias,
        output_bias=has_bias,
        embedding_scale=math.sqrt(source.config.hidden_size),
        attention_scale=source.config.query_pre_attn_scalar**-0.5,
        attention_softcap=source.get("attn_logit_softcapping"),
        logit_softcap=source.get("final_logit_softcapping"),
        layers=source.layers(windows=source.typed_window),
    )


def describe_gemma3(source: ConfigSource) -> ModelConfig:
    """Gemma 3's text model: five layers with a window to one without, each kind's own rotation."""
    has_bias = bool(source.get("attention_bias", False))
    kinds = source.config.layer_types
    ropes = {kind: source.rope(source.config.rope_parameters[kind]) for kind in set(kinds)}
    return source.describe(
        names=_SANDWICH,
        norm_offset=1.0,
        qk_norm="head",
        attention_bias=has_bias,
        output_bias=has_bias,
        embedding_scale=math.sqrt(source.config.hidden_size),
        attention_scale=source.config.query_pre_attn_scalar**-0.5,
        attention_softcap=source.get("attn_logit_softcapping"),
        logit_softcap=source.get("final_logit_softcapping"),
        layers=source.layers(windows=source.typed_window, ropes=lambda index: ropes[kinds[index]]),
    )
