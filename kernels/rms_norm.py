"""Root-mean-square norm, also fused with the addition of a residual."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension: `weight * x / sqrt(mean(x^2) + eps)`.

    x: [..., d]; weight: [d], or any shape that broadcasts against x (a weight for each head).
    Statistics are float32 and the normalised value is rounded to x's dtype before the weight is
    applied, as Hugging Face's models do. Zhang and Sennrich, 2019.
    """
    # One reduction and four element-wise calls: half the time of F.rms_norm on short CPU rows.
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)  # [..., 1]
    inverse = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    if x.dtype == torch.float32:
        return torch.mul(x, inverse).mul_(weight)
    return torch.mul(x, inverse, out=torch.empty_like(x)).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum: (normed, new_residual).

    x and residual: [..., d]. The residual's storage is reused for the sum.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
