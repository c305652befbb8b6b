"""Quantised blocks of GGUF files as they are, not decoded: codes, scales, zero points, minimums.

Layouts and the order of roundings: the decoder of the `gguf` package (`gguf.quants`), to the bit.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.quantised.stored_weight import Number, StoredWeight

_Parts = tuple[Number, Tensor, Tensor, int, Tensor | None]  # of blocks: see `_weight`


def packed_blocks(kind: str, blocks: Tensor, rows: int) -> StoredWeight | None:
    """Return a weight of so many rows as it is stored; None for a type that is decoded.

    `blocks`: uint8 [num_blocks, bytes of a block], row after row.
    """
    if kind not in _KINDS:
        return None
    number, codes, scales, zero, minimums = _KINDS[kind](blocks)
    scales = scales.reshape(rows, -1)
    return StoredWeight(
        number=number,
        codes=codes.reshape(rows, -1),
        scales=scales,
        zeros=torch.full_like(scales, zero, dtype=torch.int16),
        minimums=None if minimums is None else minimums.reshape(rows, -1),
    )


def _half(blocks: Tensor, place: int) -> Tensor:
    """Return the float16 number at a place of each block: float32 [n, 1]."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Return numbers of 4 bits, uint8 [n, 2 * m]: of each run of bytes the low ones, then the high.

    `packed`: uint8 [n, m].
    """
    runs = packed.reshape(len(packed), -1, run)
    return torch.stack((runs & 15, runs >> 4), 2).flatten(1)


def _q8_0(blocks: Tensor) -> _Parts:
    return "int8", blocks[:, 2:] ^ 128, _half(blocks, 0), 128, None


def _q4_0(blocks: Tensor) -> _Parts:
    return "int4", _nibbles(blocks[:, 2:], 16), _half(blocks, 0), 8, None


def _q4_1(blocks: Tensor) -> _Parts:
    return "int4", _nibbles(blocks[:, 4:], 16), _half(blocks, 0), 0, -_half(blocks, 2)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minimums of a block's eight groups: float32 [n, 8] each."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), 1)
    minimums = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), 1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minimums.float()


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minimums = _k_scales(blocks)
    return "int4", _nibbles(blocks[:, 16:], 32), scales, 0, minimums


def _q6_k(blocks: Tensor) -> _Parts:
    """Numbers of 6 bits in 8, in groups of 16."""
    low = _nibbles(blocks[:, :128], 64).view(-1, 8, 32)  # [n, 8, 32]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1) & 3  # [n, 2, 4, 32]
    codes = low | high.flatten(1, 2) << 4
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return "int8", codes.flatten(1), scales, 32, None


_KINDS: Final[Mapping[str, Callable[[Tensor], _Parts]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
