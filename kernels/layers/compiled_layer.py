"""A decoder layer as the compiled library runs it (layer.h)."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.cpu.structs import LayerStruct
from outrider.kernels.layers.compiled_rows import ACTIVATIONS, CompiledNorm
from outrider.kernels.layers.gated_mul import Activation
from outrider.kernels.layers.rms_norm import RmsNorm


class CompiledLayer:
    """A layer with a norm before attention and one before its gated feed-forward part."""

    __slots__ = ("_held", "address")

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
        """`products`: of queries, keys and values together; attention's output; gate and up; down.

        `heads`: numbers of query and key-value heads, and their size; `scale`, `softcap`:
        attention's.
        """
        assert product_support().library is not None, "its parts are compiled"
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
