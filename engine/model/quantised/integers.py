"""Weights in packed integers: GPTQ, AWQ, and compressed-tensors' W4A16, W8A16 and W8A8.

Layouts: Frantar et al., "GPTQ", 2023, as AutoGPTQ stores it; Lin et al., "AWQ", 2024, as AutoAWQ
stores it ("gemm"); https://github.com/vllm-project/compressed-tensors.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from outrider.engine.model.quantised.stored import (
    Integers,
    StoredTensors,
    expect,
    expect_groups,
    scales_of,
    stem_of,
    words_of,
)
from outrider.kernels.quantised.stored_weight import Number, StoredWeight

_WORD_BITS, _BYTE_BITS = 32, 8
# The place, among its eight columns, of each nibble of an AWQ word.
_AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Split int32 [..., n] into unsigned numbers, uint8 [..., n * 32 / bits], low bits first."""
    numbers = words.contiguous().view(torch.uint8)
    if bits == _BYTE_BITS:
        return numbers.clone()
    return torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def _number(bits: int) -> Number:
    return "int4" if bits == 4 else "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """GPTQ. `zero_offset`: what the first version of the format takes from its zero points."""

    bits: int
    zero_offset: int
    group_size: int | None = None
    ignored: ClassVar[tuple[str, ...]] = ()

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Decode `qweight` int32 [in * bits / 32, out], `qzeros`, `scales` and `g_idx`."""
        found = self._integers(stored, name)
        return None if found is None else found.decoded(name)

    def packed(self, stored: StoredTensors, name: str) -> StoredWeight | None:
        """Return the same numbers as they are; None where `g_idx` puts them in another order."""
        found = self._integers(stored, name)
        return None if found is None else found.packed(name)

    def _integers(self, stored: StoredTensors, name: str) -> Integers | None:
        stem = stem_of(name)
        if f"{stem}.qweight" not in stored:
            return None
        words = words_of(stored, name, "qweight")
        codes = unpack(words.T.contiguous(), self.bits)  # [out, in]
        scales = scales_of(stored, name, "scales")  # [groups, out]
        zeros = unpack(words_of(stored, name, "qzeros"), self.bits).short() + self.zero_offset
        rows, width = codes.shape
        expect(scales.dim() == 2 and scales.shape[1] == rows, name, "scales have another width")
        expect(zeros.shape == scales.shape, name, "qzeros and scales differ in their shapes")
        expect_groups(scales.T, width, self.group_size, name)
        return Integers(
            number=_number(self.bits),
            codes=codes,
            scales=scales.T.contiguous(),
            zeros=zeros.T.contiguous(),
            group_of=stored.raw(f"{stem}.g_idx") if f"{stem}.g_idx" in stored else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """AWQ with 4 bits, as its "gemm" kernels read it."""

    group_size: int | None = None
    ignored: ClassVar[tuple[str, ...]] = ()

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Decode `qweight` int32 [in, out / 8], `qzeros` [groups, out / 8], `scales`."""
        found = self._integers(stored, name)
        return None if found is None else found.decoded(name)

    def packed(self, stored: StoredTensors, name: str) -> StoredWeight | None:
        """Return the same numbers as they are."""
        found = self._integers(stored, name)
        return None if found is None else found.packed(name)

    def _integers(self, stored: StoredTensors, name: str) -> Integers | None:
        stem = stem_of(name)
        if f"{stem}.qweight" not in stored:
            return None
        codes = self._columns(words_of(stored, name, "qweight"))  # [in, out]
        zeros = self._columns(words_of(stored, name, "qzeros")).short()
        scales = scales_of(stored, name, "scales")
        expect(scales.dim() == 2 and scales.shape[1] == codes.shape[1], name, "scales differ")
        expect(zeros.shape == scales.shape, name, "qzeros and scales differ in their shapes")
        expect_groups(scales.T, len(codes), self.group_size, name)
        return Integers(
            number="int4",
            codes=codes.T.contiguous(),
            scales=scales.T.contiguous(),
            zeros=zeros.T.contiguous(),
        )

    @staticmethod
    def _columns(words: Tensor) -> Tensor:
        """Unpack [n, words] to [n, 8 * words], the nibbles in the order of the columns."""
        nibbles = unpack(words, 4).view(len(words), -1, len(_AWQ_COLUMNS))
        order = sorted(range(len(_AWQ_COLUMNS)), key=_AWQ_COLUMNS.__getitem__)
        return nibbles[..., order].flatten(-2)


def packed_integers(stored: StoredTensors, name: str, group_size: int | None) -> Integers:
    """Return compressed-tensors' `weight_packed` int32 [out, words]; 4 or 8 bits by its width."""
    stem = stem_of(name)
    shape = stored.raw(f"{stem}.weight_shape").flatten().tolist()
    fits = len(shape) == 2 and all(isinstance(size, int) and size > 0 for size in shape)
    expect(fits, name, "weight_shape is not two sizes")
    rows, width = shape
    words = words_of(stored, name, "weight_packed")
    fitting = [bits for bits in (4, 8) if words.shape == (rows, -(-width * bits // _WORD_BITS))]
    expect(len(fitting) == 1, name, f"weight_packed holds neither 4 nor 8 bits for {width} columns")
    bits = fitting[0]
    scales = scales_of(stored, name, "weight_scale")
    expect(scales.dim() == 2 and len(scales) == rows, name, "weight_scale has other rows")
    expect_groups(scales, width, group_size, name)
    # What compressed-tensors adds to all numbers before it packs them: the code of 0.
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int16)
    if f"{stem}.weight_zero_point" in stored:
        packed = words_of(stored, name, "weight_zero_point")
        zeros = unpack(packed.T.contiguous(), bits).T[:rows].short().contiguous()
        expect(zeros.shape == scales.shape, name, "weight_zero_point has another shape")
    index = f"{stem}.weight_g_idx"
    return Integers(
        number=_number(bits),
        codes=unpack(words, bits)[:, :width].contiguous(),
        scales=scales,
        zeros=zeros,
        group_of=stored.raw(index) if index in stored else None,
    )
