"""Matrix products with weights that stay: packed once on CPU, plain on other devices."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_DTYPES = (torch.float32, torch.bfloat16)
# The row count that oneDNN lays weights out for. Measured on Zen 5 over 1 to 256 rows: 16 to 256
# are alike, 1 costs float32 up to 60 % at more rows.
PACK_ROWS = 32
# Small weights, see `Linear`. Measured over 64 KB to 4 MB and 1 to 16 rows.
FLOAT32_SMALL_BYTES = 2 << 20
FLOAT32_BYTES_PER_PASS = 800_000
BFLOAT16_BYTES_PER_PASS = 512 << 10
# oneDNN streams a large weight faster for four rows than for one or two, so those are repeated.
# Measured on Zen 4 with weights in memory: 1.1 to 1.5 times as fast; in the cache there is no gain.
STREAMED_ROWS = 4
STREAMED_BYTES = 2 << 20


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
    """True if oneDNN can hold this weight in its own layout (x86 CPUs; not macOS, not CUDA)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in PACKED_DTYPES
        and weight.numel() > 0
        and can_pack_dtype(weight.dtype)
    )


def _plain_max_rows(weight: Tensor) -> int:
    """Return the most rows for which a plain float32 product beats the packed one; 0 for never."""
    float32_bytes = 4 * weight.numel()
    if weight.dtype == torch.bfloat16:
        return BFLOAT16_BYTES_PER_PASS // float32_bytes
    if float32_bytes > FLOAT32_SMALL_BYTES:
        return 0
    return 1 + FLOAT32_BYTES_PER_PASS // float32_bytes


class Linear:
    """`x @ weight.T + bias`, with the weight held in whatever layout is fastest.

    `weight`: [out_features, in_features]; `bias`: [out_features] or None. When the weight is
    packed, no reference to the unpacked one is kept: callers drop theirs, and memory holds it once.
    A packed product costs about 11 us before the first multiplication (Zen 5, one thread), six
    times a plain float32 one. The plain one streams the matrix from the cache once per row. So
    small weights are also held plain, in float32, for passes of a few rows. Large ones that come
    from memory are multiplied by four rows at least.
    """

    __slots__ = (
        "_bias",
        "_bias_f32",
        "_is_streamed",
        "_linear",
        "_packed",
        "_plain_max_rows",
        "_weight",
        "_weight_t",
    )

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        """Pack the weight if `pack` and the device allow it."""
        self._bias = bias
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        self._weight_t: Tensor | None = None
        self._bias_f32: Tensor | None = None
        self._plain_max_rows = 0
        self._is_streamed = False
        if not (pack and can_pack(weight)):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._weight = None
        self._is_streamed = weight.nbytes >= STREAMED_BYTES
        self._plain_max_rows = _plain_max_rows(weight)
        if self._plain_max_rows > 0:
            self._weight_t = weight.float().t().contiguous()  # [in_features, out_features]
            self._bias_f32 = None if bias is None else bias.float()

    @property
    def is_packed(self) -> bool:
        """True if the weight is held in oneDNN's layout."""
        return self._packed is not None

    @property
    def plain_weight(self) -> Tensor | None:
        """The weight as it came, [out_features, in_features]; None where it is packed."""
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        """The bias that is added to each row, [out_features]."""
        return self._bias

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: [n, in_features] -> [n, out_features]."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self._bias)
        if self._weight_t is not None and x.shape[0] <= self._plain_max_rows:
            if self._bias_f32 is None:
                return torch.mm(x.float(), self._weight_t).to(x.dtype)
            return torch.addmm(self._bias_f32, x.float(), self._weight_t).to(x.dtype)
        num_rows = x.shape[0]
        repeats = self.repeats(num_rows)
        if repeats > 1:
            x = x.repeat(repeats, 1)
        result: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return result if repeats == 1 else result[:num_rows]

    def repeats(self, num_rows: int) -> int:
        """Return how often a product repeats so many rows to be faster. Callers may do it first."""
        if self._is_streamed and 0 < num_rows <= STREAMED_ROWS // 2:
            return STREAMED_ROWS // num_rows
        return 1
