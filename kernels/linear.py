"""Matrix products with weights that stay: packed once on CPU, plain elsewhere."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_DTYPES = (torch.float32, torch.bfloat16)
# The row count that oneDNN lays weights out for. Measured on Zen 5 over 1 to 256 rows: 16 to 256
# are alike, 1 costs float32 up to 60 % at more rows.
PACK_ROWS = 32
# Small float32 weights: see `Linear`. Measured over 64 KB to 4 MB and 1 to 16 rows.
SMALL_WEIGHT_BYTES = 2 << 20
PLAIN_BYTES_PER_PASS = 800_000


@functools.cache
def can_pack_dtype(dtype: torch.dtype) -> bool:
    """Try it: the operations are private, and CPUs and builds differ."""
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
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
        and can_pack_dtype(weight.dtype)
    )


class Linear:
    """`x @ weight.T + bias`, with the weight held in whatever layout is fastest.

    weight: [out_features, in_features]; bias: [out_features] or None. When the weight is packed,
    no reference to the unpacked one is kept: callers drop theirs, and memory holds it once.
    A packed product costs about 11 us before the first multiplication (Zen 5, one thread), six
    times a plain one, and MKL streams a small float32 matrix from the cache once per row. So
    float32 weights of at most `SMALL_WEIGHT_BYTES` are held in both layouts.
    """

    __slots__ = ("_bias", "_linear", "_packed", "_plain_max_rows", "_weight", "_weight_t")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        """Pack the weight if `pack` and the device allow it."""
        self._bias = bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        self._weight_t: Tensor | None = None
        self._plain_max_rows = -1  # never
        if not pack or not can_pack(weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._weight = None
        if weight.dtype == torch.float32 and weight.nbytes <= SMALL_WEIGHT_BYTES:
            self._weight_t = weight.t().contiguous()  # [in_features, out_features]
            self._plain_max_rows = 1 + PLAIN_BYTES_PER_PASS // weight.nbytes

    @property
    def is_packed(self) -> bool:
        """Whether the weight is held in oneDNN's layout."""
        return self._packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in_features] -> [n, out_features]."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        if x.shape[0] <= self._plain_max_rows:
            assert self._weight_t is not None
            if self._bias is None:
                return torch.mm(x, self._weight_t)
            return torch.addmm(self._bias, x, self._weight_t)
        result: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return result
