"""Layers that one call of the compiled library can run, and a pass through all of them."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.kv_cache import KVCache
from outrider.engine.model.layers import GatedMlp, Layer
from outrider.kernels.attention.paged_attention import Plan
from outrider.kernels.attention.row_plan import RowPlan
from outrider.kernels.cpu.panel_linear import PanelLinear
from outrider.kernels.layers.compiled_layer import CompiledLayer
from outrider.kernels.layers.compiled_pass import (
    FEW_SPARE_ROWS,
    MAX_ROWS,
    CompiledPass,
    LayerCache,
    ModelCaches,
    ModelEnds,
    PassRows,
    WholePass,
)
from outrider.kernels.layers.compiled_rows import ACTIVATIONS, CompiledNorm
from outrider.kernels.layers.lora import CompiledLoraRows, LoraRows
from outrider.kernels.layers.rope import RotaryTable
from outrider.kernels.layers.taps import Taps


class CompiledLayers:
    """All layers of a model, with what stands before and behind them where that is compiled too."""

    def __init__(
        self,
        layers: Sequence[tuple[Layer, CompiledLayer]],
        rotary: Sequence[RotaryTable],
        ends: ModelEnds | None,
    ) -> None:
        self._layers = tuple(layer for layer, _ in layers)
        self._pass = CompiledPass([compiled for _, compiled in layers], ends)
        self._tables = tuple(each.table if each.turns else None for each in rotary)
        self._caches: WeakKeyDictionary[KVCache, ModelCaches] = WeakKeyDictionary()

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        config: ModelConfig,
        rotary: Sequence[RotaryTable],
        *,
        scale: float,
        ends: ModelEnds | None = None,
    ) -> "CompiledLayers | None":
        """Return them, or None where a layer has a part that is not compiled.

        `scale`: attention's.
        """
        if config.is_parallel or config.residual_scale != 1.0:
            return None
        found = []
        for layer in layers:
            compiled = _compiled(layer, config, scale)
            if compiled is None:
                return None
            found.append((layer, compiled))
        return cls(found, rotary, ends)

    @staticmethod
    def can_run(num_rows: int, plan: Plan) -> bool:
        """True for a pass of so many rows with such a plan of attention."""
        return num_rows <= MAX_ROWS and isinstance(plan, RowPlan)

    @property
    def is_whole(self) -> bool:
        """True if what stands before and behind the layers is compiled too."""
        return self._pass.is_whole

    def runs_whole(self, num_rows: int, wanted: Tensor | None) -> bool:
        """True if `run_whole` is the way: all is compiled, and few rows are computed in vain.

        A chunk of a prompt in which no row wants logits has nothing for the end of a pass.
        """
        num_wanted = num_rows if wanted is None else wanted.shape[0]
        return self._pass.is_whole and 0 < num_wanted >= num_rows - FEW_SPARE_ROWS

    def run(
        self,
        residual: Tensor,
        rows: PassRows,
        kv_cache: KVCache,
        *,
        count: int,
        taps: Taps | None = None,
    ) -> Tensor | None:
        """Run the first `count` layers; return what the last of them adds to the residual stream.

        `residual`: [n, hidden]; what the others add is added to it. Returns None where `count` is
        0. `taps`: the hidden states in front of these layers are written to it.
        """
        if not count:
            return None
        return self._pass.run_layers(
            residual, rows, self._caches_in(kv_cache), count=count, taps=taps
        )

    def run_whole(
        self,
        token_ids: Tensor,
        rows: PassRows,
        kv_cache: KVCache,
        *,
        wanted: Tensor | None,
        logits_out: Tensor | None,
        taps: Taps | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the head's product, float32 [m, vocab_size], and the normalised rows before it.

        The arguments are those of `DecoderModel.forward`.
        """
        return self._pass.run(
            token_ids.contiguous(),
            rows,
            self._caches_in(kv_cache),
            wanted=wanted,
            logits_out=logits_out,
            taps=taps,
        )

    def whole(self, kv_cache: KVCache) -> WholePass | None:
        """Return what the library needs to run passes itself; None where it cannot run all."""
        return self._pass.whole(self._caches_in(kv_cache))

    def _caches_in(self, kv_cache: KVCache) -> ModelCaches:
        """Return where the layers' caches lie, which stays as long as the cache is there."""
        caches = self._caches.get(kv_cache)
        if caches is None:
            caches = self._caches[kv_cache] = ModelCaches(
                [
                    LayerCache(
                        keys=keys,
                        values=values,
                        table=self._tables[layer.rotation],
                        has_window=layer.has_window,
                    )
                    for layer, (keys, values) in zip(self._layers, kv_cache.layers, strict=True)
                ]
            )
        return caches


def pass_rows(
    positions: Tensor, slots: tuple[Tensor, Tensor], plan: Plan, lora: LoraRows | None
) -> PassRows:
    """Return the rows of a pass that `CompiledLayers.can_run`; `slots`: as in `PassRows`."""
    assert isinstance(plan, RowPlan)
    assert lora is None or isinstance(lora, CompiledLoraRows), "rows are bfloat16 here"
    full = plan if plan.full is None else plan.full
    return PassRows(
        positions=positions.contiguous(),
        slots=(slots[0].contiguous(), slots[1].contiguous()),
        keys=(full.keys, plan.keys),
        lora=lora,
    )


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
