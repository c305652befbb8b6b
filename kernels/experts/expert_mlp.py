"""The feed-forward layers of a mixture of experts: each row through its chosen experts."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts.grouped_mlp import ExpertStack, GateKind, grouped_mlp
from kernels.experts.route import Routed
from kernels.layers.gated_mul import gated_mul_reference
from kernels.layers.row_invariant_linear import Product, make_linear
from kernels.layers.row_invariant_ops import row_invariant_gated_mul
from kernels.triton_support import uses_triton

__all__ = ["ExpertMlp", "ExpertWeights", "GateKind", "clamped_swiglu"]

# gpt-oss: the gate's slope, and the bound of what is multiplied.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """One expert. gate_up: [2 * inner, width], the gate's rows first; down: [width, inner].

    Biases: [2 * inner] and [width], both or neither.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


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

    On the CPU each used expert has its own two products over its rows, with weights packed as
    `kernels.layers.linear` packs them; experts that no row chose are not read. On a GPU the rows
    are sorted by expert and two grouped kernels take them all.
    """

    __slots__ = ("_gate", "_kind", "_products", "_stack", "deterministic")

    def __init__(
        self,
        experts: Iterable[ExpertWeights],
        *,
        gate: GateKind = "silu",
        deterministic: bool = False,
    ) -> None:
        """experts: in order; read one by one, so that each is packed before the next is there."""
        self.deterministic = deterministic
        self._kind: GateKind = gate
        if gate == "clamped_swiglu":
            self._gate = clamped_swiglu
        else:
            plain = row_invariant_gated_mul if deterministic else gated_mul_reference
            self._gate = functools.partial(plain, activation=gate)
        self._stack: ExpertStack | None = None
        self._products: list[tuple[Product, Product]] = []
        kept: list[ExpertWeights] = []
        for weights in experts:
            if uses_triton(weights.down):
                kept.append(weights)
                continue
            self._products.append(
                (
                    make_linear(weights.gate_up, weights.gate_up_bias, deterministic=deterministic),
                    make_linear(weights.down, weights.down_bias, deterministic=deterministic),
                )
            )
        if kept:
            self._stack = _stacked(kept)

    def __call__(self, rows: Tensor, routed: Routed) -> Tensor:
        """rows: [n, width]; their experts' results, weighted and summed from the best on."""
        if self._stack is not None:
            return grouped_mlp(
                rows, routed, self._stack, gate=self._kind, deterministic=self.deterministic
            )
        return self._by_expert(rows, routed)

    def _by_expert(self, rows: Tensor, routed: Routed) -> Tensor:
        num_rows, num_chosen = routed.experts.shape
        pairs = routed.experts.reshape(-1)
        order = torch.argsort(pairs, stable=True)
        counts = torch.bincount(pairs, minlength=len(self._products)).tolist()
        # [n * k, width], a row's results side by side
        results = torch.empty(
            (num_rows * num_chosen, rows.shape[1]), dtype=rows.dtype, device=rows.device
        )
        start = 0
        for (gate_up, down), count in zip(self._products, counts, strict=True):
            if not count:
                continue
            places = order[start : start + count]
            start += count
            # An expert has a row once, so a single row needs no gathering.
            chosen = rows if num_rows == 1 else rows.index_select(0, places // num_chosen)
            results.index_copy_(0, places, down(self._gate(gate_up(chosen))))
        return weighted_sum(results.view(num_rows, num_chosen, rows.shape[1]), routed.weights)


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
    gate_up = first.gate_up.new_empty((len(experts), *first.gate_up.shape))
    down = first.down.new_empty((len(experts), *first.down.shape))
    gate_up_bias = down_bias = None
    if first.gate_up_bias is not None and first.down_bias is not None:
        gate_up_bias = first.gate_up_bias.new_empty((len(experts), *first.gate_up_bias.shape))
        down_bias = first.down_bias.new_empty((len(experts), *first.down_bias.shape))
    for index in reversed(range(len(experts))):
        weights = experts.pop()
        gate_up[index], down[index] = weights.gate_up, weights.down
        if weights.gate_up_bias is not None and weights.down_bias is not None:
            assert gate_up_bias is not None, "all experts have biases, or none"
            assert down_bias is not None, "all experts have biases, or none"
            gate_up_bias[index], down_bias[index] = weights.gate_up_bias, weights.down_bias
    return ExpertStack(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)
