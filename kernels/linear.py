"""Matrix products with weights that stay: packed once on CPU, plain elsewhere."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def _can_pack_dtype(dtype: torch.dtype) -> bool:
    """Try it: the operations are private, and CPUs and builds differ."""
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        result = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.equal(result, weight)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight in its own layout (x86 CPUs; not macOS, not CUDA)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
        and weight.numel() > 0
        and _can_pack_dtype(weight.dtype)
    )


class Linear:
    """`x @ weight.T + bias`, with the weight held in whatever layout is fastest.

    weight: [out_features, in_features]; bias: [out_features] or None. When the weight is packed,
    no reference to the unpacked one is kept: callers drop theirs, and memory holds it once.
    """

    __slots__ = (
        "_bias",
        "_linear",
        "_linear_add",
        "_packed",
        "_weight",
        "in_features",
        "nbytes",
        "out_features",
    )

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        """Pack the weight if `pack` and the device allow it."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        if pack and can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._linear = torch.ops.mkldnn._linear_pointwise.default
            self._weight = None

    @property
    def is_packed(self) -> bool:
        """Whether the weight is held in oneDNN's layout."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in_features] -> [n, out_features]."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        result: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return result
