"""Look up the rows of a table of vectors."""

import torch
from torch import Tensor

from outrider.kernels.triton_support import jit, launch, next_power_of_2, tl, triton, uses_triton

_CHUNK = 2048


@jit
def _embed_kernel(  # type: ignore[no-untyped-def]
    table, token_ids, result, num_tokens, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    """Program (i, j): columns j * CHUNK and so on of row i."""
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids + row)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    known_width = tl.where((token_id >= 0) & (token_id < num_tokens), WIDTH, 0)
    values = tl.load(table + token_id * WIDTH + columns, mask=columns < known_width, other=0.0)
    tl.store(result + row * WIDTH + columns, values, mask=columns < WIDTH)


def embed_tokens(table: Tensor, token_ids: Tensor) -> Tensor:
    """Row i of the result is `table[token_ids[i]]`.

    `table`: [num_tokens, d], contiguous; `token_ids`: [n] int64; returns [n, d]. An id that is not
    in the table is an IndexError on the CPU. On a GPU it gives zeros: rows that only fill up a CUDA
    graph may hold anything, and torch's own look-up would end the process.
    """
    if not uses_triton(table):
        return table.index_select(0, token_ids)
    num_tokens, width = table.shape
    result = torch.empty((token_ids.shape[0], width), dtype=table.dtype, device=table.device)
    chunk = min(_CHUNK, next_power_of_2(width))
    launch(
        _embed_kernel,
        (token_ids.shape[0], triton.cdiv(width, chunk)),
        table,
        token_ids,
        result,
        num_tokens,
        num_warps=4,
        WIDTH=width,
        CHUNK=chunk,
    )
    return result
