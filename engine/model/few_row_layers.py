"""A decoder's layers in passes of few rows on a GPU: seven launches each.

The norms, the gate and the additions belong to the products' kernels (`split_k_linear`). So a layer
is a product, the rotation that writes the cache, attention in two kernels, and three more products:
one that adds to the residual stream, one with the gate, one that adds again.
"""

from torch import Tensor

from outrider.engine.model.config import ModelConfig
from outrider.engine.model.layer_attention import LayerAttention, SharedInputs
from outrider.engine.model.layers import GatedMlp, Layer
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.rms_norm import RmsNorm, rms_norm
from outrider.kernels.layers.split_k_linear import (
    FEW_ROWS,
    HalfNormed,
    SplitScratch,
    can_split,
    split_k_add,
    split_k_add_norm,
    split_k_linear,
    split_shape,
)
from outrider.kernels.layers.taps import Taps


class FewRowLayers:
    """The layers of a model of which every layer can run so; made by `of`."""

    def __init__(self, layers: tuple[Layer, ...], attend: LayerAttention) -> None:
        self._attend = attend
        self._layers = tuple(_FewRowLayer(layer) for layer in layers)
        first = self._layers[0]
        self._scratch = SplitScratch(
            _weight(first.qkv).device,
            [
                split_shape(_weight(product), is_gated=product is layer.gate_up)
                for layer in self._layers
                for product in (layer.qkv, layer.output, layer.gate_up, layer.down)
            ],
        )

    @classmethod
    def of(
        cls,
        layers: tuple[Layer, ...],
        config: ModelConfig,
        attend: LayerAttention,
        *,
        deterministic: bool,
    ) -> "FewRowLayers | None":
        """Return the layers; None where some have parts that these kernels do not know.

        And in deterministic mode, where a row's bits are to be those that it has among many rows.
        """
        is_plain = not (config.is_parallel or config.has_output_gate)
        if deterministic or not is_plain or config.residual_scale != 1.0 or not layers:
            return None
        return cls(layers, attend) if all(_is_known(layer) for layer in layers) else None

    @staticmethod
    def can_run(num_rows: int, here: SharedInputs) -> bool:
        """True for passes of few rows without adapters, with Triton's kernels."""
        return here.is_fused and here.lora is None and num_rows <= FEW_ROWS

    def run(
        self,
        index: int,
        normed: HalfNormed | None,
        residual: Tensor,
        here: SharedInputs,
        some_rows: Tensor | None,
        taps: Taps | None,
    ) -> tuple[HalfNormed | None, Tensor]:
        """Return the rows for the next layer's first product, and the residual stream behind this.

        `normed`: what the layer before this returned, None for the first; `residual`: the stream,
        [n, width], changed in place where some_rows is None; others as `_run_layer` takes them.
        """
        layer, scratch = self._layers[index], self._scratch
        if taps is not None:
            taps.note(index, residual)
        rows: Tensor | HalfNormed | None = normed
        if rows is None:
            rows = rms_norm(residual, layer.before_attention.weight, layer.before_attention.eps)
        projected = split_k_linear(rows, layer.qkv, scratch)
        attended = self._attend.attend(layer.whole, index, projected, here)
        if some_rows is not None:
            attended = attended.index_select(0, some_rows)
            residual = residual.index_select(0, some_rows)
        half = split_k_add_norm(attended, layer.output, scratch, residual, layer.before_mlp)
        gated = split_k_linear(half, layer.gate_up, scratch, activation=layer.activation)
        if index + 1 == len(self._layers):
            split_k_add(gated, layer.down, scratch, residual)
            return None, residual
        norm = self._layers[index + 1].before_attention
        return split_k_add_norm(gated, layer.down, scratch, residual, norm), residual


class _FewRowLayer:
    """A layer's parts, of the kinds that `_is_known` has found them to be."""

    __slots__ = (
        "activation", "before_attention", "before_mlp", "down", "gate_up", "output", "qkv", "whole",
    )  # fmt: skip

    def __init__(self, layer: Layer) -> None:
        mlp = layer.mlp
        assert isinstance(mlp, GatedMlp)
        self.whole = layer
        self.before_attention, self.before_mlp = (
            _norm(layer.before_attention),
            _norm(layer.before_mlp),
        )
        self.qkv, self.output = _linear(layer.qkv), _linear(layer.output)
        self.gate_up, self.down = _linear(mlp.gate_up), _linear(mlp.down)
        self.activation = mlp.activation


def _is_known(layer: Layer) -> bool:
    mlp = layer.mlp
    return (
        isinstance(mlp, GatedMlp)
        and isinstance(layer.before_attention, RmsNorm)
        and isinstance(layer.before_mlp, RmsNorm)
        and layer.after_attention is None
        and layer.after_mlp is None
        and layer.row_norms is None
        and layer.recurrence is None
        and all(map(can_split, (layer.qkv, layer.output, mlp.gate_up, mlp.down)))
    )


def _norm(norm: object) -> RmsNorm:
    assert isinstance(norm, RmsNorm)
    return norm


def _linear(product: object) -> Linear:
    assert isinstance(product, Linear)
    return product


def _weight(product: Linear) -> Tensor:
    assert product.plain_weight is not None
    return product.plain_weight
