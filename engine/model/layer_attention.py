"""Attention of a decoder's layers over the paged KV cache, or what stands in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.layers import Layer
from outrider.engine.model.recurrent_cache import RecurrentPass
from outrider.kernels.attention.paged_attention import Plan, paged_attention
from outrider.kernels.kv.rope_write_kv import rope_write_kv
from outrider.kernels.kv.write_kv import write_kv_reference
from outrider.kernels.layers.compiled_pass import PassRows
from outrider.kernels.layers.compiled_rows import place_heads
from outrider.kernels.layers.lora import LayerLora, LoraRows, Projection, project
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import RotaryTable, rotate
from outrider.kernels.layers.row_invariant_ops import row_invariant_rotate


@dataclass(slots=True, kw_only=True)
class SharedInputs:
    """The inputs that a pass's layers share."""

    positions: Tensor
    slots: tuple[Tensor, Tensor]
    """The slots for layers without a window, and for those with one."""
    attention: Plan
    kv_cache: KVCache
    is_fused: bool
    """Triton's kernels turn heads by position."""
    is_placed: bool
    """The CPU's compiled kernels turn heads by position."""
    lora: LoraRows | None
    turns: tuple[tuple[Tensor, Tensor], ...] = ()
    """(cos, sin) of each rotary table, [n, 1, head_dim] each, gathered for the others."""
    rows: PassRows | None = None
    """For layers that one call of the compiled library runs; None where none can."""
    recurrent: RecurrentPass | None = None

    def layer_lora(self, index: int) -> LayerLora | None:
        """Return the rows' adapters in a layer; None where no row has one."""
        return None if self.lora is None else LayerLora(self.lora, index)


class LayerAttention:
    """Attention for the shapes and rotations of one model; the layers bring their weights.

    `rotary`: the model's tables, each rotation's once; `scale`: of the scores.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotary: Sequence[RotaryTable],
        *,
        scale: float,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._rotary = tuple(rotary)
        self._scale = scale
        kinds = accumulate(layer.is_recurrent for layer in config.layers)
        self._recurrent_number = tuple(number - 1 for number in kinds)
        self._rotate = row_invariant_rotate if deterministic else rotate

    def __call__(self, layer: Layer, index: int, normed: Tensor, here: SharedInputs) -> Tensor:
        """Attend with layer `index` of the cache, up to the output projection: [n, any].

        `normed`: [n, width of the layer's projection].
        """
        projected = project(layer.qkv, normed, Projection.QKV, here.layer_lora(index))
        return self.attend(layer, index, projected, here)

    def attend(self, layer: Layer, index: int, projected: Tensor, here: SharedInputs) -> Tensor:
        """Do what `__call__` does behind the layer's projection. [n, any] -> [n, any]."""
        if layer.recurrence is not None:
            assert here.recurrent is not None, "the pass has no plan for recurrent layers"
            return layer.recurrence(projected, here.recurrent, self._recurrent_number[index])
        heads, gate = self._heads(layer, projected)
        query = self._placed(layer, index, heads, here)
        plan = here.attention
        if plan.full is not None and not layer.has_window:
            plan = plan.full
        k_cache, v_cache = here.kv_cache.layers[index]
        k_scale, v_scale = here.kv_cache.layer_scales[index]
        attended = paged_attention(
            query,
            k_cache,
            v_cache,
            plan,
            scale=self._scale,
            k_scale=k_scale,
            v_scale=v_scale,
            softcap=self._config.attention_softcap,
            sinks=layer.sinks,
        )
        attended = attended.view(len(projected), -1)
        return attended if gate is None else attended.mul_(gate.sigmoid())

    def keep(self, layer: Layer, index: int, normed: Tensor, here: SharedInputs) -> None:
        """Write the rows' keys and values to the cache, where nothing else of them matters."""
        projected = project(layer.qkv, normed, Projection.QKV, here.layer_lora(index))
        heads, _ = self._heads(layer, projected)
        self._placed(layer, index, heads, here)

    def _heads(self, layer: Layer, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries, keys and values, [n, heads, head_dim], and what gates the output."""
        config = self._config
        gate: Tensor | None = None
        if config.has_output_gate:
            num_gated = config.num_query_heads * config.head_dim
            gate = projected[:, -num_gated:]
            projected = projected[:, :-num_gated].contiguous()
        if layer.row_norms is not None:
            self._normalise_rows(projected, layer.row_norms)
        return projected.view(len(projected), -1, config.head_dim), gate

    def _placed(self, layer: Layer, index: int, heads: Tensor, here: SharedInputs) -> Tensor:
        """Turn the heads by position, write keys and values to the cache, return the queries.

        `heads`: [n, query, key and value heads, head_dim].
        """
        config = self._config
        num_query_heads = config.num_query_heads
        k_cache, v_cache = here.kv_cache.layers[index]
        k_scale, v_scale = here.kv_cache.layer_scales[index]
        slots = here.slots[layer.has_window]
        if here.is_fused:
            return rope_write_kv(
                heads,
                here.positions,
                slots,
                self._rotary[layer.rotation],
                k_cache,
                v_cache,
                num_query_heads=num_query_heads,
                qk_norm=layer.head_norm,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        if here.is_placed:
            return place_heads(
                heads,
                here.positions,
                slots,
                self._rotary[layer.rotation],
                k_cache,
                v_cache,
                num_query_heads=num_query_heads,
                qk_norm=layer.head_norm,
            )
        num_rotated = num_query_heads + config.num_kv_heads
        query_key, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.head_norm is not None:
            query_key = layer.head_norm(query_key)
        if self._rotary[layer.rotation].turns:
            query_key = self._rotate(query_key, *here.turns[layer.rotation])
        query, key = query_key[:, :num_query_heads], query_key[:, num_query_heads:]
        write_kv_reference(key, value, k_cache, v_cache, slots, k_scale, v_scale)
        return query

    def _normalise_rows(self, projected: Tensor, norms: tuple[RmsNorm, RmsNorm]) -> None:
        """Normalise all query heads of a row together, and all its key heads. In place."""
        query_size = self._config.num_query_heads * self._config.head_dim
        kv_size = self._config.num_kv_heads * self._config.head_dim
        query, key = projected[:, :query_size], projected[:, query_size : query_size + kv_size]
        query.copy_(norms[0](query))
        key.copy_(norms[1](key))
