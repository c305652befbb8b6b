"""Layer norm without a bias, as Cohere's models have it."""

import torch.nn.functional as F
from torch import Tensor


class LayerNorm:
    """`weight * (x - mean) / sqrt(variance + eps)` over the last dimension, in float32.

    A row's bits do not depend on the rows beside it: torch's kernels take one row at a time.
    Ba, Kiros and Hinton, 2016.
    """

    __slots__ = ("_weight", "eps")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """`weight`: [d]; `eps`: added to the variance."""
        self._weight = weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [..., d] -> [..., d] of x's dtype."""
        return F.layer_norm(x.float(), x.shape[-1:], self._weight, None, self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual stream in place and normalise the sum. Both: [n, d]."""
        return self(residual.add_(x))
