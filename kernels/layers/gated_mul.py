"""The gate of a feed-forward layer: activation(gate) * up."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.triton_support import (
    jit,
    launch,
    next_power_of_2,
    rounded,
    tl,
    triton,
    uses_triton,
)

# "gelu_tanh" is GELU's tanh approximation, "gelu" the exact one.
Activation = Literal["silu", "gelu", "gelu_tanh"]

# Elements that a program computes: 8 a thread, in 16-byte loads in half precision.
_CHUNK = 1024


def gated_mul_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`gated_mul` in torch; in half precision activation(gate) is rounded before the product."""
    gate, up = gate_up.chunk(2, -1)  # [n, d] each
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)


@jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) of float32 values, without overflow."""
    small = tl.exp(-tl.abs(x))  # exp(-x) would overflow
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@jit
def activated(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return activation(gate) of float32 values; `ACTIVATION`: an `Activation`."""
    if ACTIVATION == "silu":
        share = sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) * (x + 0.044715 x^3)
        share = sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    return gate * share


@jit
def _gated_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    result,
    row_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (i, j): columns j * CHUNK and so on of row i. One rounding, at the end."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    is_inside = columns < WIDTH
    source = gate_up + row * row_stride + columns
    gate = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=is_inside, other=0.0).to(tl.float32)
    product = activated(gate, ACTIVATION) * up
    tl.store(
        result + row * WIDTH + columns, rounded(product, result.dtype.element_ty), mask=is_inside
    )


def gated_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """`activation(gate) * up` of a fused projection.

    `gate_up`: [n, 2 * d], the gate in the first half, rows contiguous; returns [n, d]. A row's
    result does not depend on the other rows. Shazeer, 2020; Hendrycks and Gimpel, 2016.
    """
    if not uses_triton(gate_up):
        return gated_mul_reference(gate_up, activation)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    chunk = min(_CHUNK, next_power_of_2(width))
    launch(
        _gated_mul_kernel,
        (num_rows, triton.cdiv(width, chunk)),
        gate_up,
        result,
        gate_up.stride(0),
        num_warps=4,
        ACTIVATION=activation,
        WIDTH=width,
        CHUNK=chunk,
    )
    return result
