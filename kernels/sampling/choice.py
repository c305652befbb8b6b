"""The token of each row, without the scores and the noise of all the others.

On a CPU both are only needed where they decide: the compiled library looks at the noise's bits and
works out the logarithms for the few tokens that may win (kernels/cpu/sampling_kernels.h).
"""

import ctypes
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.cpu.product_library import ProductLibrary
from outrider.kernels.cpu.structs import ChoiceCall
from outrider.kernels.sampling.compiled import instruction_set, num_threads_for, row_library
from outrider.kernels.sampling.sample import top_tokens
from outrider.kernels.sampling.sampling_rows import SamplingRows

# kNoMemory and kNothingAllowed in rows.h.
_NO_MEMORY: Final = -1
_NOTHING_ALLOWED: Final = -2
MASK_BITS: Final = 32
"""Tokens in a word of a mask: bit i % 32 of word i // 32 allows token i."""


def choose_row_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """argmax(log target + Gumbel noise) of each row, int64 [num_rows]; only launched on CUDA.

    `logits`: float32 [num_rows, vocab_size]. Greedy rows choose by logits. Of equal scores the
    first. A row with NaN chooses the first of them, else one with infinity the first of those.
    Raises MemoryError.
    """
    library = row_library(logits)
    if library is None:
        return top_tokens(logits, rows, 1).token_ids[:, 0]
    return _choose(library, logits, rows, None)


def choose_allowed_tokens(
    logits: Tensor, rows: SamplingRows, masks: NDArray[np.int32]
) -> Tensor | None:
    """`choose_row_tokens` among the tokens that each row's mask allows.

    `masks`: [num_rows, ceil(vocab_size / MASK_BITS)], contiguous. Returns None where the library
    does not take the rows, and where all that a row's mask allows is -inf.
    """
    library = row_library(logits)
    token_ids = None if library is None else _choose(library, logits, rows, masks)
    if token_ids is None or int(token_ids.min()) == _NOTHING_ALLOWED:
        return None
    return token_ids


def _choose(
    library: ProductLibrary, logits: Tensor, rows: SamplingRows, masks: NDArray[np.int32] | None
) -> Tensor:
    token_ids = np.empty(len(logits), dtype=np.int64)
    call = ChoiceCall(
        *logits.shape,
        logits.stride(0),
        logits.data_ptr(),
        rows.temperature.data_ptr(),
        rows.top_k.data_ptr(),
        rows.top_p.data_ptr(),
        rows.min_p.data_ptr(),
        rows.noise_keys.data_ptr(),
        None if masks is None else masks.ctypes.data,
        token_ids.ctypes.data,
    )
    library.choose(ctypes.addressof(call), instruction_set(), num_threads_for(logits))
    if (token_ids == _NO_MEMORY).any():
        raise MemoryError(f"{len(logits)} rows of {logits.shape[1]} scores found no memory")
    return torch.from_numpy(token_ids)
