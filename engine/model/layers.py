"""A decoder layer's weights, read by the names that its family gives them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.engine.errors import UnsupportedModelError
from outrider.engine.model.config import ModelConfig
from outrider.engine.model.delta_net import DeltaNet, read_delta_net
from outrider.engine.model.quantised.scheme import Weight, WeightSource
from outrider.engine.model.shard import WHOLE, Shard, SummedMlp, SummedProduct
from outrider.engine.model.weights import CheckpointReader
from outrider.kernels.layers.gated_mul import Activation, gated_mul
from outrider.kernels.layers.layer_norm import LayerNorm
from outrider.kernels.layers.lora import LayerLora, Projection, project
from outrider.kernels.layers.rms_norm import RmsNorm, add_rms_norm, rms_norm
from outrider.kernels.layers.rope import RopeConfig
from outrider.kernels.layers.row_invariant_linear import Product, make_linear, make_norm
from outrider.kernels.layers.row_invariant_ops import make_gate
from outrider.kernels.quantised.stored_weight import StoredWeight, joined

Norm = RmsNorm | LayerNorm
# A tied head gets a packed copy of the embedding table (look-ups need plain rows) while the copy
# is at most this share of the weights plus this many bytes: the plain product takes 2.3 times as
# long (Zen 5, 151936 x 1024 bfloat16, 1 to 16 rows: 24 to 30 ms against 10 to 12). Beyond, the
# one table serves both, because weights are to be held once.
_TIED_HEAD_COPY_SHARE = 0.15
_TIED_HEAD_COPY_BYTES = 128 << 20


def turned_rows(config: ModelConfig, rope: RopeConfig, num_rows: int) -> Tensor | None:
    """Return the order of a qkv projection's rows that the rotation wants; None for their own."""
    order = rope.dimension_order()
    if order is None:
        return None
    num_turned = config.num_query_heads + config.num_kv_heads
    heads = torch.arange(num_turned).unsqueeze(1) * config.head_dim
    rows = torch.arange(num_rows)
    rows[: num_turned * config.head_dim] = (heads + torch.tensor(order)).view(-1)
    return rows


class Mlp(Protocol):
    """The map between a layer's norms: [n, width] -> [n, width]."""

    def __call__(self, rows: Tensor, *, is_fused: bool, lora: LayerLora | None = None) -> Tensor:
        """Return the rows' outputs.

        `is_fused`: use Triton's kernels; `lora`: the rows' adapters.
        """


