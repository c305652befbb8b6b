"""Attention on the CPU whose rows keep their bits, compiled (attend_tile.h).

Every row reads its keys in the order of their positions, in chunks of 32 counted from position 0,
with a running softmax: Milakov, Gimelshein, 2018 ("Online normalizer calculation for softmax"). A
chunk that rows of a sequence share is made ready once for up to `TILE_ROWS` of them; what a row
adds up does not depend on them. A tree's nodes see, from the chunk on in which the tree begins, a
path of their own. The reference is `outrider.kernels.attention.ordered_attention`, which sums in
another order.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.cpu.product_library import InstructionSet, library_for, product_support
from outrider.kernels.cpu.structs import Attention

TILE_ROWS: Final = 16
CHUNK_KEYS: Final = 32
_LANES: Final = 16


def can_attend_rows(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """True if the library is there and computes attention of such heads."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and head_dim % _LANES == 0
        and product_support().library is not None
    )


@dataclass(slots=True, kw_only=True)
class RowKeys:
    """Rows and the keys that each sees."""

    struct: Attention
    """As the library reads them, with addresses in `memory`; the fields of a call are 0."""
    num_rows: int
    memory: NDArray[np.int64]


def attend_rows(  # noqa: PLR0913 - as `paged_attention`
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: RowKeys,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    instruction_set: InstructionSet | None = None,
) -> Tensor:
    """Return bfloat16 [n, num_query_heads, head_dim]; arguments as for `paged_attention`.

    All bfloat16; caches contiguous. Rows of no sequence are left unwritten.
    """
    library, instruction_set = library_for(instruction_set)
    query = query.contiguous()
    output = torch.empty_like(query)
    num_rows, num_query_heads, head_dim = query.shape
    for cache in (k_cache, v_cache):
        if cache.dtype != torch.bfloat16 or cache.shape[3] != head_dim or not cache.is_contiguous():
            raise ValueError(f"a cache of {cache.dtype} {list(cache.shape)} cannot be read here")
    if query.dtype != torch.bfloat16 or keys.num_rows > num_rows:
        raise ValueError(f"{num_rows} rows of {query.dtype}, but keys of {keys.num_rows}")
    call = Attention.from_buffer_copy(keys.struct)
    call.num_query_heads, call.num_kv_heads = num_query_heads, k_cache.shape[2]
    call.head_dim = head_dim
    call.query, call.output = query.data_ptr(), output.data_ptr()
    call.keys, call.values = k_cache.data_ptr(), v_cache.data_ptr()
    call.sinks = None if sinks is None else sinks.data_ptr()
    call.scale, call.softcap = scale, softcap or 0.0
    if call.num_tiles:
        library.attend(ctypes.addressof(call), instruction_set, torch.get_num_threads())
    return output
