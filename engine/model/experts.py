"""The feed-forward layers of a mixture of experts, read by the names that its family gives them."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from outrider.engine.model.config import ExpertsConfig, ModelConfig
from outrider.engine.model.layers import GatedMlp
from outrider.engine.model.quantised.scheme import WeightSource
from outrider.engine.model.weights import CheckpointReader
from outrider.kernels.experts.expert_mlp import ExpertMlp, ExpertWeights
from outrider.kernels.experts.route import RoutingRule, route
from outrider.kernels.layers.lora import LayerLora
from outrider.kernels.layers.row_invariant_linear import Product, make_linear
from outrider.kernels.quantised.stored_weight import StoredWeight
from outrider.kernels.quantised.weight import QuantisedWeight

Weight = Tensor | QuantisedWeight
# Rows are spread to so many equal values: a vector loop leaves nothing of them over.
_SPREAD = 64


class SparseMlp:
    """A router, its experts, and perhaps a dense MLP beside them. [n, width] -> [n, width]."""

    __slots__ = ("_correction", "_experts", "_router", "_rule", "_shared", "_shared_gate")

    def __init__(
        self,
        *,
        router: Product,
        rule: RoutingRule,
        experts: ExpertMlp,
        correction: Tensor | None = None,
        shared: GatedMlp | None = None,
        shared_gate: Product | None = None,
    ) -> None:
        """`correction`: of the router's scores; `shared_gate`: how much of `shared` a row gets."""
        self._router = router
        self._rule = rule
        self._experts = experts
        self._correction = correction
        self._shared = shared
        self._shared_gate = shared_gate

    def __call__(self, rows: Tensor, *, is_fused: bool, lora: LayerLora | None = None) -> Tensor:
        """`is_fused`: Triton's kernels run; `lora`: None of its products takes adapters."""
        routed = route(self._router(rows), self._rule, self._correction)
        result = self._experts(rows, routed)
        if self._shared is None:
            return result
        shared = self._shared(rows, is_fused=is_fused)
        if self._shared_gate is not None:
            gate = self._shared_gate(rows).expand(-1, _SPREAD).contiguous()
            shared.mul_(torch.sigmoid(gate)[:, :1])
        return result.add_(shared)


def read_experts(
    reader: CheckpointReader,
    config: ModelConfig,
    prefix: str,
    *,
    weights: WeightSource,
    deterministic: bool,
) -> SparseMlp:
    """Return a layer's mixture; `prefix`: the layer's, with its point."""
    experts = config.experts
    assert experts is not None, "only mixtures have sparse layers"
    return _MixtureReader(reader, config, experts, prefix, weights, deterministic).read()


class _MixtureReader:
    """Reads one layer's router and experts."""

    def __init__(
        self,
        reader: CheckpointReader,
        config: ModelConfig,
        experts: ExpertsConfig,
        prefix: str,
        weights: WeightSource,
        deterministic: bool,
    ) -> None:
        self._reader = reader
        self._config = config
        self._experts = experts
        self._prefix = prefix
        self._weights = weights
        # In a scheme, weights that are not rounded keep every row's bits too.
        self._deterministic = deterministic or weights.scheme is not None

    def read(self) -> SparseMlp:
        names, experts = self._experts.names, self._experts
        width, count = self._config.hidden_size, experts.num_experts
        router_bias = None
        if experts.router_bias:
            router_bias = self._read(f"{names.router}.bias", count)
        correction = None
        if names.correction is not None:
            correction = self._read(names.correction, count).float()
        each = self._stacked() if experts.is_stacked else self._each()
        shared = shared_gate = None
        if experts.shared_size:
            shared = self._shared(experts.shared_size)
        if experts.shared_size and names.shared_gate is not None:
            shared_gate = self._linear(self._read(f"{names.shared_gate}.weight", 1, width))
        return SparseMlp(
            router=self._linear(self._read(f"{names.router}.weight", count, width), router_bias),
            rule=experts.routing,
            experts=ExpertMlp(each, gate=experts.gate, deterministic=self._deterministic),
            correction=correction,
            shared=shared,
            shared_gate=shared_gate,
        )

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._reader.read(self._prefix + name, shape)

    def _linear(self, weight: Weight, bias: Tensor | None = None) -> Product:
        return make_linear(weight, bias, deterministic=self._deterministic)

    def _each(self) -> Iterator[ExpertWeights]:
        """Read experts that have tensors of their own, one after the other."""
        names, inner = self._experts.names, self._experts.inner_size
        width = self._config.hidden_size
        for number in range(self._experts.num_experts):
            gate, up, down = (
                f"{names.expert.format(number)}.{part}.weight"
                for part in (names.gate, names.up, names.down)
            )
            yield ExpertWeights(
                gate_up=self._weight((gate, up), inner, width),
                down=self._weight((down,), width, inner),
            )

    def _weight(self, names: tuple[str, ...], rows: int, width: int) -> Weight:
        """Return the weight of a product from tensors of so many rows each."""
        tensors = [self._prefix + name for name in names]
        read = partial(self._reader.read_joined, tensors, [rows] * len(tensors), width)
        return _held(self._weights.weight(tensors[0], read, tensors))

    def _stacked(self) -> Iterator[ExpertWeights]:
        """Read gpt-oss' experts: all in one tensor, transposed, gate and up in turn."""
        count, inner = self._experts.num_experts, self._experts.inner_size
        width, name = self._config.hidden_size, "mlp.experts."
        gate_up = self._read(f"{name}gate_up_proj", count, width, 2 * inner)
        gate_up_bias = self._read(f"{name}gate_up_proj_bias", count, 2 * inner)
        down = self._read(f"{name}down_proj", count, inner, width)
        down_bias = self._read(f"{name}down_proj_bias", count, width)
        for number in range(count):
            bias = gate_up_bias[number]
            yield ExpertWeights(
                gate_up=self._of_stack(
                    f"{name}{number}.gate_up", partial(_halves, gate_up[number].T)
                ),
                down=self._of_stack(f"{name}{number}.down", down[number].T.contiguous),
                gate_up_bias=torch.cat((bias[0::2], bias[1::2])),
                down_bias=down_bias[number].clone(),
            )

    def _of_stack(self, name: str, read: Callable[[], Tensor]) -> Weight:
        """Return the weight of one expert of a tensor that holds all of them."""
        return _held(self._weights.weight(self._prefix + name, read, ()))

    def _shared(self, size: int) -> GatedMlp:
        name, width = self._experts.names.shared, self._config.hidden_size
        gate, up, down = (f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
        return GatedMlp(
            self._linear(self._weight((gate, up), size, width)),
            self._linear(self._weight((down,), width, size)),
            self._config.activation,
            deterministic=self._deterministic,
        )


def _held(weight: Weight | StoredWeight) -> Weight:
    """Return a weight as experts' kernels hold it: quantised checkpoints are decoded for them."""
    assert not isinstance(weight, StoredWeight), "experts are read as plain numbers"
    return weight


def _halves(rows: Tensor) -> Tensor:
    """Put rows in turn, gate and up, into two halves. [2 * inner, width]."""
    return torch.cat((rows[0::2], rows[1::2]))
