"""Follows the greatest logits of each row through trees, in one call of the compiled library."""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from outrider.kernels.cpu.structs import JudgeCall
from outrider.kernels.sampling.compiled import row_library

JudgedPath = tuple[list[int], int]
"""The accepted nodes of a tree without its root, and the token behind them; -2 for that where the
greatest logit is not finite."""


def judge_by_greatest(
    logits: Tensor, token_ids: Sequence[list[int]], parents: Sequence[list[int]]
) -> list[JudgedPath] | None:
    """Judge trees whose every node chooses its greatest logit, of equal ones the first.

    `logits`: float32 [nodes of all trees, vocab_size]; `token_ids`, `parents`: of each tree's
    nodes, parents before children. Reads only the rows that paths reach. Returns None where the
    library was not built, or does not take these rows.
    """
    library = row_library(logits)
    if library is None:
        return None
    counts = array("q", [len(own) for own in token_ids])
    num_trees, num_nodes = len(counts), len(logits)
    tokens = array("q", chain.from_iterable(token_ids))
    above = array("q", chain.from_iterable(parents))
    found = array("q", bytes(8 * (num_nodes + 2 * num_trees)))
    paths_at = found.buffer_info()[0]
    lengths_at = paths_at + 8 * num_nodes
    call = JudgeCall(
        *(num_trees, logits.shape[1], logits.stride(0), logits.data_ptr()),
        *(counts.buffer_info()[0], tokens.buffer_info()[0], above.buffer_info()[0]),
        *(paths_at, lengths_at, lengths_at + 8 * num_trees),
    )
    library.judge(ctypes.addressof(call))
    numbers = found.tolist()
    judged: list[JudgedPath] = []
    start = 0
    for tree, count in enumerate(counts):
        length = numbers[num_nodes + tree]
        judged.append((numbers[start : start + length], numbers[num_nodes + num_trees + tree]))
        start += count
    return judged
