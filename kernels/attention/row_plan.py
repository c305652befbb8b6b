"""The keys of every row in order, for the compiled attention of `kernels.cpu.row_attention`."""

import ctypes
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernels.attention.attention_plan import AttentionBatch, AttentionPlan
from kernels.attention.ordered_plan import OrderedPlan
from kernels.cpu.row_attention import CHUNK_KEYS, TILE_ROWS, RowKeys, compiled_library
from kernels.cpu.structs import Attention, RowPlanCall

_WORD_BITS = 64
# Fields of a PlannedSequence in row_plan.h.
_SEQUENCE_FIELDS = 6


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
    numbers = _numbers(batch)
    first = numbers.buffer_info()[0]  # 0 where there are none
    memory = _Memory.of(batch)
    # What the library reads stays in these names until it has returned.
    packed = b"".join(mask.to_bytes(8 * mask_words, "little") for own in masks for mask in own)
    call = RowPlanCall(
        num_sequences=len(batch.kv_lens),
        block_size=block_size,
        window=window or 0,
        tile_rows=TILE_ROWS,
        mask_words=mask_words,
        sequences=first,
        masks=packed,
    )
    call.blocks = first + _SEQUENCE_FIELDS * 8 * len(batch.kv_lens)
    keys = memory.attention()
    for field in _WRITTEN:
        setattr(call, field, getattr(keys, field))
    keys.num_tiles = compiled_library()[0].plan_rows(ctypes.addressof(call))
    return RowKeys(struct=keys, num_rows=batch.query_indptr[-1], memory=memory.words)


_WRITTEN = (
    *("tiles", "tile_slots", "slots", "begins", "ends", "own_begins", "own_starts", "own_slots"),
)


def _num_words(masks: list[list[int]]) -> int:
    widest = max((mask.bit_length() for own in masks for mask in own), default=0)
    return -(-widest // _WORD_BITS)


def _numbers(batch: AttentionBatch) -> "array[int]":
    """The sequences' fields, and behind them all block tables."""
    fields: list[int] = []
    blocks: list[int] = []
    for index, (start, end) in enumerate(pairwise(batch.query_indptr)):
        is_tree = batch.ancestor_masks[index] is not None
        fields += (start, end, batch.kv_lens[index], batch.tree_starts[index], len(blocks), is_tree)
        blocks += batch.block_tables[index]
    return array("q", fields + blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """Where the library writes a plan: 8-byte numbers first, then 4-byte ones."""

    words: NDArray[np.int64]
    num_rows: int
    num_tiles: int
    num_keys: int

    @classmethod
    def of(cls, batch: AttentionBatch) -> "_Memory":
        """Allocate as much as a batch can need."""
        num_rows, num_tiles, num_own = batch.query_indptr[-1], 0, 0
        for index, (start, end) in enumerate(pairwise(batch.query_indptr)):
            num_tiles += -(-(end - start) // TILE_ROWS)
            if batch.ancestor_masks[index] is not None:
                # A path is at most as long as the tree's slots, behind less than a chunk.
                num_slots = batch.kv_lens[index] - batch.tree_starts[index] + CHUNK_KEYS
                num_own += (end - start) * num_slots
        num_keys = sum(batch.kv_lens)
        num_small = 3 * num_rows + 2 * num_tiles + num_keys + num_own
        words = np.empty(num_rows + num_tiles + (num_small + 1) // 2, dtype=np.int64)
        return cls(words=words, num_rows=num_rows, num_tiles=num_tiles, num_keys=num_keys)

    def attention(self) -> Attention:
        """Cut it; the fields of a call are 0."""
        # In a quarter of the time of `self.words.ctypes.data`.
        own_starts = (
            ctypes.addressof(ctypes.c_char.from_buffer(self.words.data)) if self.words.size else 0
        )
        tile_slots = own_starts + 8 * self.num_rows
        tiles = tile_slots + 8 * self.num_tiles
        begins = tiles + 8 * self.num_tiles  # two numbers of 4 bytes a tile
        ends = begins + 4 * self.num_rows
        own_begins = ends + 4 * self.num_rows
        slots = own_begins + 4 * self.num_rows
        return Attention(
            max_tile_rows=TILE_ROWS,
            tiles=tiles,
            tile_slots=tile_slots,
            slots=slots,
            begins=begins,
            ends=ends,
            own_begins=own_begins,
            own_starts=own_starts,
            own_slots=slots + 4 * self.num_keys,
        )
