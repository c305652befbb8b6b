"""The token of each row, without the scores and the noise of all the others.

On a CPU both are only needed where they decide: the compiled library looks at the noise's bits and
works out the logarithms for the few tokens that may win (kernels/cpu/sampling_kernels.h).
"""

import ctypes

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.cpu.structs import ChoiceCall
from outrider.kernels.sampling.compiled import instruction_set, num_threads_for, row_library
from outrider.kernels.sampling.sample import top_tokens
from outrider.kernels.sampling.sampling_rows import SamplingRows


def choose_row_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """argmax(log target + Gumbel noise) of each row, int64 [num_rows]; only launched on CUDA.

    `logits`: float32 [num_rows, vocab_size]. Greedy rows choose by logits. Of equal scores the
    first. A row with NaN chooses the first of them, else one with infinity the first of those.
    Raises MemoryError.
    """
    library = row_library(logits)
    if library is None:
        return top_tokens(logits, rows, 1).token_ids[:, 0]
    token_ids = torch.from_numpy(np.empty(len(logits), dtype=np.int64))
    call = ChoiceCall(
        *logits.shape,
        logits.stride(0),
        logits.data_ptr(),
        rows.temperature.data_ptr(),
        rows.top_k.data_ptr(),
        rows.top_p.data_ptr(),
        rows.min_p.data_ptr(),
        rows.noise_keys.data_ptr(),
        token_ids.data_ptr(),
    )
    library.choose(ctypes.addressof(call), instruction_set(), num_threads_for(logits))
    if int(token_ids.min()) < 0:
        raise MemoryError(f"{len(logits)} rows of {logits.shape[1]} scores found no memory")
    return token_ids
