"""Root-mean-square norm, also fused with the addition of a residual."""

import math

import torch
from torch import Tensor

from outrider.kernels.triton_support import jit, launch, next_power_of_2, rounded, tl, uses_triton

# A row is one tile, up to 16 elements a thread where that many threads pay.
_ELEMENTS_PER_WARP = 16 * 32
_MAX_WARPS = 16


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in torch, as Hugging Face's models compute it.

    Statistics are float32 and the normalised value is rounded to x's dtype before the weight is
    applied.
    """
    values = x.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)  # [..., 1]
    return weight * (values * inverse).to(x.dtype)


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913
    x,
    residual,
    weight,
    result,
    x_stride,
    residual_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: row i. With a residual: that becomes residual + x, and the sum is normalised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual + row * residual_stride + columns
        values += tl.load(stream, mask=is_inside, other=0.0).to(tl.float32)
        # What is normalised is the stream as the next layer will read it.
        total = rounded(values, residual.dtype.element_ty)
        tl.store(stream, total, mask=is_inside)
        values = total.to(tl.float32)
    weights = tl.load(weight + (row % WEIGHT_ROWS) * WIDTH + columns, mask=is_inside, other=0.0).to(
        tl.float32
    )
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps)
    normed = values * inverse * weights
    tl.store(
        result + row * WIDTH + columns, rounded(normed, result.dtype.element_ty), mask=is_inside
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension: `weight * x / sqrt(mean(x^2) + eps)`.

    `x`: [..., d]; `weight`: [d], or any shape that broadcasts against x (a weight for each head;
    Triton takes [d] and x's own trailing dimensions). Returns x's shape and dtype; a row's result
    does not depend on the others. Zhang and Sennrich, 2019.
    """
    if not uses_triton(x):
        return rms_norm_reference(x, weight, eps)
    if weight.shape != x.shape[x.dim() - weight.dim() :]:
        raise ValueError(f"a weight of {tuple(weight.shape)} does not fit x of {tuple(x.shape)}")
    rows = x.reshape(-1, x.shape[-1])  # [n, d]; a copy only where heads are strided
    return _launch_rms_norm(rows, None, weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream in place, and return the normalised sum.

    `x`, `residual`: [n, d], rows contiguous; `weight`: [d]; returns [n, d].
    """
    if not uses_triton(x):
        return rms_norm_reference(residual.add_(x), weight, eps)
    return _launch_rms_norm(x, residual, weight, eps)


def _launch_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, width = x.shape
    result = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    block = next_power_of_2(width)
    launch(
        _rms_norm_kernel,
        (num_rows,),
        x,
        residual,
        weight.contiguous(),
        result,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS),
        HAS_RESIDUAL=residual is not None,
        WEIGHT_ROWS=weight.numel() // width,
        WIDTH=width,
        BLOCK=block,
    )
    return result


class RmsNorm:
    """`rms_norm` with its weight made ready: on CPU half the calls, and half the time.

    With d dimensions, weight * x / sqrt(mean(x^2) + eps) is (weight * sqrt(d)) * x /
    hypot(|x|, sqrt(d * eps)). Everything is float32 up to the result, so in half precision it
    rounds once (as the Triton kernel does) where the reference rounds twice.
    `weight` and `eps` are what the Triton kernels take.
    """

    __slots__ = ("_offset", "eps", "scaled_weight", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight`: as for `rms_norm`; `eps`: added to the mean square."""
        width = weight.shape[-1]
        self.weight = weight
        self.eps = eps
        self.scaled_weight = (weight.float() * math.sqrt(width)).contiguous()
        """Float32, as `weight`, times the square root of the last dimension."""
        self._offset = torch.full((1,), math.sqrt(width * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [..., d] -> [..., d]."""
        values = x.float()
        norm = torch.linalg.vector_norm(values, 2, -1, True)  # [..., 1]
        normed = torch.div(values, torch.hypot(norm, self._offset)).mul_(self.scaled_weight)
        return normed.to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual stream in place and normalise the sum. Both: [n, d]."""
        return self(residual.add_(x))
