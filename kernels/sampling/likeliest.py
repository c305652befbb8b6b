"""The likeliest tokens of each row, and their probabilities."""

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.cpu.structs import LikeliestCall
from outrider.kernels.sampling.compiled import instruction_set, num_threads_for, row_library

# kMostLikeliest in rows.h.
MOST_COMPILED: Final = 16


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Likeliest:
    """The likeliest tokens of each row, the likeliest first."""

    token_ids: Tensor
    """int64 [num_rows, count]."""
    probs: Tensor
    """float32 [num_rows, count]."""


def _reference(scores: Tensor, count: int) -> Likeliest:
    best = scores.softmax(-1).topk(count)
    return Likeliest(token_ids=best.indices, probs=best.values)


def likeliest_tokens(scores: Tensor, count: int) -> Likeliest:
    """Return the tokens of the greatest scores, and the softmax of the scores there.

    `scores`: float32 [num_rows, vocab_size]; `count`: at most vocab_size. Probabilities may differ
    in their last bits from device to device. On a CPU compiled, in one reading of the scores and a
    half, where the library was built; else torch's softmax and topk.
    """
    library = row_library(scores)
    if library is None or not 0 < count <= MOST_COMPILED:
        return _reference(scores, count)
    num_rows, vocab_size = scores.shape
    # By way of numpy in half the time of torch.empty: this runs for every level of drafts.
    token_ids = torch.from_numpy(np.empty((num_rows, count), dtype=np.int64))
    probs = torch.from_numpy(np.empty((num_rows, count), dtype=np.float32))
    call = LikeliestCall(
        num_rows,
        vocab_size,
        scores.stride(0),
        count,
        scores.data_ptr(),
        token_ids.data_ptr(),
        probs.data_ptr(),
    )
    library.rank(ctypes.addressof(call), instruction_set(), num_threads_for(scores))
    return Likeliest(token_ids=token_ids, probs=probs)
