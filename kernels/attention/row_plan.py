"""The keys of every row in order, for the compiled attention of `kernels.cpu.row_attention`."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernels.attention.attention_plan import AttentionBatch, AttentionPlan
from kernels.attention.ordered_plan import Integers, OrderedPlan, paths_by_depth
from kernels.cpu.row_attention import CHUNK_KEYS, TILE_ROWS, RowKeys

_NO_TREE = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """A step's rows and keys; the same for all layers.

    `for_other_caches` makes the plan for a cache that compiled attention does not read (fp8).
    `full`: the plan of the layers that have no window, where only some layers have one.
    """

    keys: RowKeys
    for_other_caches: Callable[[], AttentionPlan | OrderedPlan]
    full: "RowPlan | None" = None


def plan_row_keys(batch: AttentionBatch, *, block_size: int, window: int | None) -> RowKeys:
    """Locate the keys of every row of a step, once for all layers."""
    num_rows = batch.query_indptr[-1]
    lists = _Lists(
        begins=np.zeros(num_rows, np.int64),
        ends=np.zeros(num_rows, np.int64),
        own_begins=np.full(num_rows, _NO_TREE, np.int64),
        own_starts=np.zeros(num_rows, np.int64),
    )
    for index, (start, end) in enumerate(pairwise(batch.query_indptr)):
        if start < end:
            lists.add(_Sequence.of(batch, index, block_size, window), start, end)
    return lists.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """The keys of one sequence's rows.

    `slots` [kv_len]: cache slots by position. `own_slots` [rows, width]: a tree row's own, from
    position `own_begin` on.
    """

    begins: Integers
    ends: Integers
    slots: Integers
    own_begin: int
    own_slots: Integers | None

    @classmethod
    def of(
        cls, batch: AttentionBatch, index: int, block_size: int, window: int | None
    ) -> "_Sequence":
        """Cut one sequence. A slot that no row sees may be any number: it becomes 0."""
        num_rows = batch.query_indptr[index + 1] - batch.query_indptr[index]
        kv_len, masks = batch.kv_lens[index], batch.ancestor_masks[index]
        table = np.array(batch.block_tables[index], dtype=np.int64)
        logical = np.arange(kv_len)
        slots = table[logical // block_size] * block_size + logical % block_size
        if masks is None:
            ends = np.arange(kv_len - num_rows, kv_len) + 1
            begins = _begins(ends, window)
            slots = np.where(logical >= begins.min(), slots, 0)
            return cls(begins=begins, ends=ends, slots=slots, own_begin=_NO_TREE, own_slots=None)
        tree_start = batch.tree_starts[index]
        paths = paths_by_depth(masks, tree_start)  # [n, depths]
        ends = tree_start + (paths >= 0).sum(1)
        begins = _begins(ends, window)
        # Whole chunks before the tree are the same for all its nodes.
        own_begin = tree_start // CHUNK_KEYS * CHUNK_KEYS
        positions = np.arange(own_begin, int(ends.max()))
        depths = np.clip(positions - tree_start, 0, ends[:, None] - tree_start - 1)
        own = np.where(positions < tree_start, positions, np.take_along_axis(paths, depths, 1))
        return cls(
            begins=begins,
            ends=ends,
            slots=np.where(logical >= begins.min(), slots, 0),
            own_begin=own_begin,
            own_slots=np.where(positions >= begins[:, None], slots[own], 0),
        )


def _begins(ends: Integers, window: int | None) -> Integers:
    return np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)


class _Lists:
    """Collects sequences."""

    def __init__(
        self, *, begins: Integers, ends: Integers, own_begins: Integers, own_starts: Integers
    ) -> None:
        self.begins, self.ends = begins, ends
        self.own_begins, self.own_starts = own_begins, own_starts
        self._tiles: list[tuple[int, int]] = []
        self._tile_slots: list[int] = []
        self._slots: list[Integers] = []
        self._own_slots: list[Integers] = []
        self._num_slots = self._num_own = 0

    def add(self, sequence: _Sequence, start: int, end: int) -> None:
        """Take the rows [start, end)."""
        self.begins[start:end], self.ends[start:end] = sequence.begins, sequence.ends
        if sequence.own_slots is not None:
            width = sequence.own_slots.shape[1]
            self.own_begins[start:end] = sequence.own_begin
            self.own_starts[start:end] = self._num_own + np.arange(end - start) * width
            self._own_slots.append(sequence.own_slots.reshape(-1))
            self._num_own += sequence.own_slots.size
        for first in range(start, end, TILE_ROWS):
            self._tiles.append((first, min(first + TILE_ROWS, end)))
            self._tile_slots.append(self._num_slots)
        self._slots.append(sequence.slots)
        self._num_slots += len(sequence.slots)

    def keys(self) -> RowKeys:
        """Return what was added, as the library reads it."""
        return RowKeys(
            tiles=np.array(self._tiles, np.int32).reshape(-1, 2),
            tile_slots=np.array(self._tile_slots, np.int64),
            slots=_joined(self._slots),
            begins=self.begins.astype(np.int32),
            ends=self.ends.astype(np.int32),
            own_begins=self.own_begins.astype(np.int32),
            own_starts=self.own_starts,
            own_slots=_joined(self._own_slots),
        )


def _joined(parts: list[Integers]) -> NDArray[np.int32]:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int32)
