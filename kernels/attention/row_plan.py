"""The keys of every row in order, for the compiled attention of `kernels.cpu.row_attention`."""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.attention.attention_plan import AttentionBatch, AttentionPlan
from kernels.attention.ordered_plan import OrderedPlan
from kernels.cpu.row_attention import CHUNK_KEYS, TILE_ROWS, RowKeys, compiled_library
from kernels.cpu.structs import Attention, RowPlanCall

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """A step's rows and keys; the same for all layers.

    `for_other_caches` makes the plan for a cache that compiled attention does not read (fp8).
    `full`: the plan of the layers that have no window, where only some layers have one.
    """

    keys: RowKeys
    for_other_caches: MadeOnce
    full: "RowPlan | None" = None


def plan_row_keys(batch: AttentionBatch, *, block_size: int, window: int | None) -> RowKeys:
    """Locate the keys of every row of a step, once for all layers.

    A key that no row sees may lie in a block that does not exist any more.
    """
    masks = [masks for masks in batch.ancestor_masks if masks is not None]
    mask_words = _num_words(masks)
    sequences, blocks = _numbers(batch)
    packed = b"".join([mask.to_bytes(8 * mask_words, "little") for own in masks for mask in own])
    words, places = _make_room(batch)
    call = RowPlanCall(
        *(len(batch.kv_lens), block_size, window or 0, TILE_ROWS, mask_words),
        *(sequences, blocks, packed, *places),
    )
    keys = Attention(max_tile_rows=TILE_ROWS, **dict(zip(_WRITTEN, places, strict=True)))
    keys.num_tiles = compiled_library()[0].plan_rows(ctypes.addressof(call))
    return RowKeys(struct=keys, num_rows=batch.query_indptr[-1], memory=words)


# In the order of RowPlanCall's last fields.
_WRITTEN = (
    *("tiles", "tile_slots", "slots", "begins", "ends", "own_begins", "own_starts", "own_slots"),
)


def _num_words(masks: list[list[int]]) -> int:
    # A mask of a higher bit is a greater number.
    widest = max([max(own) for own in masks if own], default=0)
    return -(-widest.bit_length() // _WORD_BITS)


def _numbers(batch: AttentionBatch) -> tuple[bytes, bytes]:
    """The fields of all sequences (PlannedSequence in row_plan.h), and all block tables."""
    fields: list[int] = []
    blocks: list[int] = []
    start = 0
    for end, num_keys, tree_start, masks, table in zip(
        batch.query_indptr[1:],
        batch.kv_lens,
        batch.tree_starts,
        batch.ancestor_masks,
        batch.block_tables,
        strict=True,
    ):
        fields += (start, end, num_keys, tree_start, len(blocks), masks is not None)
        blocks += table
        start = end
    # In a third of the time of an `array`.
    return struct.pack(f"{len(fields)}q", *fields), struct.pack(f"{len(blocks)}q", *blocks)


def _make_room(batch: AttentionBatch) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Allocate what a batch's plan can need; return it, and where its parts (`_WRITTEN`) begin.

    8-byte numbers stand first, then 4-byte ones.
    """
    num_rows, num_tiles, num_own = batch.query_indptr[-1], 0, 0
    start = 0
    for index, end in enumerate(batch.query_indptr[1:]):
        num_tiles += -(-(end - start) // TILE_ROWS)
        if batch.ancestor_masks[index] is not None:
            # A path is at most as long as the tree's slots, behind less than a chunk.
            num_slots = batch.kv_lens[index] - batch.tree_starts[index] + CHUNK_KEYS
            num_own += (end - start) * num_slots
        start = end
    num_keys = sum(batch.kv_lens)
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
