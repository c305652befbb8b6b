"""A decoder layer in one call of the compiled library (layer.h).

The same functions run in the same order as where a caller runs them one by one, so the bits are the
same. What is spared is the way through Python between them, which takes as long as a tenth of a
large model's pass and half of a small one's.
"""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.cpu.panel_linear import PanelLinear
from kernels.cpu.product_library import LayerCall, LayerStruct, product_support
from kernels.cpu.row_attention import RowKeys
from kernels.layers.compiled_rows import ACTIVATIONS, CompiledNorm
from kernels.layers.gated_mul import Activation
from kernels.layers.lora import CompiledLoraRows, Projection
from kernels.layers.rms_norm import RmsNorm

# Beyond, Python's share of a pass is nothing, and torch's allocator keeps what a layer works in.
MAX_ROWS: Final = 128


class CompiledLayer:
    """A layer with a norm before attention and one before its gated feed-forward part."""

    __slots__ = ("_held", "_instruction_set", "_library", "address")

    def __init__(  # noqa: PLR0913 - a layer has so many parts
        self,
        *,
        products: Sequence[PanelLinear],
        norms: tuple[CompiledNorm, CompiledNorm],
        head_norm: RmsNorm | None,
        sinks: Tensor | None,
        activation: Activation,
        heads: tuple[int, int, int],
        scale: float,
        softcap: float | None,
    ) -> None:
        """products: of queries, keys and values together; attention's output; gate and up; down.

        heads: numbers of query and key-value heads, and their size; scale, softcap: attention's.
        """
        support = product_support()
        assert support.library is not None, "its parts are compiled"
        self._library = support.library
        self._instruction_set = support.instruction_set
        kinds, addresses, threads = zip(*(each.compiled for each in products), strict=True)
        _, output, gate_up, _ = products
        head_weight = None if head_norm is None else head_norm.scaled_weight
        struct = LayerStruct(
            hidden=output.out_features,
            inner=gate_up.out_features // 2,
            num_query_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=heads[2],
            products=addresses,
            max_threads=threads,
            kinds=kinds,
            attention_norm=norms[0].scaled_weight.data_ptr(),
            mlp_norm=norms[1].scaled_weight.data_ptr(),
            head_norm=None if head_weight is None else head_weight.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            attention_offset=norms[0].squared_offset,
            mlp_offset=norms[1].squared_offset,
            head_offset=0.0 if head_norm is None else heads[2] * head_norm.eps,
            scale=scale,
            softcap=softcap or 0.0,
            activation=ACTIVATIONS[activation],
        )
        # The library has addresses only: these keep what stands there.
        self._held = (struct, tuple(products), norms, head_weight, sinks)
        self.address = ctypes.addressof(struct)

    def run(self, call: LayerCall) -> None:
        """Run it. Raises IndexError for a position or slot that does not exist."""
        is_right = self._library.run_layer(
            self.address, ctypes.addressof(call), self._instruction_set, torch.get_num_threads()
        )
        if not is_right:
            raise IndexError("a row's position or its slot in the cache does not exist")


class LayerRows:
    """Rows of a pass on their way through compiled layers.

    residual: bfloat16 [n, hidden], contiguous; it is added to. positions: int64 [n], contiguous.
    """

    __slots__ = ("_call", "_held", "residual", "update")

    def __init__(
        self, residual: Tensor, positions: Tensor, lora: CompiledLoraRows | None = None
    ) -> None:
        """lora: the rows' adapters; layers are those of a model, from its first on."""
        self.residual = residual
        self.update = torch.empty_like(residual)
        """[n, hidden]: what the last layer adds to the residual stream; not added yet."""
        self._held: tuple[object, ...] = (positions, lora)
        self._call = LayerCall(
            num_rows=len(residual),
            update=self.update.data_ptr(),
            residual=residual.data_ptr(),
            positions=positions.data_ptr(),
            lora=None if lora is None else ctypes.addressof(lora.struct),
            is_first=True,
        )

    def run(
        self,
        layer: CompiledLayer,
        *,
        slots: Tensor,
        caches: tuple[Tensor, Tensor],
        table: Tensor | None,
        keys: RowKeys,
    ) -> None:
        """Pass through a layer.

        slots: int64 [n], contiguous; caches: bfloat16, [blocks, block_size, heads, head_dim] each,
        contiguous; table: of the rotation, None for none.
        """
        call, (k_cache, v_cache) = self._call, caches
        call.slots, call.num_slots = slots.data_ptr(), k_cache.shape[0] * k_cache.shape[1]
        call.keys, call.values = k_cache.data_ptr(), v_cache.data_ptr()
        call.table = None if table is None else table.data_ptr()
        call.num_positions = 0 if table is None else len(table)
        call.attention = ctypes.addressof(keys.struct)
        layer.run(call)
        call.is_first = False
        call.lora_site += len(Projection)