class GatedMlp:
    """A feed-forward layer: down(activation(gate(x)) * up(x)). [n, width] -> [n, width]."""

    __slots__ = ("_gate", "activation", "down", "gate_up")

    def __init__(
        self, gate_up: Product, down: Product, activation: Activation, *, deterministic: bool
    ) -> None:
        """`gate_up`: both projections, the gate's rows first."""
        self.gate_up = gate_up
        self.down = down
        self.activation: Activation = activation
        # Not the kernel's launcher: on the CPU, choosing is not free.
        self._gate = make_gate(activation, deterministic=deterministic)

    def __call__(self, rows: Tensor, *, is_fused: bool, lora: LayerLora | None = None) -> Tensor:
        """`is_fused`: Triton's kernel gates."""
        inner = project(self.gate_up, rows, Projection.GATE_UP, lora)
        gated = gated_mul(inner, self.activation) if is_fused else self._gate(inner)
        return project(self.down, gated, Projection.DOWN, lora)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of a decoder layer. A norm that is None does not exist."""

    before_attention: Norm | None
    qkv: Product
    head_norm: RmsNorm | None
    """Over each query and key head."""
    row_norms: tuple[RmsNorm, RmsNorm] | None
    """Over all query heads and all key heads of a row."""
    sinks: Tensor | None
    """float32 [num_query_heads]."""
    rotation: int
    """Index of the model's rotary table that turns its heads."""
    output: Product | SummedProduct
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Mlp
    after_mlp: Norm | None
    has_window: bool
    recurrence: DeltaNet | None = None
    """Stands between `qkv` and `output` in the place of attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReader:
    """Reads layers of one checkpoint."""

    reader: CheckpointReader
    config: ModelConfig
    """Describes the part of the model that `reader` reads."""
    ropes: tuple[RopeConfig, ...]
    """The model's rotations, each once."""
    weights: WeightSource
    """Makes what the products hold from what is read."""
    deterministic: bool
    sparse: Callable[[str], Mlp]
    """Reads the mixture of a layer, by its prefix."""
    shard: Shard = WHOLE
    """The part of the model that `reader` reads."""

    def read(self, index: int, *, qkv_width: int | None = None) -> Layer:
        """Return layer `index`; projections that read the same rows are fused.

        `qkv_width`: of the rows that queries, keys and values are made of; None for the model's.
        """
        config, names = self.config, self.config.names
        prefix = f"model.layers.{index}."
        if config.layers[index].is_recurrent:
            return self._recurrent(index, prefix)
        rope = config.layers[index].rope
        query_size = config.num_query_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        return Layer(
            before_attention=self._norm(prefix, names.before_attention),
            qkv=self._qkv(
                prefix, rope, (query_size, kv_size, kv_size), qkv_width or config.hidden_size
            ),
            head_norm=self._head_norm(prefix, rope) if config.qk_norm == "head" else None,
            row_norms=self._row_norms(prefix, rope) if config.qk_norm == "row" else None,
            sinks=self._sinks(prefix) if config.has_sinks else None,
            rotation=self.ropes.index(rope),
            output=self._output(prefix, query_size),
            after_attention=self._norm(prefix, names.after_attention),
            before_mlp=self._norm(prefix, names.before_mlp),
            mlp=self._mlp(index, prefix),
            after_mlp=self._norm(prefix, names.after_mlp),
            has_window=config.layers[index].window is not None,
        )

    def _recurrent(self, index: int, prefix: str) -> Layer:
        """Return a layer with a state; its projections of a row are one product, too."""
        config, names = self.config, self.config.names
        read = read_delta_net(self.reader, config, f"{prefix}linear_attn.")
        return Layer(
            before_attention=self._norm(prefix, names.before_attention),
            qkv=self._linear(self._weight(prefix, read.projections, read.projected)),
            head_norm=None,
            row_norms=None,
            sinks=None,
            rotation=0,
            output=self._product(
                prefix,
                ("linear_attn.out_proj",),
                (config.hidden_size,),
                read.net.shape.value_size,
                bias=False,
            ),
            after_attention=self._norm(prefix, names.after_attention),
            before_mlp=self._norm(prefix, names.before_mlp),
            mlp=self._mlp(index, prefix),
            after_mlp=self._norm(prefix, names.after_mlp),
            has_window=False,
            recurrence=read.net,
        )

    def norm(self, name: str) -> Norm:
        """Return the norm over the model's width that is stored under a whole name."""
        weight = self.reader.read(name, (self.config.hidden_size,))
        if self.config.norm_kind == "layer":
            return LayerNorm(weight, self.config.norm_eps)
        return self._rms_norm(weight)

    def head(self, embedding: Tensor) -> Product:
        """Return the product with the table of tokens, or with one of its own.

        `embedding`: [vocab_size, hidden_size], which a tied head has in common.
        """
        config, name, shape = self.config, "lm_head.weight", embedding.shape
        if not config.tie_word_embeddings:
            head = self.weights.weight(name, lambda: self.reader.read_weight(name, shape), [name])
            return self._linear(head)
        if name in self.reader and not self._is_copied(name, embedding):
            raise UnsupportedModelError(
                f"{config.model_id}: config.json says tie_word_embeddings, but lm_head.weight is "
                "another matrix than model.embed_tokens.weight. Set tie_word_embeddings to false "
                "to use it, or remove lm_head.weight from the weights' files."
            )
        spare_bytes = _TIED_HEAD_COPY_BYTES + _TIED_HEAD_COPY_SHARE * self.reader.total_bytes
        can_pack = embedding.nbytes <= spare_bytes
        table = "model.embed_tokens.weight"

        def read() -> Tensor | StoredWeight:
            may_keep = self.reader.may_keep_stored
            stored = self.reader.read_stored(table, shape) if may_keep else None
            return embedding if stored is None else stored

        head = self.weights.weight(name, read, ())
        return self._linear(head, pack=can_pack)

    # ---- parts ----------------------------------------------------------------------------

    def _output(self, prefix: str, query_size: int) -> Product | SummedProduct:
        config = self.config
        product = self._product(
            prefix, ("self_attn.o_proj",), (config.hidden_size,), query_size, config.output_bias
        )
        if self.shard.is_whole:
            return product
        return SummedProduct(product, self.shard, in_order=self.deterministic)

    def _mlp(self, index: int, prefix: str) -> Mlp:
        is_sparse = self.config.layers[index].is_sparse
        mlp = self.sparse(prefix) if is_sparse else self._dense(prefix)
        if self.shard.is_whole:
            return mlp
        return SummedMlp(mlp, self.shard, in_order=self.deterministic)

    def _dense(self, prefix: str) -> GatedMlp:
        config, names = self.config, self.config.names
        inner, width = config.intermediate_size, config.hidden_size
        return GatedMlp(
            self._product(prefix, names.gate_up, (inner, inner), width, config.mlp_bias),
            self._product(prefix, ("mlp.down_proj",), (width,), inner, config.mlp_bias),
            config.activation,
            deterministic=self.deterministic,
        )

    def _norm(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(f"{prefix}{name}.weight")

    def _rms_norm(self, weight: Tensor) -> RmsNorm:
        if self.config.norm_offset:
            # In float32: near 1 a half-precision weight has few digits left.
            weight = weight.float() + self.config.norm_offset
        return make_norm(
            weight,
            self.config.norm_eps,
            dtype=self.reader.dtype,
            deterministic=self.deterministic,
        )

    def _qkv(
        self, prefix: str, rope: RopeConfig, sizes: tuple[int, int, int], width: int
    ) -> Product:
        names = self.config.names.qkv
        query_size, kv_size, _ = sizes
        rows = turned_rows(self.config, rope, sum(sizes))
        if self.config.has_output_gate:
            # Gates lie behind each query head; they go behind the values.
            sizes = (2 * query_size, kv_size, kv_size)
            rows = self._gated_rows(rows, query_size, sum(sizes))

        def read() -> Tensor | StoredWeight:
            together = self._joined_weight(prefix, names, sizes, width)
            if rows is None:
                return together
            if isinstance(together, StoredWeight):
                return together.rows(rows.to(together.codes.device))
            return together.index_select(0, rows.to(together.device))

        weight, bias = self._weight(prefix, names, read), None
        if self.config.attention_bias:
            bias = self._joined(prefix, names, sizes, "bias")
            bias = bias if rows is None else bias.index_select(0, rows.to(bias.device))
        return self._linear(weight, bias)

    def _gated_rows(self, rows: Tensor | None, query_size: int, num_rows: int) -> Tensor:
        """Return the order of the rows with the gates last; `rows`: the order of the others."""
        heads = torch.arange(2 * query_size).view(-1, 2, self.config.head_dim)
        queries, gates = heads[:, 0].reshape(-1), heads[:, 1].reshape(-1)
        others = torch.cat((queries, torch.arange(2 * query_size, num_rows)))
        return torch.cat((others if rows is None else others[rows], gates))

    def _head_norm(self, prefix: str, rope: RopeConfig) -> RmsNorm:
        """Return the norm with a row of weights for each query and key head."""
        config, order = self.config, rope.dimension_order()
        rows = []
        for name, count in (("q_norm", config.num_query_heads), ("k_norm", config.num_kv_heads)):
            weight = self.reader.read(f"{prefix}self_attn.{name}.weight", (config.head_dim,))
            rows.append((weight if order is None else weight[order]).expand(count, -1))
        return self._rms_norm(torch.cat(rows))

    def _sinks(self, prefix: str) -> Tensor:
        return self.reader.read(f"{prefix}self_attn.sinks", (self.config.num_query_heads,)).float()

    def _row_norms(self, prefix: str, rope: RopeConfig) -> tuple[RmsNorm, RmsNorm]:
        config, order = self.config, rope.dimension_order()
        norms = []
        for name, count in (("q_norm", config.num_query_heads), ("k_norm", config.num_kv_heads)):
            size = count * config.head_dim
            weight = self.reader.read(f"{prefix}self_attn.{name}.weight", (size,))
            if order is not None:
                weight = weight.view(count, -1)[:, order].reshape(-1)
            norms.append(self._rms_norm(weight))
        return norms[0], norms[1]

    def _product(
        self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], width: int, bias: bool
    ) -> Product:
        """Return the product with the weights of `names`, of `sizes` rows together."""
        return self._linear(
            self._weight(prefix, names, lambda: self._joined_weight(prefix, names, sizes, width)),
            self._joined(prefix, names, sizes, "bias") if bias else None,
        )

    def _is_copied(self, name: str, tensor: Tensor) -> bool:
        """Return whether a file's tensor is the same as one that was read; it counts only once."""
        num_parameters = self.reader.num_parameters
        is_same = torch.equal(self.reader.read(name, tensor.shape), tensor)
        self.reader.num_parameters = num_parameters
        return is_same

    def _linear(self, weight: Weight, bias: Tensor | None = None, *, pack: bool = True) -> Product:
        """Return the product with a weight; of a scheme, one that keeps every row's bits."""
        keeps_bits = self.deterministic or self.weights.scheme is not None
        return make_linear(weight, bias, pack=pack, deterministic=keeps_bits)

    def _weight(
        self, prefix: str, names: tuple[str, ...], read: Callable[[], Tensor | StoredWeight]
    ) -> Weight:
        """Return the weight of the product that `names` make together."""
        tensors = [f"{prefix}{name}.weight" for name in names]
        return self.weights.weight(tensors[0], read, tensors)

    def _joined_weight(
        self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], width: int
    ) -> Tensor | StoredWeight:
        """Return weights one below the other, as they are stored where products hold them so."""
        tensors = [f"{prefix}{name}.weight" for name in names]
        if len(tensors) == 1:
            return self.reader.read_weight(tensors[0], (sum(sizes), width))
        if not self.reader.may_keep_stored:
            return self.reader.read_joined(tensors, sizes, width)
        parts = [
            self.reader.read_weight(tensor, (size, width))
            for tensor, size in zip(tensors, sizes, strict=True)
        ]
        stored = [part for part in parts if isinstance(part, StoredWeight)]
        together = joined(stored) if len(stored) == len(parts) else None
        if together is not None:
            return together
        dtype = self.reader.dtype
        return torch.cat(
            [part.decoded(dtype) if isinstance(part, StoredWeight) else part for part in parts]
        )

    def _joined(
        self, prefix: str, names: tuple[str, ...], sizes: tuple[int, ...], kind: str
    ) -> Tensor:
        """Return vectors one behind the other; a single name holds them all."""
        if len(names) == 1:
            return self.reader.read(f"{prefix}{names[0]}.{kind}", (sum(sizes),))
        parts = zip(names, sizes, strict=True)
        return torch.cat(
            [self.reader.read(f"{prefix}{name}.{kind}", (size,)) for name, size in parts]
        )


def normalise(
    norm: Norm | None, update: Tensor | None, residual: Tensor, *, is_fused: bool
) -> Tensor:
    """Return the norm of the residual stream, to which the update is added first. All: [n, width].

    Without a norm: the stream itself. `is_fused`: Triton's kernels run.
    """
    if norm is None:
        return residual if update is None else residual.add_(update)
    if is_fused and isinstance(norm, RmsNorm):
        if update is None:
            return rms_norm(residual, norm.weight, norm.eps)
        return add_rms_norm(update, residual, norm.weight, norm.eps)
    return norm(residual) if update is None else norm.add(update, residual)
