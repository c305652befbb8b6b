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
    """A model's sizes."""

    name: str
    num_parameters: int
    num_idle_parameters: int = 0
    """Of the experts that a token does not choose."""
    weight_bytes: int
    kv_bytes_per_token: int
    """Of all layers, keys and values."""
    windowed_kv_bytes: int = 0
    """The part of the layers that keep only `window` tokens."""
    window: int | None = None
    line_bytes: int = 0
    """Of recurrent layers, for each answer."""
    state_bytes: int = 0
    """Of recurrent layers, for each state of an answer."""
    attention_flops_per_key: int
    """Of one row, for each token that it sees, in all layers."""
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

        `scheme`: how weights are rounded. `decodes`: whether quantised weights become plain ones,
        though products could hold them as stored.
        """
        bits = None if decodes or scheme is not None else stored_bits(config)
        if dtype == "auto":
            dtype = _COMPUTED if bits is not None and config.dtype == "float16" else config.dtype
        if dtype != _COMPUTED:
            bits = None
        dtype = dtype if scheme is None else _COMPUTED
        num_parameters, num_idle = _parameters(config)
        full_kv_bytes, windowed_kv_bytes = _kv_bytes(config, dtype, kv_dtype)
        width = config.num_query_heads * config.head_dim
        num_attending = config.num_layers - config.num_recurrent_layers
        line_bytes, state_bytes = config.recurrent_bytes(input_bytes=_BYTES[dtype])
        return cls(
            name=model_name(config.model_id),
            num_parameters=num_parameters,
            num_idle_parameters=num_idle,
            weight_bytes=_weight_bytes(config, num_parameters, dtype, scheme, bits),
            kv_bytes_per_token=full_kv_bytes + windowed_kv_bytes,
            windowed_kv_bytes=windowed_kv_bytes,
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

    `config`: of what the device has. `has_logits`: whether it has the float32 logits of all tokens,
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


def _parameters(config: ModelConfig) -> tuple[int, int]:
    """Return a model's parameters, and those of them that a token's pass leaves idle."""
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
    return config.num_parameters or num_parameters, num_idle


def _weight_bytes(
    config: ModelConfig,
    num_parameters: int,
    dtype: str,
    scheme: SchemeName | None,
    bits: float | None,
) -> int:
    """Return the bytes of all weights; `bits`: of a weight that stays as it is stored.

    Where `scheme` rounds weights, the table that tokens are looked up in stays, and a head that
    shares it gets a rounded copy, of 8 bits in every scheme. Narrow models stay.
    """
    embedding = config.vocab_size * config.hidden_size
    tables = embedding * (1 if config.tie_word_embeddings else 2)
    if bits is not None:
        return tables * _BYTES[dtype] + int((num_parameters - tables) * bits / 8)
    if scheme is not None and config.hidden_size >= MIN_ROUNDED_SIDE:
        rounded = int((num_parameters - tables) * _ROUNDED_BITS[scheme] / 8)
        return embedding * (_BYTES[dtype] + 1) + rounded
    return num_parameters * _BYTES[dtype]


def _kv_bytes(config: ModelConfig, dtype: str, kv_dtype: str) -> tuple[int, int]:
    """Return a token's keys and values in the layers without a window, and in those with one."""
    full = windowed = 0
    for layer in config.layers:
        if layer.is_recurrent:
            continue
        heads = config.heads(windowed=layer.window is not None)
        head_bytes = heads.head_dim * _BYTES[dtype]
        if kv_dtype == FP8:
            head_bytes = heads.head_dim + _SCALE_BYTES
        if layer.window is None:
            full += 2 * heads.num_kv_heads * head_bytes
        else:
            windowed += 2 * heads.num_kv_heads * head_bytes
    return full, windowed


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
