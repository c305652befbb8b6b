"""Products of 8-bit rows with 4-bit weights where no compiled kernel runs, to the same bits."""

from torch import Tensor

from outrider.kernels.quantised.rows import int4_linear_reference
from outrider.kernels.quantised.weight import QuantisedWeight


class Int4Linear:
    """`x @ weight.T + bias` with x in 8 bits and weight in 4; on any device, not fast."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None = None) -> None:
        """`weight`: of 4 bits, without zero points."""
        self._weight = weight
        self._bias = bias

    @property
    def is_packed(self) -> bool:
        """False: rows of the weight lie as they came."""
        return False

    def __call__(self, x: Tensor) -> Tensor:
        """`x`: bfloat16 [n, in_features] -> [n, out_features]."""
        return int4_linear_reference(x, self._weight, self._bias)
