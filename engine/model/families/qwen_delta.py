"""Qwen3-Next and Qwen 3.5: three of four layers are gated delta rules, the fourth attention."""

from dataclasses import replace

from outrider.engine.model.config import ExpertNames, ModelConfig, Recurrence
from outrider.engine.model.families.mixtures import qwen_experts, qwen_sparse_layers
from outrider.engine.model.families.source import ConfigSource


def describe_qwen3_next(source: ConfigSource) -> ModelConfig:
    """Qwen3-Next: mixtures with a gated shared expert."""
    return _mixture(source, is_grouped=True)


def describe_qwen3_5(source: ConfigSource) -> ModelConfig:
    """Qwen 3.5 (dense): the same layers with ordinary MLPs."""
    return _describe(source, source.describe())


def describe_qwen3_5_moe(source: ConfigSource) -> ModelConfig:
    """Qwen 3.5 (mixtures): every layer is one."""
    return _mixture(source)


def _mixture(source: ConfigSource, *, is_grouped: bool = False) -> ModelConfig:
    experts = replace(
        qwen_experts(source),
        shared_size=source.config.shared_expert_intermediate_size,
        names=ExpertNames(shared_gate="mlp.shared_expert_gate"),
    )
    inner = source.get("intermediate_size", source.config.moe_intermediate_size)
    described = source.describe(
        intermediate_size=inner, layers=qwen_sparse_layers(source), experts=experts
    )
    return _describe(source, described, is_grouped=is_grouped)


def _describe(
    source: ConfigSource, described: ModelConfig, *, is_grouped: bool = False
) -> ModelConfig:
    """Add what all of them have: recurrent layers, gated attention, norms around one."""
    config = source.config
    has_bias = bool(source.get("attention_bias", False))
    kinds = zip(described.layers, config.layer_types, strict=True)
    return replace(
        described,
        layers=tuple(
            replace(layer, is_recurrent=kind == "linear_attention") for layer, kind in kinds
        ),
        recurrence=Recurrence(
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            num_taps=config.linear_conv_kernel_dim,
            is_grouped=is_grouped,
        ),
        attention_bias=has_bias,
        output_bias=has_bias,
        has_output_gate=True,
        norm_offset=1.0,
        qk_norm="head",
    )
