"""Weights in 8 and 4 bits of floating point: scaled float8, and MXFP4 (OCP Microscaling, 2023)."""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from outrider.engine.model.quantised.integers import packed_integers
from outrider.engine.model.quantised.stored import (
    Integers,
    StoredTensors,
    expect,
    expect_groups,
    per_group,
    scales_of,
    stem_of,
)
from outrider.kernels.quantised.stored_weight import StoredWeight

_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_BIAS, _MXFP4_NAN = 127, 255
_INT8_ZERO: Final = 128  # the code of 0, where the least number has the code 0
_SMALL_TYPES: Final = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_ACTIVATION_SCALES: Final = ("input_scale", "k_scale", "v_scale", "q_scale", "input_zero_point")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFp8:
    """float8 with a scale for each block of rows and columns, as DeepSeek V3 and Qwen 3 have it."""

    block: tuple[int, int] | None
    ignored: ClassVar[tuple[str, ...]] = _ACTIVATION_SCALES

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Decode a float8 [out, in] with `weight_scale_inv` [blocks of rows, blocks of columns]."""
        found = self._scaled(stored, name)
        return found.decoded(name) if isinstance(found, Scaled) else found

    def packed(self, stored: StoredTensors, name: str) -> StoredWeight | None:
        """Return the same numbers as they are."""
        found = self._scaled(stored, name)
        return found.packed(name) if isinstance(found, Scaled) else None

    def _scaled(self, stored: StoredTensors, name: str) -> "Scaled | Tensor | None":
        if name not in stored:
            return None
        weight = stored.raw(name)
        if weight.dtype not in _SMALL_TYPES:
            return weight
        stem = stem_of(name)
        kept = next(
            (each for each in ("weight_scale_inv", "weight_scale") if f"{stem}.{each}" in stored),
            None,
        )
        expect(kept is not None, name, "it has no weight_scale_inv")
        return Scaled(weight, scales_of(stored, name, str(kept)), block=self.block)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors:
    """compressed-tensors: packed integers, int8, or float8, with scales by row, group or block."""

    block: tuple[int, int] | None
    group_size: int | None = None
    ignored: ClassVar[tuple[str, ...]] = _ACTIVATION_SCALES

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Decode what is there: `weight_packed`, or a weight of 8 bits beside `weight_scale`."""
        found = self._found(stored, name)
        return found.decoded(name) if isinstance(found, (Integers, Scaled)) else found

    def packed(self, stored: StoredTensors, name: str) -> StoredWeight | None:
        """Return the same numbers as they are."""
        found = self._found(stored, name)
        return found.packed(name) if isinstance(found, (Integers, Scaled)) else None

    def _found(self, stored: StoredTensors, name: str) -> "Integers | Scaled | Tensor | None":
        stem = stem_of(name)
        if f"{stem}.weight_packed" in stored:
            return packed_integers(stored, name, self.group_size)
        if name not in stored:
            return None
        weight = stored.raw(name)
        if weight.dtype not in _SMALL_TYPES:
            return weight
        expect(f"{stem}.weight_scale" in stored, name, "it has no weight_scale")
        zeros = None
        if f"{stem}.weight_zero_point" in stored:
            zeros = stored.raw(f"{stem}.weight_zero_point")
        scale = scales_of(stored, name, "weight_scale")
        expect(weight.dim() == 2, name, "it is no matrix")
        expect_groups(scale, weight.shape[-1], self.group_size, name)
        return Scaled(weight, scale, block=self.block, zeros=zeros)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4:
    """gpt-oss' experts: numbers of 4 bits, 32 to a power of two."""

    ignored: ClassVar[tuple[str, ...]] = ()

    def decode(self, stored: StoredTensors, name: str) -> Tensor | None:
        """Decode `_blocks` uint8 [experts, out, groups, 16] and `_scales` to [experts, in, out].

        bfloat16, which holds every such number exactly.
        """
        if f"{name}_blocks" not in stored:
            return None
        blocks, scales = stored.raw(f"{name}_blocks"), stored.raw(f"{name}_scales")
        expect(blocks.dtype == scales.dtype == torch.uint8, name, "it is not stored in bytes")
        expect(
            blocks.dim() == 4 and blocks.shape[:3] == scales.shape and blocks.shape[3] == 16,
            name,
            f"blocks {list(blocks.shape)} and scales {list(scales.shape)} do not fit",
        )
        expect(not bool((scales == _MXFP4_NAN).any()), f"{name}_scales", "a scale is no number")
        values = torch.tensor(
            [*_FP4_VALUES, *(-value for value in _FP4_VALUES)], dtype=torch.bfloat16
        )
        pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
        powers = (scales.int() - _MXFP4_BIAS).unsqueeze(-1)
        return torch.ldexp(values[pairs], powers).to(torch.bfloat16).flatten(-2).transpose(1, 2)

    def packed(self, stored: StoredTensors, name: str) -> None:
        """None: experts are decoded."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """`(weight - zeros) * scale`: a weight of 8 bits, int8 or float8 [out, in]."""

    weight: Tensor
    scale: Tensor
    """One number, [out] or [out, 1], [out, groups], or [blocks of rows, blocks of columns]."""
    block: tuple[int, int] | None = None
    """The size of such blocks."""
    zeros: Tensor | None = None
    """Shaped as `scale`."""

    def decoded(self, name: str) -> Tensor:
        """Return float32 [out, in]. Raises ValueError, with the tensor's name."""
        expect(self.weight.dim() == 2, name, "it is no matrix")
        numbers = self.weight.float()
        if self.zeros is not None:
            numbers = numbers - _spread(self.zeros.float(), numbers, name, self.block)
        return numbers * _spread(self.scale.float(), numbers, name, self.block)

    def packed(self, name: str) -> StoredWeight | None:
        """Return it as products hold it; None for other numbers and blocks that do not divide."""
        weight, block = self.weight, self.block
        expect(weight.dim() == 2, name, "it is no matrix")
        if weight.dtype not in (torch.int8, torch.float8_e4m3fn):
            return None
        if weight.dtype == torch.float8_e4m3fn and self.zeros is not None:
            return None
        scales = _by_groups(_spread(self.scale.float(), weight, name, block), self.scale, weight)
        if scales is None:
            return None
        codes = weight.contiguous().view(torch.uint8)
        if weight.dtype == torch.float8_e4m3fn:
            return StoredWeight(number="float8", codes=codes.clone(), scales=scales)
        zeros = torch.full_like(scales, _INT8_ZERO, dtype=torch.int16)
        if self.zeros is not None:
            # A zero point for each scale, whole numbers of 8 bits; else they are decoded.
            if self.zeros.shape != self.scale.shape or self.zeros.dtype != torch.int8:
                return None
            spread = _by_groups(_spread(self.zeros, weight, name, block), self.zeros, weight)
            if spread is None:
                return None
            zeros += spread
        return StoredWeight(number="int8", codes=codes ^ _INT8_ZERO, scales=scales, zeros=zeros)


def _by_groups(spread: Tensor, given: Tensor, weight: Tensor) -> Tensor | None:
    """Return numbers of groups of columns, [out, groups], of ones that were spread over a weight.

    `given`: as they are stored. None where the last group is smaller than the others.
    """
    rows, width = weight.shape
    groups = given.shape[1] if given.dim() == 2 else 1
    if width % groups:
        return None
    spread = spread.expand(rows, width)
    found = spread[:, :: width // groups].contiguous()
    is_right = torch.equal(found.repeat_interleave(width // groups, 1), spread)
    return found if is_right else None


def _spread(scale: Tensor, like: Tensor, name: str, block: tuple[int, int] | None) -> Tensor:
    rows, width = like.shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale.unsqueeze(1)
    if scale.dim() == 2 and len(scale) == rows:
        return per_group(scale, width, name)
    high, wide = block or (0, 0)
    expect(
        min(high, wide) > 0 and scale.shape == (-(-rows // high), -(-width // wide)),
        name,
        f"scales {list(scale.shape)} do not fit {rows} rows and {width} columns",
    )
    tall = scale.repeat_interleave(min(high, rows), 0)[:rows]
    return tall.repeat_interleave(min(wide, width), 1)[:, :width]
