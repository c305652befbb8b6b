"""Products of 8-bit rows with 8-bit weights: whole sums, so that every kernel has the same bits.

The compiled panels hold them on x86 (`outrider.kernels.cpu.panel_linear`). Here is what runs
elsewhere, on torch's own integer product, to the bit as `int8_linear_reference` has it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.kernels.quantised.rows import int8_rows, scaled_sums
from outrider.kernels.quantised.weight import QuantisedWeight

# cuBLASLt multiplies whole numbers from so many rows on, in widths that 8 divides.
_MIN_ROWS = 32
_MULTIPLE = 8


class Int8Linear:
    """`x @ weight.T + bias` with x and weight in 8 bits; on any device."""

    __slots__ = ("_bias", "_codes_t", "_num_outputs", "_scales")

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        """`weight`: of 8 bits with a scale for each output."""
        self._num_outputs, width = weight.shape
        codes = pad(weight.codes, (0, -width % _MULTIPLE, 0, -self._num_outputs % _MULTIPLE))
        self._codes_t = codes.t()  # the layout that integer products read: k is contiguous
        self._scales = weight.scales.flatten()
        self._bias = bias

    @property
    def is_packed(self) -> bool:
        """False: rows of the weight lie as they came."""
        return False

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: bfloat16 [n, in_features] -> [n, out_features]."""
        num_rows, width = x.shape
        rows, row_scales = int8_rows(x)
        spare_rows = max(_MIN_ROWS - num_rows, 0) if x.is_cuda else 0
        rows = pad(rows, (0, -width % _MULTIPLE, 0, spare_rows))
        sums = torch._int_mm(rows, self._codes_t)[:num_rows, : self._num_outputs].float()
        return scaled_sums(sums, self._scales, row_scales, self._bias)
