"""A weight of whole numbers in few bits, with scales: what quantised products hold."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

Bits = Literal[4, 8]
# The widest number of each width; symmetric, so that a weight and its negative round alike.
LARGEST: Final[dict[int, int]] = {4: 7, 8: 127}
# Rounding takes floats of so many numbers at a time, not of a whole table of tokens.
_NUMBERS_AT_ONCE: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """`(codes - zeros) * scales` in place of a weight [out_features, in_features].

    codes: int8 [out_features, in_features], one number each, 4 bits in 8 as well (products pack
    them). scales: float32 [out_features, in_features / group_size], each for a group of columns.
    zeros: the same shape, or None for zero. Raises ValueError for parts that do not fit together.
    """

    codes: Tensor
    scales: Tensor
    bits: Bits
    group_size: int
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes and types."""
        if self.bits not in LARGEST:
            raise ValueError(f"{self.bits} bits are not one of {', '.join(map(str, LARGEST))}")
        if self.codes.dtype != torch.int8 or self.codes.dim() != 2:
            raise ValueError(
                f"codes are {self.codes.dtype} {list(self.codes.shape)}, no matrix of int8"
            )
        rows, width = self.codes.shape
        if self.group_size < 1 or width % self.group_size:
            raise ValueError(f"groups of {self.group_size} do not divide {width} columns")
        wanted = (rows, width // self.group_size)
        for name, part in (("scales", self.scales), ("zeros", self.zeros)):
            if part is not None and tuple(part.shape) != wanted:
                raise ValueError(f"{name} are {list(part.shape)}, not {list(wanted)}")

    @property
    def shape(self) -> torch.Size:
        """The weight's: [out_features, in_features]."""
        return self.codes.shape

    def to(self, device: torch.device) -> "QuantisedWeight":
        """Return it with its tensors on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros
        )

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that is meant, computed in float32: the oracle of every product."""
        rows, width = self.codes.shape
        wide = self.codes.float().view(rows, -1, self.group_size)
        if self.zeros is not None:
            wide = wide - self.zeros.unsqueeze(-1)
        return (wide * self.scales.unsqueeze(-1)).view(rows, width).to(dtype)


def rounded_to_int8(weight: Tensor) -> QuantisedWeight:
    """Round each output's weights to 8 bits: one scale a row, by its largest magnitude.

    weight: floats [out_features, in_features].
    """
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    rows_at_once = max(_NUMBERS_AT_ONCE // max(weight.shape[1], 1), 1)
    for first in range(0, len(weight), rows_at_once):
        rows = slice(first, first + rows_at_once)
        wide = weight[rows].float()
        scales[rows] = wide.abs().amax(1, keepdim=True) / LARGEST[8]
        codes[rows] = wide.div_(scales[rows]).round_().nan_to_num_(0.0).to(torch.int8)
    return QuantisedWeight(codes=codes, scales=scales, bits=8, group_size=weight.shape[1])
