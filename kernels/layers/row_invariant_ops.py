"""The row-wise operations of a model, made so that a row's bits do not depend on its company.

On a GPU every kernel of these treats its elements alike. On a CPU an element that the vector loop
leaves over goes through scalar code, which rounds differently (silu: one in 400), and where the
loop ends depends on the shape and on how threads share the work. What is built from additions,
products, quotients and square roots alone is exact either way.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.layers.rms_norm import RmsNorm
from kernels.layers.rope import rotate
from kernels.layers.silu_mul import silu_mul

# Torch shares element-wise work between threads from this many elements on, also inside rows.
SERIAL_ELEMENTS = 32768


class RowInvariantNorm(RmsNorm):
    """`RmsNorm` without the hypotenuse, whose vector code is not correctly rounded.

    The sum of squares runs along a row of its own, in an order that only the width decides.
    """

    __slots__ = ("_squared_offset",)

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight, eps: as for `RmsNorm`."""
        super().__init__(weight, eps)
        self._squared_offset = weight.shape[-1] * eps

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., d] -> [..., d]."""
        if x.device.type != "cpu":
            return super().__call__(x)
        values = x.float()
        norm = torch.linalg.vector_norm(values, 2, -1, True)  # [..., 1]
        length = norm.square_().add_(self._squared_offset).sqrt_()
        return torch.div(values, length).mul_(self._scaled_weight).to(x.dtype)


def row_invariant_silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul` in pieces that one thread computes row by row. [n, 2 * d] -> [n, d]."""
    if gate_up.device.type != "cpu":
        return silu_mul(gate_up)
    rows = max(1, math.ceil(SERIAL_ELEMENTS / max(gate_up.shape[1] // 2, 1)) - 1)
    pieces = []
    for start in range(0, max(len(gate_up), 1), rows):
        gate, up = gate_up[start : start + rows].chunk(
            2, -1
        )  # [rows, d] each, with a stride that keeps rows apart
        pieces.append(F.silu(gate).mul_(up))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def row_invariant_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` with a rounding after each operation, not fused at the compiler's discretion.

    The roundings are float32's; the result is rounded to x's dtype once, as `rotate`'s is.
    """
    if x.device.type != "cpu":
        return rotate(x, cos, sin)
    values = x.float()
    swapped = values.roll(x.shape[-1] // 2, -1)
    return (values * cos).add_(swapped.mul_(sin)).to(x.dtype)
