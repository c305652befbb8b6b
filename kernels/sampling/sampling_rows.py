"""Parameters and noise keys by which each row of a pass chooses its token, on the device."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from outrider.kernels.triton_support import jit, launch, tl, uses_triton

# Fields begin at multiples of 16 bytes, so that kernels are compiled for one alignment only.
_ALIGNED_WORDS: Final = 4
_BLOCK: Final = 256


def field_stride(num_rows: int) -> int:
    """Count how many 32-bit words a field takes of those that `SamplingRows.of_words` reads."""
    return -(-num_rows // _ALIGNED_WORDS) * _ALIGNED_WORDS


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SamplingRows:
    """One entry a row; on one device.

    The host knows `has_sampled` and `has_truncation` without asking the device. They may be True
    too often.
    """

    temperature: Tensor
    """float32 [num_rows], 0 for a greedy row, whose other fields mean nothing."""
    top_k: Tensor
    """int32 [num_rows], 0 is off."""
    top_p: Tensor
    """float32 [num_rows], 1 is off."""
    min_p: Tensor
    """float32 [num_rows], 0 is off."""
    noise_keys: Tensor
    """int32 [num_rows, 2] (`outrider.kernels.sampling.gumbel_noise.row_key`)."""
    has_sampled: bool
    """True if any row may have a temperature."""
    has_truncation: bool
    """True if any row with a temperature may have top-k, top-p or min-p."""

    @classmethod
    def of_words(
        cls, words: Tensor, num_rows: int, *, has_sampled: bool, has_truncation: bool
    ) -> "SamplingRows":
        """Rows as views of int32 [6 * field_stride(num_rows)].

        In it the four parameters' bits, a field after the other, and the keys' pairs.
        """
        stride = field_stride(num_rows)
        temperature, top_k, top_p, min_p = words[: 4 * stride].view(4, stride)[:, :num_rows]
        return cls(
            temperature=temperature.view(torch.float32),
            top_k=top_k,
            top_p=top_p.view(torch.float32),
            min_p=min_p.view(torch.float32),
            noise_keys=words[4 * stride : 4 * stride + 2 * num_rows].view(num_rows, 2),
            has_sampled=has_sampled,
            has_truncation=has_truncation,
        )

    @property
    def num_rows(self) -> int:
        """Count how many rows there are."""
        return self.temperature.shape[0]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SamplingTable:
    """The same for all rows that several sequences may have in a step, by sequence and depth."""

    parameters: Tensor
    """int32 [4, num_sequences], contiguous: the bits of temperature, top-k, top-p and min-p."""
    noise_keys: Tensor
    """int32 [num_sequences, num_depths, 2], contiguous; depth d is for the token behind a node at
    depth d."""
    has_sampled: bool
    """See `SamplingRows`."""
    has_truncation: bool
    """See `SamplingRows`."""

    @property
    def num_depths(self) -> int:
        """Depths 0 up to the greatest."""
        return self.noise_keys.shape[1]

    def rows(self, sequence_index: Tensor, depth: Tensor) -> SamplingRows:
        """The rows of tree nodes, by their sequence and depth (int64 [num_rows], contiguous).

        Only launched. What lies outside the table (padding) gets the nearest entry.
        """
        num_rows = sequence_index.shape[0]
        gather = _launch_gather if uses_triton(sequence_index) else _gather
        words = gather(self.parameters, self.noise_keys, sequence_index, depth)
        return SamplingRows.of_words(
            words, num_rows, has_sampled=self.has_sampled, has_truncation=self.has_truncation
        )


def _gather(
    parameters: Tensor, noise_keys: Tensor, sequence_index: Tensor, depth: Tensor
) -> Tensor:
    """The specification: the words that `SamplingRows.of_words` reads."""
    num_rows, stride = sequence_index.shape[0], field_stride(sequence_index.shape[0])
    num_sequences, num_depths, _ = noise_keys.shape
    sequence = sequence_index.clamp(0, num_sequences - 1)
    words = parameters.new_zeros(6 * stride)
    words[: 4 * stride].view(4, stride)[:, :num_rows] = parameters[:, sequence]
    keys = noise_keys[sequence, depth.clamp(0, num_depths - 1)]  # [num_rows, 2]
    words[4 * stride : 4 * stride + 2 * num_rows] = keys.reshape(-1)
    return words


@jit
def _gather_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913
    words_ptr,
    parameters_ptr,
    keys_ptr,
    sequence_ptr,
    depth_ptr,
    num_rows,
    stride,
    num_sequences,
    num_depths,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    sequence = tl.load(sequence_ptr + rows, mask=is_row, other=0)
    sequence = tl.minimum(tl.maximum(sequence, 0), num_sequences - 1)
    depth = tl.load(depth_ptr + rows, mask=is_row, other=0)
    depth = tl.minimum(tl.maximum(depth, 0), num_depths - 1)
    for field in tl.static_range(4):
        word = tl.load(parameters_ptr + field * num_sequences + sequence, mask=is_row)
        tl.store(words_ptr + field * stride + rows, word, mask=is_row)
    for half in tl.static_range(2):
        key = tl.load(keys_ptr + (sequence * num_depths + depth) * 2 + half, mask=is_row)
        tl.store(words_ptr + 4 * stride + rows * 2 + half, key, mask=is_row)


def _launch_gather(
    parameters: Tensor, noise_keys: Tensor, sequence_index: Tensor, depth: Tensor
) -> Tensor:
    num_rows, stride = sequence_index.shape[0], field_stride(sequence_index.shape[0])
    words = parameters.new_empty(6 * stride)
    launch(
        _gather_kernel,
        (-(-num_rows // _BLOCK),),
        words,
        parameters,
        noise_keys,
        sequence_index,
        depth,
        num_rows,
        stride,
        noise_keys.shape[0],
        noise_keys.shape[1],
        num_warps=1,
        BLOCK=_BLOCK,
    )
    return words
