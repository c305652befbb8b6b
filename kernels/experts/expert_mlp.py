"""The feed-forward layers of a mixture of experts: each row through its chosen experts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from outrider.kernels.cpu.expert_products import ExpertProducts, alike_panels
from outrider.kernels.experts.grouped_mlp import ExpertStack, GateKind, grouped_mlp
from outrider.kernels.experts.integer_experts import ExpertProduct, integer_mlp
from outrider.kernels.experts.route import Routed
from outrider.kernels.layers.compiled_rows import ACTIVATIONS
from outrider.kernels.layers.gated_mul import gated_mul
from outrider.kernels.layers.integer_linear import can_use_integer_tiles
from outrider.kernels.layers.linear import Linear
from outrider.kernels.layers.row_invariant_linear import Product, make_linear
from outrider.kernels.layers.row_invariant_ops import make_gate
from outrider.kernels.quantised.weight import QuantisedWeight
from outrider.kernels.triton_support import uses_triton

__all__ = ["ExpertMlp", "ExpertWeights", "GateKind", "clamped_swiglu"]

# gpt-oss: the gate's slope, and the bound of what is multiplied.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert. It has both biases or neither."""

    gate_up: Tensor | QuantisedWeight
    """[2 * inner, width], the gate's rows first."""
    down: Tensor | QuantisedWeight
    """[width, inner]."""
    gate_up_bias: Tensor | None = None
    """[2 * inner]."""
    down_bias: Tensor | None = None
    """[width]."""


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """gpt-oss' gate: (up + 1) * gate * sigmoid(1.702 * gate), both bounded. [n, 2 d] -> [n, d]."""
    gate, up = gate_up.float().chunk(2, -1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    # A quotient and an exponential of whole rows: rounded alike wherever a row stands.
    share = torch.softmax(torch.stack((gate * SWIGLU_ALPHA, torch.zeros_like(gate)), -1), -1)
    return ((up + 1) * (gate * share[..., 0])).to(gate_up.dtype)


class ExpertMlp:
    """Experts' weights and their products. [n, width] -> [n, width].

    On the CPU, one compiled call takes all rows where the library has the products and the gate;
    else each used expert has two products over its rows. Experts that no row chose are not read.
    On a GPU the rows are sorted by expert and two grouped kernels take them all; weights of 8 or 4
    bits stay so where both of an expert are, else they are decoded.
    """

    __slots__ = ("_compiled", "_gate", "_integer", "_kind", "_products", "_stack", "deterministic")

    def __init__(
        self,
        experts: Iterable[ExpertWeights],
        *,
        gate: GateKind = "silu",
        deterministic: bool = False,
    ) -> None:
        """`experts`: in order; read one by one, so that each is packed before the next is there."""
        self.deterministic = deterministic
        self._kind: GateKind = gate
        self._gate: Callable[[Tensor], Tensor] = clamped_swiglu
        if gate != "clamped_swiglu":
            self._gate = make_gate(gate, deterministic=deterministic)
        self._stack: ExpertStack | None = None
        self._integer: tuple[ExpertProduct, ExpertProduct] | None = None
        self._products: list[tuple[Product, Product]] = []
        kept: list[ExpertWeights] = []
        for weights in experts:
            if uses_triton(_device(weights.down)):
                kept.append(weights)
                continue
            self._products.append(
                (
                    make_linear(weights.gate_up, weights.gate_up_bias, deterministic=deterministic),
                    make_linear(weights.down, weights.down_bias, deterministic=deterministic),
                )
            )
        self._compiled = _compiled(self._products, gate)
        if kept and all(map(_is_integer, kept)):
            self._integer = _integer_products(kept)
            if gate != "clamped_swiglu":
                self._gate = partial(gated_mul, activation=gate)
        elif kept:
            self._stack = _stacked(kept)

    def __call__(self, rows: Tensor, routed: Routed) -> Tensor:
        """`rows`: [n, width]; their experts' results, weighted and summed."""
        if self._stack is not None:
            return grouped_mlp(
                rows, routed, self._stack, gate=self._kind, deterministic=self.deterministic
            )
        if self._integer is not None:
            return integer_mlp(rows, routed, *self._integer, self._gate)
        if self._compiled is not None:
            return self._compiled(rows, routed.experts, routed.weights)
        return self._by_expert(rows, routed) if len(rows) else rows.clone()

    def _by_expert(self, rows: Tensor, routed: Routed) -> Tensor:
        """Two products for each used expert; all that lies between them is done for all at once."""
        num_rows, num_chosen = routed.experts.shape
        layout = self._lay_out(routed.experts.reshape(-1).tolist())
        products = [self._products[number] for number in layout.experts]
        index = torch.tensor([pair // num_chosen for pair in layout.pairs], device=rows.device)
        chosen = rows.index_select(0, index).split_with_sizes(layout.sizes)
        inner = [gate_up(part) for (gate_up, _), part in zip(products, chosen, strict=True)]
        gated = self._gate(torch.cat(inner)).split_with_sizes(layout.sizes)
        outputs = [down(part) for (_, down), part in zip(products, gated, strict=True)]
        # [n, k, width], a row's results side by side
        places = torch.tensor(layout.places, device=rows.device)
        results = torch.cat(outputs).index_select(0, places)
        results = results.view(num_rows, num_chosen, rows.shape[1])
        if self.deterministic:
            return weighted_sum(results, routed.weights)
        return (routed.weights.unsqueeze(1) @ results.float()).squeeze(1).to(rows.dtype)

    def _lay_out(self, experts: list[int]) -> "_Layout":
        """Arrange pairs of a row and an expert by expert; `experts`: each pair's."""
        pairs_of: dict[int, list[int]] = {}
        for pair, number in enumerate(experts):
            pairs_of.setdefault(number, []).append(pair)
        layout = _Layout(places=[0] * len(experts))
        for number in sorted(pairs_of):
            own = pairs_of[number]
            for place, pair in enumerate(own, start=len(layout.pairs)):
                layout.places[pair] = place
            gate_up = self._products[number][0]
            repeated = own * (gate_up.repeats(len(own)) if isinstance(gate_up, Linear) else 1)
            layout.experts.append(number)
            layout.sizes.append(len(repeated))
            layout.pairs += repeated
        return layout


@dataclass(slots=True, kw_only=True)
class _Layout:
    """The rows of all used experts, one expert behind the other."""

    places: list[int]
    """The row of each pair."""
    experts: list[int] = field(default_factory=list)
    """Each expert."""
    sizes: list[int] = field(default_factory=list)
    """Each expert's rows."""
    pairs: list[int] = field(default_factory=list)
    """Each row's pair, with those repeated that an expert's products would repeat."""


def _compiled(products: list[tuple[Product, Product]], gate: GateKind) -> ExpertProducts | None:
    """Return what runs them in one call, if that is compiled; it keeps every row's bits."""
    if gate not in ACTIVATIONS or not products:
        return None
    gate_up, down = map(alike_panels, zip(*products, strict=True))
    return ExpertProducts(gate_up, down, ACTIVATIONS[gate]) if gate_up and down else None


def weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """Sum results [n, k, width] times weights [n, k] over k, in order, in float32.

    Products and sums are rounded one by one: a row's bits do not depend on the rows beside it.
    """
    total = results[:, 0].float() * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total.add_(results[:, rank].float() * weights[:, rank : rank + 1])
    return total.to(results.dtype)


def _stacked(experts: list[ExpertWeights]) -> ExpertStack:
    """Return all experts' weights in tensors of their own; the list is emptied meanwhile."""
    first = experts[0]
    gate_up, down = _room(first.gate_up, len(experts)), _room(first.down, len(experts))
    gate_up_bias = down_bias = None
    if first.gate_up_bias is not None and first.down_bias is not None:
        gate_up_bias = first.gate_up_bias.new_empty((len(experts), *first.gate_up_bias.shape))
        down_bias = first.down_bias.new_empty((len(experts), *first.down_bias.shape))
    for index in reversed(range(len(experts))):
        weights = experts.pop()
        gate_up[index], down[index] = _plain(weights.gate_up), _plain(weights.down)
        if weights.gate_up_bias is not None and weights.down_bias is not None:
            assert gate_up_bias is not None, "all experts have biases, or none"
            assert down_bias is not None, "all experts have biases, or none"
            gate_up_bias[index], down_bias[index] = weights.gate_up_bias, weights.down_bias
    return ExpertStack(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)


def _room(weight: Tensor | QuantisedWeight, count: int) -> Tensor:
    """Return memory for so many weights of this shape."""
    plain = _plain(weight)
    return plain.new_empty((count, *plain.shape))


def _plain(weight: Tensor | QuantisedWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised(torch.bfloat16)


def _device(weight: Tensor | QuantisedWeight) -> torch.device:
    return weight.device if isinstance(weight, Tensor) else weight.codes.device


def _is_integer(weights: ExpertWeights) -> bool:
    """Return whether grouped products can hold both weights of an expert in few bits."""
    return all(
        isinstance(weight, QuantisedWeight) and can_use_integer_tiles(weight)
        for weight in (weights.gate_up, weights.down)
    )


def _integer_products(experts: list[ExpertWeights]) -> tuple[ExpertProduct, ExpertProduct]:
    """Return both products of all experts; the list is emptied, so that weights are held once."""

    def product(name: Literal["gate_up", "down"]) -> ExpertProduct:
        weights = [getattr(one, name) for one in experts]
        biases = [getattr(one, f"{name}_bias") for one in experts]
        return ExpertProduct(weights, None if biases[0] is None else biases)

    found = product("gate_up"), product("down")
    experts.clear()
    return found
