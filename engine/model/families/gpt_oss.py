"""gpt-oss: sinks, windows in every second layer, clamped experts with biases."""

from dataclasses import replace

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ExpertNames, ExpertsConfig, ModelConfig
from outrider.engine.model.families.source import ConfigSource
from outrider.kernels.experts.expert_mlp import SWIGLU_ALPHA, SWIGLU_LIMIT
from outrider.kernels.experts.route import RoutingRule


def describe_gpt_oss(source: ConfigSource) -> ModelConfig:
    """gpt-oss 20B and 120B, where their weights have been converted from MXFP4."""
    config = source.config
    given = (source.get("swiglu_alpha", SWIGLU_ALPHA), source.get("swiglu_limit", SWIGLU_LIMIT))
    if given != (SWIGLU_ALPHA, SWIGLU_LIMIT):
        raise UnsupportedModelError(
            f"{source.model_id} has swiglu_alpha={given[0]} and swiglu_limit={given[1]}; "
            f"the engine has {SWIGLU_ALPHA} and {SWIGLU_LIMIT}."
        )
    has_bias = bool(source.get("attention_bias", True))
    layers = source.layers(windows=source.typed_window)
    return source.describe(
        attention_bias=has_bias,
        output_bias=has_bias,
        has_sinks=True,
        layers=tuple(replace(layer, is_sparse=True) for layer in layers),
        experts=ExpertsConfig(
            num_experts=config.num_local_experts,
            inner_size=config.intermediate_size,
            routing=RoutingRule(num_chosen=config.num_experts_per_tok, scores="softmax_of_chosen"),
            gate="clamped_swiglu",
            router_bias=True,
            is_stacked=True,
            names=ExpertNames(router="mlp.router"),
        ),
    )
