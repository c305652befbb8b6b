"""The gate of a SwiGLU feed-forward layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.triton_support import jit, launch, next_power_of_2, rounded, tl, triton, uses_triton

# Elements that a program computes: 8 a thread, in 16-byte loads in half precision.
_CHUNK = 1024


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_mul` in torch; in half precision silu(gate) is rounded before the product."""
    gate, up = gate_up.chunk(2, -1)  # [n, d] each
    return F.silu(gate).mul_(up)


@jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up, result, row_stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Program (i, j): columns j * CHUNK and so on of row i. One rounding, at the end."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    is_inside = columns < WIDTH
    source = gate_up + row * row_stride + columns
    gate = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=is_inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # exp(-gate) would overflow
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    product = gate * sigmoid * up
    tl.store(
        result + row * WIDTH + columns, rounded(product, result.dtype.element_ty), mask=is_inside
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused projection.

    gate_up: [n, 2 * d], the gate in the first half, rows contiguous; returns [n, d]. A row's result
    does not depend on the other rows. Shazeer, 2020.
    """
    if not uses_triton(gate_up):
        return silu_mul_reference(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    chunk = min(_CHUNK, next_power_of_2(width))
    launch(
        _silu_mul_kernel,
        (num_rows, triton.cdiv(width, chunk)),
        gate_up,
        result,
        gate_up.stride(0),
        num_warps=4,
        WIDTH=width,
        CHUNK=chunk,
    )
    return result
