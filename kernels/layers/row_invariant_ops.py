"""The row-wise operations of a model, made so that a row's bits do not depend on the other rows.

On a GPU every kernel of these treats its elements alike. On a CPU an element that the vector loop
leaves over goes through scalar code, which rounds differently (silu: one in 400), and where the
loop ends depends on the shape and on how threads share the work. What is built from additions,
products, quotients and square roots alone is exact either way.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.layers.compiled_rows import ACTIVATIONS, gate_rows
from outrider.kernels.layers.gated_mul import Activation, gated_mul, gated_mul_reference
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import rotate
from outrider.kernels.triton_support import is_automatic

# Torch shares element-wise work between threads from this many elements on, also inside rows.
SERIAL_ELEMENTS = 32768
# A multiple of what any CPU's vector loop takes at once, in float32 elements.
_VECTOR = 64


class RowInvariantNorm(RmsNorm):
    """`RmsNorm` without the hypotenuse, whose vector code is not correctly rounded.

    The sum of squares runs along a row of its own, in an order that only the width decides.
    """

    __slots__ = ("_squared_offset",)

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight`, `eps`: as for `RmsNorm`."""
        super().__init__(weight, eps)
        self._squared_offset = weight.shape[-1] * eps

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [..., d] -> [..., d]."""
        if x.device.type != "cpu":
            return super().__call__(x)
        values = x.float()
        norm = torch.linalg.vector_norm(values, 2, -1, True)  # [..., 1]
        length = norm.square_().add_(self._squared_offset).sqrt_()
        return torch.div(values, length).mul_(self.scaled_weight).to(x.dtype)


def make_gate(activation: Activation, *, deterministic: bool) -> Callable[[Tensor], Tensor]:
    """Return `gated_mul` for CPUs, [n, 2 * d] -> [n, d], and on other devices in torch.

    The compiled one keeps every row's bits and is the fastest, so it serves either mode.
    """
    plain = row_invariant_gated_mul if deterministic else gated_mul_reference
    if not is_automatic() or activation not in ACTIVATIONS or product_support().library is None:
        return partial(plain, activation=activation)

    def gate(gate_up: Tensor) -> Tensor:
        if gate_up.dtype is torch.bfloat16 and gate_up.is_cpu:
            return gate_rows(gate_up, activation)
        return plain(gate_up, activation)

    return gate


def row_invariant_gated_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`gated_mul` in pieces that one thread computes row by row. [n, 2 * d] -> [n, d]."""
    if gate_up.device.type != "cpu":
        return gated_mul(gate_up, activation)
    rows = max(1, math.ceil(SERIAL_ELEMENTS / max(gate_up.shape[1] // 2, 1)) - 1)
    pieces = []
    for start in range(0, max(len(gate_up), 1), rows):
        gate, up = gate_up[start : start + rows].chunk(
            2, -1
        )  # [rows, d] each, with a stride that keeps rows apart
        active = F.silu(gate) if activation == "silu" else _gelu(gate, activation)
        pieces.append(active.mul_(up))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _gelu(gate: Tensor, activation: Activation) -> Tensor:
    """GELU of [rows, d]: rows are padded, so that the vector loops leave nothing over."""
    width = gate.shape[1]
    x = torch.zeros((gate.shape[0], -(-width // _VECTOR) * _VECTOR))
    x[:, :width] = gate
    if activation == "gelu_tanh":
        share = torch.sigmoid((x * x * x).mul_(0.044715).add_(x).mul_(2 * math.sqrt(2 / math.pi)))
    else:
        share = torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(0.5)
    return x.mul_(share)[:, :width].to(gate.dtype)


def row_invariant_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` with a rounding after each operation, not fused at the compiler's discretion.

    The roundings are float32's; the result is rounded to x's dtype once, as `rotate`'s is.
    """
    if x.device.type != "cpu":
        return rotate(x, cos, sin)
    values = x.float()
    swapped = values.roll(x.shape[-1] // 2, -1)
    return (values * cos).add_(swapped.mul_(sin)).to(x.dtype)


def row_invariant_softcap(logits: Tensor, cap: float) -> Tensor:
    """`softcap` row by row, for what the vector loop leaves over. In place. [m, d]."""
    if logits.device.type != "cpu":
        return softcap(logits, cap)
    for row in logits:
        softcap(row, cap)
    return logits


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Bound values to (-cap, cap): cap * tanh(logits / cap), in place. Any shape, float32."""
    return logits.div_(cap).tanh_().mul_(cap)
