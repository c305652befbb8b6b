"""A decoder's description: its shape, and how its layers are built."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from outrider.engine.cache.recurrent_lines import LINE_ROWS
from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.quantised.formats import WeightFormat
from outrider.kernels.experts.grouped_mlp import GateKind
from outrider.kernels.experts.route import RoutingRule
from outrider.kernels.layers.gated_mul import Activation
from outrider.kernels.layers.rope import RopeConfig

_SIZES: Final = (
    *("hidden_size", "num_query_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    *("vocab_size", "max_position_embeddings"),
)
_MAX_SIZE: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A layer: its rotation, its window, its kind of MLP."""

    rope: RopeConfig
    window: int | None = None
    """Tokens; None for full attention."""
    is_sparse: bool = False
    """A mixture of experts."""
    is_recurrent: bool = False
    """A state goes from row to row (`ModelConfig.recurrence`) in place of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The names of a layer's tensors in the checkpoint, below "model.layers.N.".

    A norm without a name does not exist: models differ in whether attention and MLP are normalised
    before, after, or around. Projections of several names are concatenated by rows.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of a mixture's tensors. `expert`: of one, with {} for its number."""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str | None = None
    correction: str | None = None
    """Added to the router's scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixtures of a model's sparse layers."""

    num_experts: int
    inner_size: int
    routing: RoutingRule
    gate: GateKind = "silu"
    shared_size: int = 0
    """Inner size of the MLP that every row goes through; 0 for none."""
    router_bias: bool = False
    is_stacked: bool = False
    """All experts are in one tensor, as gpt-oss has them, with biases."""
    names: ExpertNames = ExpertNames()

    def __post_init__(self) -> None:
        """Raise ValueError for a choice that cannot be made."""
        if not 1 <= self.routing.num_chosen <= self.num_experts:
            raise ValueError(
                f"{self.routing.num_chosen} experts a token cannot be chosen of {self.num_experts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The shape of gated delta rule layers (Yang et al., Gated Delta Networks, 2024).

    Each value head has a state of key_dim x value_dim; key heads serve several of them.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    """Rows that the convolution sees, its own included."""
    is_grouped: bool = False
    """The checkpoint has one key head's projections after the other's, as Qwen3-Next does."""

    def __post_init__(self) -> None:
        """Raise ValueError for heads that cannot be shared out, and for taps that are too few."""
        if self.num_taps < 2:
            raise ValueError(f"a convolution over {self.num_taps} rows sees no earlier ones")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_value_heads} value heads cannot be shared out over "
                f"{self.num_key_heads} key heads"
            )

    @property
    def key_size(self) -> int:
        """Return the size of all key heads of a row."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Return the size of all value heads of a row."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Return the channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The heads of a layer."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The description of a decoder, which `outrider.engine.model.decoder` builds and runs."""

    model_id: str
    """The folder or hub id that it was read from."""
    architecture: str
    is_native: bool = True
    """False: transformers' own modules run it."""
    is_text_part: bool = False
    """It is the text part of a checkpoint that takes images, too."""
    num_ranks: int = 1
    """Ranks that share the model; heads and inner sizes are one rank's."""
    weight_format: WeightFormat | None = None
    """None: weights are stored as they are computed with."""
    num_parameters: int | None = None
    """None: follows from what is below."""
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    full_heads: HeadShape | None = None
    """The heads of layers without a window, where theirs differ."""
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    recurrence: Recurrence | None = None
    """The shape of the recurrent layers."""
    names: TensorNames = TensorNames()
    ignored_prefixes: tuple[str, ...] = ()
    """Beginnings of the names of tensors that nothing here reads."""
    # ---- norms
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_eps: float
    norm_offset: float = 0.0
    """1 where a checkpoint stores weight - 1."""
    qk_norm: Literal["head", "row"] | None = None
    """Over each head, or over a row's heads together."""
    # ---- projections
    attention_bias: bool = False
    """Queries, keys and values have biases."""
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    experts: ExpertsConfig | None = None
    """The mixtures of the sparse layers."""
    is_parallel: bool = False
    """Attention and MLP read the same normalised rows."""
    # ---- scales; None: the usual head_dim ** -0.5
    attention_scale: float | None = None
    attention_softcap: float | None = None
    has_output_gate: bool = False
    """Attention's output is gated, by rows behind each query head's."""
    has_sinks: bool = False
    """A score without a value joins each head's softmax."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    # ---- tokens
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    dtype: str = "float32"
    """The checkpoint's own: "bfloat16", "float16" or "float32"."""

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for shapes that make no sense."""
        for name in _SIZES:
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= _MAX_SIZE:
                raise UnsupportedModelError(
                    f"{self.model_id}: {name} = {size!r} is not a size from 1 to {_MAX_SIZE}."
                )
        if not (isinstance(self.norm_eps, int | float) and 0.0 <= self.norm_eps <= 1.0):
            raise UnsupportedModelError(
                f"{self.model_id}: norm_eps = {self.norm_eps!r} is not a number from 0 to 1."
            )
        if self.num_query_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.model_id}: {self.num_query_heads} query heads cannot be shared out over "
                f"{self.num_kv_heads} key-value heads."
            )
        if len({layer.window for layer in self.layers} - {None}) > 1:
            raise UnsupportedModelError(
                f"{self.model_id} has layers with windows of different sizes; the engine has one "
                "size a model."
            )

    def heads(self, *, windowed: bool) -> HeadShape:
        """Return the heads of the layers with a window, or of those without."""
        if self.full_heads is not None and not windowed:
            return self.full_heads
        return HeadShape(
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    @property
    def num_recurrent_layers(self) -> int:
        """Return the number of layers that keep a state in place of keys."""
        return sum(layer.is_recurrent for layer in self.layers)

    def recurrent_bytes(self, *, input_bytes: int) -> tuple[int, int]:
        """Return the memory of an answer's line and of a state, over all recurrent layers.

        `input_bytes`: of a number of the computing type; states and rows are float32.
        """
        shape = self.recurrence
        if shape is None:
            return 0, 0
        row = 4 * (shape.key_size + shape.value_size + shape.num_value_heads)
        state = 4 * shape.value_size * shape.key_dim
        tail = (shape.num_taps - 1) * shape.conv_size * input_bytes
        line = LINE_ROWS * (row + shape.conv_size * input_bytes)
        return self.num_recurrent_layers * line, self.num_recurrent_layers * (state + tail)

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None where all layers see everything."""
        return next((layer.window for layer in self.layers if layer.window is not None), None)

    @property
    def has_mixed_windows(self) -> bool:
        """True if some layers have a window and others have none."""
        return len({layer.window for layer in self.layers}) > 1

    def check_taps(self, layers: Sequence[int]) -> None:
        """Raise ValueError unless the model has these hidden states and each is named once.

        They are numbered as `outrider.kernels.layers.taps.Taps` says.
        """
        wrong = [layer for layer in layers if not 0 <= layer <= self.num_layers]
        if wrong:
            raise ValueError(
                f"{self.model_id} has no hidden states {wrong}: they are numbered from 0, the "
                f"embedding's rows, to {self.num_layers}, the rows behind the last norm."
            )
        if len(set(layers)) < len(layers):
            raise ValueError(f"the hidden states {list(layers)} are to be named once each.")
