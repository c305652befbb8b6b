"""Phi 3 and 4: fused projections, partial rotation, longrope."""

from outrider.engine.model.config import ModelConfig, TensorNames
from outrider.engine.model.families.source import ConfigSource

_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def describe_phi3(source: ConfigSource) -> ModelConfig:
    """Phi 3, 3.5 and 4 (mini and medium)."""
    return source.describe(names=_NAMES, layers=source.layers(window=source.get("sliding_window")))
