"""The keys of every row in order, for the compiled attention of
`outrider.kernels.cpu.row_attention`.
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.kernels.attention.attention_plan import AttentionBatch, AttentionPlan
from outrider.kernels.attention.ordered_plan import OrderedPlan
from outrider.kernels.cpu.product_library import library_for
from outrider.kernels.cpu.row_attention import CHUNK_KEYS, TILE_ROWS, RowKeys
from outrider.kernels.cpu.structs import Attention, RowPlanCall

_WORD_BITS = 64


@dataclass(slots=True)
class MadeOnce:
    """A plan that is made when it is first asked for: `functools.cache` costs more than most are.

    Most passes never ask.
    """

    make: Callable[[], AttentionPlan | OrderedPlan]
    _made: AttentionPlan | OrderedPlan | None = None

    def __call__(self) -> AttentionPlan | OrderedPlan:
        """Return the plan, the same in every call."""
        if self._made is None:
            self._made = self.make()
        return self._made


@dataclass(slots=True, kw_only=True)
class RowPlan:
    """A step's rows and keys; the same for all layers."""

    keys: RowKeys
    for_other_caches: MadeOnce
    """Makes the plan for a cache that compiled attention does not read (fp8)."""
    full: "RowPlan | None" = None
    """The plan of the layers that have no window, where only some layers have one."""


def plan_row_keys(batch: AttentionBatch, *, block_size: int, window: int | None) -> RowKeys:
    """Locate the keys of every row of a step, once for all layers.

    A key that no row sees may lie in a block that does not exist any more.
    """
    fields: list[int] = []  # of each PlannedSequence in row_plan.h
    blocks: list[int] = []
    masks: list[int] = []
    start = num_tiles = num_own = mask_words = most_rows = 0
    for end, num_keys, tree_start, own, table in zip(
        batch.query_indptr[1:],
        batch.kv_lens,
        batch.tree_starts,
        batch.ancestor_masks,
        batch.block_tables,
        strict=True,
    ):
        fields += (start, end, num_keys, tree_start, len(blocks), own is not None)
        blocks += table
        num_tiles += -(-(end - start) // TILE_ROWS)
        most_rows = max(most_rows, end - start)
        if own is not None:
            masks += own
            # A path is at most as long as the tree's slots, behind less than a chunk.
            num_own += (end - start) * (num_keys - tree_start + CHUNK_KEYS)
            mask_words = max(mask_words, -(-(num_keys - tree_start) // _WORD_BITS))
        start = end
    words, places = _make_room(
        num_rows=start, num_tiles=num_tiles, num_keys=sum(batch.kv_lens), num_own=num_own
    )
    call = RowPlanCall(
        *(len(batch.kv_lens), block_size, window or 0, TILE_ROWS, mask_words),
        # `struct` packs a list in a third of the time of an `array` or of numpy.
        *(struct.pack(f"{len(fields)}q", *fields), struct.pack(f"{len(blocks)}q", *blocks)),
        b"".join([mask.to_bytes(8 * mask_words, "little") for mask in masks]),
        *places,
    )
    keys = Attention(max_tile_rows=min(most_rows, TILE_ROWS))
    keys.tiles, keys.tile_slots, keys.slots, keys.begins = places[:4]
    keys.ends, keys.own_begins, keys.own_starts, keys.own_slots = places[4:]
    keys.num_tiles = library_for()[0].plan_rows(ctypes.addressof(call))
    return RowKeys(struct=keys, num_rows=start, memory=words)


def _make_room(
    *, num_rows: int, num_tiles: int, num_keys: int, num_own: int
) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Allocate a plan; return it, and where its parts begin: RowPlanCall's last fields.

    8-byte numbers stand first, then 4-byte ones.
    """
    num_small = 3 * num_rows + 2 * num_tiles + num_keys + num_own
    words = np.empty(num_rows + num_tiles + (num_small + 1) // 2, dtype=np.int64)
    # In a quarter of the time of `words.ctypes.data`.
    own_starts = ctypes.addressof(ctypes.c_char.from_buffer(words.data)) if words.size else 0
    tile_slots = own_starts + 8 * num_rows
    tiles = tile_slots + 8 * num_tiles
    begins = tiles + 8 * num_tiles  # two numbers of 4 bytes a tile
    ends = begins + 4 * num_rows
    own_begins = ends + 4 * num_rows
    slots = own_begins + 4 * num_rows
    own_slots = slots + 4 * num_keys
    return words, (tiles, tile_slots, slots, begins, ends, own_begins, own_starts, own_slots)
