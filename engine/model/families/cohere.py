"""Cohere's Command R7B and A: attention and MLP side by side, layer norms, scaled logits."""

from outrider.engine.model.config import ModelConfig, TensorNames
from outrider.engine.model.families.source import ConfigSource

_NAMES = TensorNames(before_mlp=None)


def describe_cohere2(source: ConfigSource) -> ModelConfig:
    """Three layers with window and rotation to one that sees everything and does not rotate."""
    has_bias = bool(source.get("attention_bias", False))
    turned = source.rope(is_interleaved=True)
    still = source.rope(is_interleaved=True, is_off=True)
    return source.describe(
        names=_NAMES,
        norm_kind="layer",
        norm_eps=source.config.layer_norm_eps,
        is_parallel=True,
        attention_bias=has_bias,
        output_bias=has_bias,
        logit_scale=float(source.config.logit_scale),
        layers=source.layers(
            windows=source.typed_window,
            ropes=lambda index: still if source.typed_window(index) is None else turned,
        ),
    )
