"""The compiled library on rows of scores: whether it takes them, and on how many threads."""

from typing import Final

import torch
from torch import Tensor

from outrider.kernels.cpu.product_library import (
    InstructionSet,
    ProductLibrary,
    product_support,
)
from outrider.kernels.triton_support import is_automatic

# A thread more for so many scores: starting one costs about what reading them does.
_SCORES_PER_THREAD: Final = 64 << 10


def row_library(rows: Tensor) -> ProductLibrary | None:
    """Return the library where it takes these rows: on a CPU, float32, each in one piece.

    None where it was not built, where OUTRIDER_KERNELS asks for the references, and for other rows.
    """
    is_taken = (
        rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and rows.stride(-1) == 1
        and is_automatic()
    )
    return product_support().library if is_taken else None


def instruction_set() -> InstructionSet:
    """Return the one whose operations on rows run."""
    return product_support().instruction_set


def num_threads_for(rows: Tensor) -> int:
    """Return how many threads are worth starting."""
    return min(torch.get_num_threads(), 1 + rows.numel() // _SCORES_PER_THREAD)
