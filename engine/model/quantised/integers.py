"""Weights in packed integers: GPTQ, AWQ, and compressed-tensors' W4A16, W8A16 and W8A8.

Layouts: Frantar et al., "GPTQ", 2023, as AutoGPTQ stores it; Lin et al., "AWQ", 2024, as AutoAWQ
stores it ("gemm"); https://github.com/vllm-project/compressed-tensors.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from engine.model.quantised.stored import (
    StoredTensors,
    expect,
    expect_groups,
    per_group,
    scales_of,
    stem_of,
    words_of,
)

_WORD_BITS: Final = 32
# The place, among its eight columns, of each nibble of an AWQ word.
_AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Split int32 [..., n] into unsigned numbers, int32 [..., n * 32 / bits], low bits first."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    numbers: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """GPTQ. `zero_offset`: what the first version of the format takes from its zero points."""

    bits: int
    zero_offset: int
    group_size: int | None = None
    ignored: ClassVar[tuple[str, ...]] = ()

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Decode `qweight` int32 [in * bits / 32, out], `qzeros`, `scales` and `g_idx`."""
        stem = stem_of(name)
        if f"{stem}.qweight" not in stored:
            return None
        words = words_of(stored, name, "qweight")
        numbers = unpack(words.T.contiguous(), self.bits)  # [out, in]
        scales = scales_of(stored, name, "scales")  # [groups, out]
        zeros = unpack(words_of(stored, name, "qzeros"), self.bits) + self.zero_offset
        rows, width = numbers.shape
        expect(scales.dim() == 2 and scales.shape[1] == rows, name, "scales have another width")
        expect(zeros.shape == scales.shape, name, "qzeros and scales differ in their shapes")
        expect_groups(scales.T, width, self.group_size, name)
        group_of = stored.raw(f"{stem}.g_idx") if f"{stem}.g_idx" in stored else None
        scale = per_group(scales.T, width, name, group_of)
        zero = per_group(zeros.T, width, name, group_of)
        weight: Tensor = (numbers - zero) * scale
        return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """AWQ with 4 bits, as its "gemm" kernels read it."""

    group_size: int | None = None
    ignored: ClassVar[tuple[str, ...]] = ()

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Decode `qweight` int32 [in, out / 8], `qzeros` [groups, out / 8], `scales`."""
        stem = stem_of(name)
        if f"{stem}.qweight" not in stored:
            return None
        numbers = self._columns(words_of(stored, name, "qweight"))  # [in, out]
        zeros = self._columns(words_of(stored, name, "qzeros"))
        scales = scales_of(stored, name, "scales")
        expect(scales.dim() == 2 and scales.shape[1] == numbers.shape[1], name, "scales differ")
        expect(zeros.shape == scales.shape, name, "qzeros and scales differ in their shapes")
        width = len(numbers)
        expect_groups(scales.T, width, self.group_size, name)
        zero, scale = per_group(zeros.T, width, name), per_group(scales.T, width, name)
        weight: Tensor = (numbers.T - zero) * scale
        return weight

    @staticmethod
    def _columns(words: Tensor) -> Tensor:
        """Unpack [n, words] to [n, 8 * words], the nibbles in the order of the columns."""
        nibbles = unpack(words, 4).view(len(words), -1, len(_AWQ_COLUMNS))
        order = sorted(range(len(_AWQ_COLUMNS)), key=_AWQ_COLUMNS.__getitem__)
        return nibbles[..., order].flatten(-2)


def decode_packed(stored: StoredTensors, name: str, group_size: int | None) -> Tensor:
    """Decode compressed-tensors' `weight_packed` int32 [out, words]; 4 or 8 bits by its width."""
    stem = stem_of(name)
    shape = stored.raw(f"{stem}.weight_shape").flatten().tolist()
    fits = len(shape) == 2 and all(isinstance(size, int) and size > 0 for size in shape)
    expect(fits, name, "weight_shape is not two sizes")
    rows, width = shape
    words = words_of(stored, name, "weight_packed")
    fitting = [bits for bits in (4, 8) if words.shape == (rows, -(-width * bits // _WORD_BITS))]
    expect(len(fitting) == 1, name, f"weight_packed holds neither 4 nor 8 bits for {width} columns")
    bits = fitting[0]
    numbers = _signed(unpack(words, bits)[:, :width], bits)
    scales = scales_of(stored, name, "weight_scale")
    expect(scales.dim() == 2 and len(scales) == rows, name, "weight_scale has other rows")
    expect_groups(scales, width, group_size, name)
    zeros = torch.zeros_like(scales)
    if f"{stem}.weight_zero_point" in stored:
        packed = words_of(stored, name, "weight_zero_point")
        zeros = _signed(unpack(packed.T.contiguous(), bits).T[:rows], bits).float()
        expect(zeros.shape == scales.shape, name, "weight_zero_point has another shape")
    index = f"{stem}.weight_g_idx"
    group_of = stored.raw(index) if index in stored else None
    zeros = per_group(zeros, width, name, group_of)
    scales = per_group(scales, width, name, group_of)
    weight: Tensor = (numbers - zeros) * scales
    return weight


def _signed(numbers: Tensor, bits: int) -> Tensor:
    """Take off what compressed-tensors adds before it packs."""
    signed: Tensor = numbers - 2 ** (bits - 1)
    return signed
