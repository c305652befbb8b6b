"""A weight of whole numbers in few bits, with scales: what quantised products hold."""

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

Bits = Literal[4, 8]
# The widest number of each width; symmetric, so that a weight and its negative round alike.
LARGEST: Final[dict[int, int]] = {4: 7, 8: 127}
# Rounding takes floats of so many numbers at a time, not of a whole table of tokens.
_NUMBERS_AT_ONCE: Final = 1 << 20
# In 4 bits, so many groups: what is tried with them is to stay in the cache.
_GROUPS_AT_ONCE: Final = 4096
# The code, without its sign, that the largest magnitude of a group would get if codes had no end.
_INT4_STEPS: Final = (8.0, 7.0, 7.6, 8.6, 9.4, 10.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """`(codes - zeros) * scales` in place of a weight [out_features, in_features].

    Raises ValueError for parts that do not fit together.
    """

    codes: Tensor
    """int8 [out_features, in_features], one number each, 4 bits in 8 as well (products pack
    them)."""
    scales: Tensor
    """float32 [out_features, in_features / group_size], each for a group of columns."""
    bits: Bits
    group_size: int
    zeros: Tensor | None = None
    """The shape of `scales`, or None for zero."""

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

    @property
    def num_bytes(self) -> int:
        """Bytes that products hold: packed codes; scales in bfloat16 where codes have 4 bits."""
        scale_bytes = 2 if self.bits == 4 else 4
        num_zeros = 0 if self.zeros is None else self.zeros.numel()
        return self.codes.numel() * self.bits // 8 + scale_bytes * (self.scales.numel() + num_zeros)

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


def packed_nibbles(codes: Tensor) -> Tensor:
    """Put codes of 4 bits, int8 [n, 2 * m] from -8 to 7, two in a byte: uint8 [n, m]."""
    unsigned = (codes + 8).view(torch.uint8)
    return unsigned[:, 0::2] | unsigned[:, 1::2] << 4


def unpacked_nibbles(packed: Tensor) -> Tensor:
    """Return what `packed_nibbles` had."""
    codes = torch.stack((packed & 15, packed >> 4), -1).view(len(packed), -1)
    return codes.view(torch.int8) - 8


def rounded_to_int4(weight: Tensor, *, group_size: int) -> QuantisedWeight:
    """Round to 4 bits: for each group of columns the scale, of a few, with the least error.

    `weight`: floats [out_features, in_features], which group_size divides. Scales are such that
    bfloat16 holds them; some are negative, because codes reach from -8 to 7. After llama.cpp's
    Q4_0: the largest magnitude gets the code -8, and here smaller scales that clip it are tried.
    """
    if weight.shape[1] % group_size:
        raise ValueError(f"groups of {group_size} do not divide {weight.shape[1]} columns")
    num_groups = weight.shape[1] // group_size
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((len(weight), num_groups), dtype=torch.float32, device=weight.device)
    rows_at_once = max(_GROUPS_AT_ONCE // num_groups, 1)
    for first in range(0, len(weight), rows_at_once):
        rows = slice(first, first + rows_at_once)
        groups = weight[rows].float().view(-1, group_size)
        found_codes, found_scales = _int4_groups(groups)
        codes[rows] = found_codes.view(-1, weight.shape[1])
        scales[rows] = found_scales.view(-1, num_groups)
    return QuantisedWeight(codes=codes, scales=scales, bits=4, group_size=group_size)


def _int4_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, int8 [n, size], and scales, float32 [n, 1], of groups, float32 [n, size]."""
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    best = torch.full_like(largest, torch.inf)
    best_scales = torch.zeros_like(largest)
    best_codes = torch.zeros_like(groups)
    for step in _INT4_STEPS:
        scales = (largest / -step).bfloat16().float()
        inverse = torch.where(scales == 0, 0.0, 1 / scales)
        codes = (groups * inverse).round_().clamp_(-8, 7)
        error = _summed((codes * scales).sub_(groups).square_())
        is_better = error < best
        best = torch.where(is_better, error, best)
        best_scales = torch.where(is_better, scales, best_scales)
        best_codes = torch.where(is_better, codes, best_codes)
    return best_codes.to(torch.int8), best_scales


def _summed(rows: Tensor) -> Tensor:
    """Return the sum of each row, [n, 1], in halves: in the same order on every processor."""
    while (width := rows.shape[1]) > 1:
        half = width // 2
        rest = rows[:, 2 * half :]
        rows = rows[:, :half] + rows[:, half : 2 * half]
        rows[:, :1] += rest.sum(1, keepdim=True)  # of one column or none
    return rows


def rounded_to_int8(weight: Tensor) -> QuantisedWeight:
    """Round each output's weights to 8 bits: one scale a row, by its largest magnitude.

    `weight`: floats [out_features, in_features].
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
