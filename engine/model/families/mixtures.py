"""Mixtures of experts on a Llama-shaped decoder: Mixtral, Qwen 2 and 3 MoE, OLMoE, GLM 4.5."""

from dataclasses import replace

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ExpertNames, ExpertsConfig, LayerConfig, ModelConfig
from outrider.engine.model.families.source import ConfigSource
from outrider.kernels.experts.route import RoutingRule


def describe_mixtral(source: ConfigSource) -> ModelConfig:
    """Mixtral: every layer is a mixture; the chosen experts' weights sum to 1."""
    config = source.config
    names = ExpertNames(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        gate="w1",
        up="w3",
        down="w2",
    )
    return source.describe(
        layers=_sparse(source.layers(window=source.get("sliding_window"))),
        experts=ExpertsConfig(
            num_experts=config.num_local_experts,
            inner_size=config.intermediate_size,
            gate=source.activation,
            routing=RoutingRule(num_chosen=config.num_experts_per_tok, renormalise=True),
            names=names,
        ),
    )


def describe_qwen2_moe(source: ConfigSource) -> ModelConfig:
    """Qwen 1.5 and 2 MoE: a gated shared expert in each mixture, dense layers between them."""
    experts = replace(
        qwen_experts(source),
        shared_size=source.config.shared_expert_intermediate_size,
        names=ExpertNames(shared_gate="mlp.shared_expert_gate"),
    )
    return source.describe(
        attention_bias=bool(source.get("qkv_bias", True)),
        layers=qwen_sparse_layers(source),
        experts=experts,
    )


def describe_qwen3_moe(source: ConfigSource) -> ModelConfig:
    """Qwen 3 MoE (30B-A3B, 235B-A22B, Coder): queries and keys normalised head by head."""
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm="head",
        layers=qwen_sparse_layers(source),
        experts=qwen_experts(source),
    )


def describe_olmoe(source: ConfigSource) -> ModelConfig:
    """OLMoE: queries and keys normalised as whole rows."""
    config = source.config
    if source.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            f"{source.model_id} clips queries, keys and values (clip_qkv={config.clip_qkv}), which "
            "the engine does not."
        )
    has_bias = bool(source.get("attention_bias", False))
    return source.describe(
        attention_bias=has_bias,
        output_bias=has_bias,
        qk_norm="row",
        layers=_sparse(source.layers(window=source.get("sliding_window"))),
        experts=ExpertsConfig(
            num_experts=config.num_experts,
            inner_size=config.intermediate_size,
            gate=source.activation,
            routing=RoutingRule(
                num_chosen=config.num_experts_per_tok, renormalise=bool(config.norm_topk_prob)
            ),
        ),
    )


def describe_glm4_moe(source: ConfigSource) -> ModelConfig:
    """GLM 4.5 and 4.6: dense layers first, then mixtures chosen by group, with shared experts."""
    config = source.config
    num_dense = config.first_k_dense_replace
    layers = source.layers()
    # Layers behind the last are for predicting several tokens; transformers leaves them out, too.
    extra = range(len(layers), len(layers) + source.get("num_nextn_predict_layers", 0))
    return source.describe(
        ignored_prefixes=tuple(f"model.layers.{index}." for index in extra),
        attention_bias=bool(source.get("attention_bias", False)),
        qk_norm="head" if source.get("use_qk_norm", False) else None,
        layers=(*layers[:num_dense], *_sparse(layers[num_dense:])),
        experts=ExpertsConfig(
            num_experts=config.n_routed_experts,
            inner_size=config.moe_intermediate_size,
            gate=source.activation,
            shared_size=config.n_shared_experts * config.moe_intermediate_size,
            routing=RoutingRule(
                num_chosen=config.num_experts_per_tok,
                scores="sigmoid",
                renormalise=bool(config.norm_topk_prob),
                scale=float(config.routed_scaling_factor),
                num_groups=config.n_group,
                kept_groups=config.topk_group,
            ),
            names=ExpertNames(
                shared="mlp.shared_experts", correction="mlp.gate.e_score_correction_bias"
            ),
        ),
    )


def qwen_experts(source: ConfigSource) -> ExpertsConfig:
    """Return the mixtures that Qwen's families have alike."""
    config = source.config
    return ExpertsConfig(
        num_experts=config.num_experts,
        inner_size=config.moe_intermediate_size,
        gate=source.activation,
        routing=RoutingRule(
            num_chosen=config.num_experts_per_tok,
            renormalise=bool(source.get("norm_topk_prob", True)),
        ),
    )


def qwen_sparse_layers(source: ConfigSource) -> tuple[LayerConfig, ...]:
    """Return the layers, of which every `decoder_sparse_step`-th is a mixture, but some not."""
    has_windows = bool(source.get("use_sliding_window", False))
    window = source.get("sliding_window") if has_windows else None
    typed = source.typed_window if has_windows and source.get("layer_types") else None
    dense = set(source.get("mlp_only_layers", ()))
    step: int = source.get("decoder_sparse_step", 1)
    layers = source.layers(window=window, windows=typed)
    return tuple(
        replace(layer, is_sparse=index not in dense and (index + 1) % step == 0)
        for index, layer in enumerate(layers)
    )


def _sparse(layers: tuple[LayerConfig, ...]) -> tuple[LayerConfig, ...]:
    return tuple(replace(layer, is_sparse=True) for layer in layers)
