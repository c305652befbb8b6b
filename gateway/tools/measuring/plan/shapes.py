"""Demands of a model on a device: bytes of weights, bytes of KV a token, operations."""

from dataclasses import dataclass, replace
from typing import Final

from outrider.engine.model.checkpoint_files import model_name
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.quantised.formats import INT4_GROUP_SIZES, MIN_ROUNDED_SIDE, SchemeName
from outrider.engine.model.shard import Shard
from outrider.engine.model.shared_config import share_of
from outrider.gateway.tools.measuring.plan.stored import stored_bits

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of a rounded number; in 4 bits with its share of a scale.
_ROUNDED_BITS: Final[dict[SchemeName, float]] = {"int8": 8, "int4": 4 + 16 / INT4_GROUP_SIZES[0]}
_COMPUTED: Final = "bfloat16"  # beside rounded weights
FP8: Final = "fp8"
_SCALE_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model's sizes. `kv_bytes_per_token` is of all layers, keys and values; `windowed_kv_bytes`
    is the part of the layers that keep only `window` tokens.

    `line_bytes`, `state_bytes`: of recurrent layers, for each answer and each of its states.
    `attention_flops_per_key`: of one row, for each token that it sees, in all layers.
    `num_idle_parameters`: of the experts that a token does not choose.
    """

    name: str
    num_parameters: int
    num_idle_parameters: int = 0
    weight_bytes: int
    kv_bytes_per_token: int
    windowed_kv_bytes: int = 0
    window: int | None = None
    line_bytes: int = 0
    state_bytes: int = 0
    attention_flops_per_key: int
    max_context: int

    @property
    def flops_per_row(self) -> int:
        """Operations of a token's pass without attention: two for each parameter that it uses."""
        return 2 * (self.num_parameters - self.num_idle_parameters)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        scheme: SchemeName | None = None,
        decodes: bool = False,
    ) -> "ModelSizes":
        """From a checkpoint's config.json. fp8 KV has a scale of 4 bytes a head of each slot.

        scheme: how weights are rounded. The table that tokens are looked up in stays, and a head
        that shares it gets a rounded copy, of 8 bits in every scheme. Narrow models stay. decodes:
        whether quantised weights become plain ones, though products could hold them as stored.
        """
        bits = None if decodes or scheme is not None else stored_bits(config)
        if dtype == "auto":
            dtype = _COMPUTED if bits is not None and config.dtype == "float16" else config.dtype
        if dtype != _COMPUTED:
            bits = None
        dtype = dtype if scheme is None else _COMPUTED
        width = config.num_query_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        layer = hidden * (2 * width + 2 * kv_width) + 2 * hidden
        embedding = config.vocab_size * hidden
        num_sparse = sum(layer.is_sparse for layer in config.layers)
        num_attending = config.num_layers - config.num_recurrent_layers
        num_parameters = num_attending * layer + embedding + hidden + _recurrent_parameters(config)
        num_parameters += (config.num_layers - num_sparse) * 3 * hidden * inner
        num_idle = 0
        if config.experts is not None:
            expert = 3 * hidden * config.experts.inner_size
            shared = 3 * hidden * config.experts.shared_size
            num_experts, num_chosen = config.experts.num_experts, config.experts.routing.num_chosen
            num_parameters += num_sparse * (num_experts * (expert + hidden) + shared)
            num_idle = num_sparse * (num_experts - num_chosen) * expert
        if not config.tie_word_embeddings:
            num_parameters += embedding
        num_parameters = config.num_parameters or num_parameters
        weight_bytes = num_parameters * _BYTES[dtype]
        if scheme is not None and hidden >= MIN_ROUNDED_SIDE:
            tables = embedding * (1 if config.tie_word_embeddings else 2)
            weight_bytes = embedding * (_BYTES[dtype] + 1)
            weight_bytes += int((num_parameters - tables) * _ROUNDED_BITS[scheme] / 8)
        if bits is not None:
            tables = embedding * (1 if config.tie_word_embeddings else 2)
            weight_bytes = tables * _BYTES[dtype] + int((num_parameters - tables) * bits / 8)
        kv_bytes = {True: 0, False: 0}  # of the layers with a window, and of those without
        for each in (layer for layer in config.layers if not layer.is_recurrent):
            heads = config.heads(windowed=each.window is not None)
            head_bytes = heads.head_dim * _BYTES[dtype]
            if kv_dtype == FP8:
                head_bytes = heads.head_dim + _SCALE_BYTES
            kv_bytes[each.window is not None] += 2 * heads.num_kv_heads * head_bytes
        line_bytes, state_bytes = config.recurrent_bytes(input_bytes=_BYTES[dtype])
        return cls(
            name=model_name(config.model_id),
            num_parameters=num_parameters,
            num_idle_parameters=num_idle,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=sum(kv_bytes.values()),
            windowed_kv_bytes=kv_bytes[True],
            window=config.sliding_window,
            line_bytes=line_bytes,
            state_bytes=state_bytes,
            attention_flops_per_key=4 * num_attending * width,
            max_context=config.max_position_embeddings,
        )


def part_of(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return the description of what each of several devices has of a model.

    Raises UnsupportedModelError for a model that cannot be shared out so.
    """
    if num_ranks == 1:
        return config
    shard = Shard(count=num_ranks)
    return replace(share_of(config, shard), vocab_size=shard.length(config.vocab_size))


def largest_pass_bytes(
    config: ModelConfig, *, dtype: str, max_rows: int, max_sequences: int, has_logits: bool = True
) -> int:
    """Return about what a device's largest pass takes beside weights and cache.

    config: of what the device has. has_logits: whether it has the float32 logits of all tokens,
    and the copies that choosing makes of them: those of up to 16 rows for each sequence.
    """
    size = _BYTES[config.dtype if dtype == "auto" else dtype]
    heads = config.num_query_heads + 2 * config.num_kv_heads
    width = 3 * config.hidden_size + (heads + config.num_query_heads) * config.head_dim
    inner = config.intermediate_size
    if config.experts is not None:
        inner = max(inner, config.experts.inner_size * config.experts.routing.num_chosen)
    num_logits = min(max_rows, 16 * max_sequences) * config.vocab_size * config.num_ranks
    return max_rows * (width + 3 * inner) * size + has_logits * num_logits * 4 * 4


def _recurrent_parameters(config: ModelConfig) -> int:
    """Return the parameters of recurrent layers, without their MLPs, and of attention's gates."""
    hidden, shape = config.hidden_size, config.recurrence
    num_parameters = 0
    if shape is not None:
        per_column = shape.conv_size + 2 * shape.value_size + 2 * shape.num_value_heads + 2
        each = hidden * per_column + shape.num_taps * shape.conv_size
        num_parameters = config.num_recurrent_layers * each
    if config.has_output_gate:
        num_gated = config.num_layers - config.num_recurrent_layers
        num_parameters += num_gated * hidden * config.num_query_heads * config.head_dim
    return num_parameters
