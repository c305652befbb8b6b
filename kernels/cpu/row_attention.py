"""Attention on the CPU whose rows keep their bits, compiled (attend_tile.h).

Every row reads its keys in the order of their positions, in chunks of 32 counted from position 0,
with a running softmax: Milakov, Gimelshein, 2018 ("Online normalizer calculation for softmax"). A
chunk that rows of a sequence share is made ready once for up to `TILE_ROWS` of them; what a row
adds up does not depend on them. A tree's nodes see, from the chunk on in which the tree begins, a
path of their own. The reference is `kernels.attention.ordered_attention`, which sums in another
order.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.arrays import Ints32, Ints64
from kernels.cpu.product_library import (
    Attention,
    InstructionSet,
    ProductLibrary,
    product_support,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKeys:
    """Rows and the keys that each sees, as struct Attention in products.h has them."""

    tiles: Ints32
    tile_slots: Ints64
    slots: Ints32
    begins: Ints32
    ends: Ints32
    own_begins: Ints32
    own_starts: Ints64
    own_slots: Ints32


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
    library, best = _library()
    query = query.contiguous()
    output = torch.empty_like(query)
    num_rows, num_query_heads, head_dim = query.shape
    for cache in (k_cache, v_cache):
        if cache.dtype != torch.bfloat16 or cache.shape[3] != head_dim or not cache.is_contiguous():
            raise ValueError(f"a cache of {cache.dtype} {list(cache.shape)} cannot be read here")
    if query.dtype != torch.bfloat16 or len(keys.begins) > num_rows:
        raise ValueError(f"{num_rows} rows of {query.dtype}, but keys of {len(keys.begins)}")
    call = Attention(
        num_query_heads=num_query_heads,
        num_kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        num_tiles=len(keys.tiles),
        max_tile_rows=TILE_ROWS,
        query=query.data_ptr(),
        keys=k_cache.data_ptr(),
        values=v_cache.data_ptr(),
        output=output.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        tiles=keys.tiles.ctypes.data,
        tile_slots=keys.tile_slots.ctypes.data,
        slots=keys.slots.ctypes.data,
        begins=keys.begins.ctypes.data,
        ends=keys.ends.ctypes.data,
        own_begins=keys.own_begins.ctypes.data,
        own_starts=keys.own_starts.ctypes.data,
        own_slots=keys.own_slots.ctypes.data,
        scale=scale,
        softcap=softcap or 0.0,
    )
    if len(keys.tiles):
        library.attend(ctypes.addressof(call), instruction_set or best, torch.get_num_threads())
    return output


def _library() -> tuple[ProductLibrary, InstructionSet]:
    support = product_support()
    if support.library is None:
        raise RuntimeError(f"compiled attention is not there; products: {support.detail}")
    return support.library, support.instruction_set
