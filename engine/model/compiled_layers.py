"""Layers that one call of the compiled library can run, and a pass through all of them."""

from collections.abc import Sequence

from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.kv_cache import KVCache
from engine.model.layers import GatedMlp, Layer
from kernels.attention.paged_attention import Plan
from kernels.attention.row_plan import RowPlan
from kernels.cpu.panel_linear import PanelLinear
from kernels.layers.compiled_layer import MAX_ROWS, CompiledLayer, LayerRows
from kernels.layers.compiled_rows import ACTIVATIONS, CompiledNorm
from kernels.layers.lora import CompiledLoraRows, LoraRows
from kernels.layers.rope import RotaryTable


class CompiledLayers:
    """All layers of a model."""

    def __init__(
        self, layers: Sequence[tuple[Layer, CompiledLayer]], rotary: Sequence[RotaryTable]
    ) -> None:
        self._layers = tuple(layers)
        self._tables = tuple(each.table if each.turns else None for each in rotary)

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        config: ModelConfig,
        rotary: Sequence[RotaryTable],
        *,
        scale: float,
    ) -> "CompiledLayers | None":
        """Return them, or None where a layer has a part that is not compiled.

        scale: attention's.
        """
        if config.is_parallel or config.residual_scale != 1.0:
            return None
        found = []
        for layer in layers:
            compiled = _compiled(layer, config, scale)
            if compiled is None:
                return None
            found.append((layer, compiled))
        return cls(found, rotary)

    @staticmethod
    def can_run(num_rows: int, plan: Plan) -> bool:
        """True for a pass of so many rows with such a plan of attention."""
        return num_rows <= MAX_ROWS and isinstance(plan, RowPlan)

    def run(
        self,
        residual: Tensor,
        positions: Tensor,
        slots: tuple[Tensor, Tensor],
        plan: Plan,
        kv_cache: KVCache,
        *,
        count: int,
        lora: LoraRows | None = None,
    ) -> Tensor | None:
        """Run the first `count` layers; return what the last of them adds to the residual stream.

        residual: [n, hidden]; what the others add is added to it. slots: [n] each, of layers
        without a window and with one. lora: the rows' adapters. None for no layer.
        """
        assert isinstance(plan, RowPlan)
        assert lora is None or isinstance(lora, CompiledLoraRows), "rows are bfloat16 here"
        rows = LayerRows(residual, positions.contiguous(), lora)
        slots = (slots[0].contiguous(), slots[1].contiguous())
        for index, (layer, compiled) in enumerate(self._layers[:count]):
            keys = plan.keys if layer.has_window or plan.full is None else plan.full.keys
            rows.run(
                compiled,
                slots=slots[layer.has_window],
                caches=kv_cache.layers[index],
                table=self._tables[layer.rotation],
                keys=keys,
            )
        return rows.update if count else None


def _compiled(layer: Layer, config: ModelConfig, scale: float) -> CompiledLayer | None:
    mlp, norms = layer.mlp, (layer.before_attention, layer.before_mlp)
    if layer.after_attention or layer.after_mlp or layer.row_norms:
        return None
    if not isinstance(mlp, GatedMlp) or mlp.activation not in ACTIVATIONS:
        return None
    first, second = norms
    if not (isinstance(first, CompiledNorm) and isinstance(second, CompiledNorm)):
        return None
    products = []
    for each in (layer.qkv, layer.output, mlp.gate_up, mlp.down):
        if not isinstance(each, PanelLinear):
            return None
        products.append(each)
    return CompiledLayer(
        products=products,
        norms=(first, second),
        head_norm=layer.head_norm,
        sinks=layer.sinks,
        activation=mlp.activation,
        heads=(config.num_query_heads, config.num_kv_heads, config.head_dim),
        scale=scale,
        softcap=config.attention_softcap,
    )
