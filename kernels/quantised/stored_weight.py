"""A weight as a checkpoint stores it in few bits, which products hold as it is.

On CPUs rows are rounded to 8 bits and multiplied with its whole numbers (grouped.h), unless it
`keeps_rows`: then, on GPUs and for float8 products have the bits of the decoded weight's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

Number = Literal["int4", "int8", "float8"]
NUMBERS: Final[dict[Number, int]] = {"int4": 4, "int8": 8, "float8": 8}
"""Bits of each kind of number; float8 is e4m3, without infinities."""
# Scales beyond these are decoded at load: between them no number becomes subnormal or infinite,
# about which instruction sets differ.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-96, 2.0**96
# For float8, whose exponent's bias is made up for in the scale.
_LARGEST_FLOAT8_SCALE = 64.0
_FLOAT8_NAN = 0x7F
# Numbers that are decoded at once, in float32.
_NUMBERS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """`(codes - zeros) * scales - minimums` in float32: a weight [out_features, in_features].

    Raises ValueError for parts that do not fit together.
    """

    number: Number
    codes: Tensor
    """uint8 [out_features, in_features], one number each, 4 bits in 8 as well (products pack them).
    Of float8: its bytes."""
    scales: Tensor
    """float32 [out_features, in_features / group_size], each for a group of columns."""
    zeros: Tensor | None = None
    """int16 of that shape, the codes that mean 0. Of float8: None."""
    minimums: Tensor | None = None
    """float32 of that shape, or None."""
    keeps_rows: bool = False
    """Multiply it with rows as they are: to the bits of the decoded weight's product. Else rows may
    be rounded to 8 bits."""

    def __post_init__(self) -> None:
        """Check shapes and types."""
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2 or not self.codes.numel():
            raise ValueError(
                f"codes are {self.codes.dtype} {list(self.codes.shape)}, no matrix of uint8"
            )
        rows, width = self.codes.shape
        if self.scales.dim() != 2 or len(self.scales) != rows or not self.scales.shape[1]:
            raise ValueError(f"scales are {list(self.scales.shape)}, not [{rows}, groups]")
        if width % self.scales.shape[1]:
            raise ValueError(
                f"{width} columns are no whole number of {self.scales.shape[1]} groups"
            )
        if (self.zeros is None) != (self.number == "float8"):
            raise ValueError(f"zeros are {self.zeros} for {self.number}")
        for name, part in (("zeros", self.zeros), ("minimums", self.minimums)):
            if part is not None and part.shape != self.scales.shape:
                raise ValueError(f"{name} are {list(part.shape)}, not {list(self.scales.shape)}")

    @property
    def shape(self) -> torch.Size:
        """The weight's: [out_features, in_features]."""
        return self.codes.shape

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def scale_dtype(self) -> torch.dtype:
        """The smallest type that holds all scales and minimums; float32 for those of float8."""
        if self.number == "float8":
            return torch.float32
        parts = [part for part in (self.scales, self.minimums) if part is not None]
        for dtype in (torch.float16, torch.bfloat16):
            if all(torch.equal(part.to(dtype).float(), part) for part in parts):
                return dtype
        return torch.float32

    @property
    def own_zeros(self) -> Tensor | None:
        """The codes that mean 0, where they are not one for all groups."""
        if self.zeros is None or bool((self.zeros == self.zeros[0, 0]).all()):
            return None
        return self.zeros

    @property
    def common_zero(self) -> int:
        """The code that means 0, where it is one for all groups; else 0."""
        return 0 if self.zeros is None or self.own_zeros is not None else int(self.zeros[0, 0])

    @property
    def num_bytes(self) -> int:
        """Bytes that products hold: codes, scales, minimums, and zero points that differ."""
        scale_bytes = self.scale_dtype.itemsize * (1 if self.minimums is None else 2)
        if self.own_zeros is not None:
            scale_bytes += self.own_zeros.dtype.itemsize
        return self.codes.numel() * NUMBERS[self.number] // 8 + self.scales.numel() * scale_bytes

    @property
    def is_tame(self) -> bool:
        """True if kernels agree on every number that it stands for: no NaN, none too small."""
        for part in (self.scales, self.minimums):
            if part is not None and not bool(
                (
                    (part.abs() >= _SMALLEST_SCALE) & (part.abs() <= _LARGEST_SCALE) | (part == 0)
                ).all()
            ):
                return False
        if self.number != "float8":
            return True
        has_nan = bool(((self.codes & _FLOAT8_NAN) == _FLOAT8_NAN).any())
        return not has_nan and bool((self.scales.abs() <= _LARGEST_FLOAT8_SCALE).all())

    def rows(self, which: Tensor | slice) -> "StoredWeight":
        """Return some of the rows, or all of them in another order."""
        return self._each(lambda part: part[which])

    def to(self, device: torch.device) -> "StoredWeight":
        """Return it with its tensors on a device."""
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "StoredWeight":
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
            minimums=None if self.minimums is None else change(self.minimums),
        )

    def decoded(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight that is meant, computed in float32: the oracle of every product."""
        result = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        rows_at_once = max(_NUMBERS_AT_ONCE // self.shape[1], 1)
        for first in range(0, len(self.codes), rows_at_once):
            rows = slice(first, first + rows_at_once)
            result[rows] = self.rows(rows)._decoded()
        return result

    def _decoded(self) -> Tensor:
        """Return float32 [out_features, in_features]."""
        codes = self.codes.view(torch.float8_e4m3fn) if self.number == "float8" else self.codes
        wide = codes.float().view(*self.scales.shape, -1)
        if self.zeros is not None:
            wide -= self.zeros.unsqueeze(-1)
        wide *= self.scales.unsqueeze(-1)
        if self.minimums is not None:
            wide -= self.minimums.unsqueeze(-1)
        return wide.flatten(1)


def joined(parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """Return weights of one width one below the other; None for integers beside float8.

    Where they differ in bits or groups, the more bits and the smaller groups hold them all.
    """
    numbers = {part.number for part in parts}
    if len(numbers) > 1 and "float8" in numbers:
        return None
    number: Number = numbers.pop() if len(numbers) == 1 else "int8"
    groups = math.lcm(*(part.scales.shape[1] for part in parts))
    if parts[0].shape[1] % groups:
        return None
    has_minimums = any(part.minimums is not None for part in parts)

    def together(found: Iterable[Tensor]) -> Tensor:
        return torch.cat([each.repeat_interleave(groups // each.shape[1], dim=1) for each in found])

    return StoredWeight(
        number=number,
        codes=torch.cat([part.codes for part in parts]),
        scales=together(part.scales for part in parts),
        zeros=None
        if number == "float8"
        else together(part.zeros for part in parts if part.zeros is not None),
        minimums=together(
            torch.zeros_like(part.scales) if part.minimums is None else part.minimums
            for part in parts
        )
        if has_minimums
        else None,
    )
