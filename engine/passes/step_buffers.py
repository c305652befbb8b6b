"""Brings everything that the device needs for a pass there, in one copy.

A pass's integers (tokens, positions, slots, what each row may see, block ids) are packed into one
piece of pinned memory, which one asynchronous copy brings to the device; the pass's tensors are
views of the copy. Pinned memory is taken from torch's cache for every pass and handed back at
once: the cache keeps it until the copy is over, so a pass can be packed while others' copies are
on their way, however many. Everything is ordered by the current stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.engine.cache.kv_view import KVView
from outrider.engine.passes.device_rows import DeviceRows
from outrider.engine.passes.flat_rows import ForwardSlice, number_adapters
from outrider.kernels.arrays import Ints32, Ints64
from outrider.kernels.attention.stage_rows import PassInputs, TreeRows
from outrider.kernels.layers.lora import TritonLoraRows
from outrider.kernels.tree_bounds import MASK_WORDS, MAX_TREE_NODES
from outrider.kernels.trees.choose_frontier import FrontierRows

# Parts begin at multiples of so many 8-byte words: Triton compiles a kernel anew for pointers that
# are not divisible by 16, and a row of 64 bytes is read at once.
_ALIGNMENT = 8

_ROW_PARTS_64 = ("token_ids", "positions", "slots", "logit_rows")
_ROW_PARTS_32 = ("row_begins", "row_ends", "row_tree_starts")
_SEQUENCE_PARTS = (
    "row_starts",
    "num_rows",
    "kv_lens",
    "first_keys",
    "tree_starts",
    "block_indptr",
)


def pinned_words(count: int, device: torch.device) -> Tensor:
    """int64 [count] of host memory that a copy to `device` can be made from without waiting."""
    return torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")


def upload_integers(values: Sequence[int], device: torch.device) -> Tensor:
    """The values as int64 [len(values)] on a device, without waiting for it."""
    staged = pinned_words(len(values), device)
    staged.numpy()[:] = values
    return staged.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLayout:
    """The layout of a pass's integers in a buffer of 8-byte words.

    For up to `num_rows` rows of up to `num_sequences` sequences; block ids stand at the end, as
    many as there are.
    """

    num_rows: int
    num_sequences: int
    trims: bool = False
    """Far ancestors may be out of the window. Layers with a window then see other ancestors than
    those without one."""
    has_full: bool = False
    """Layers with a window and layers without one exist."""
    _begins: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Place the parts."""
        rows, sequences = self.num_rows, self.num_sequences
        words = dict.fromkeys(_ROW_PARTS_64, rows)
        words["ancestor_words"] = rows * MASK_WORDS
        if self.trims:
            words["full_words"] = rows * MASK_WORDS
        words |= dict.fromkeys(_ROW_PARTS_32, (rows + 1) // 2)
        words |= dict.fromkeys(_SEQUENCE_PARTS, (sequences + 1) // 2)
        if self.has_full:
            words["zeros"] = (max(rows, sequences) + 1) // 2
        aligned = [-(-count // _ALIGNMENT) * _ALIGNMENT for count in words.values()]
        begins = dict(zip(words, accumulate(aligned, initial=0), strict=False))
        begins["block_ids"] = sum(aligned)
        object.__setattr__(self, "_begins", begins)

    @property
    def head_words(self) -> int:
        """8-byte words in front of the block ids."""
        return self._begins["block_ids"]

    def num_words(self, num_block_ids: int) -> int:
        """8-byte words in all, for so many block ids."""
        return self.head_words + (num_block_ids + 1) // 2

    def array(self, words: Ints64, name: str) -> npt.NDArray[np.int64 | np.int32]:
        """A part of a host buffer."""
        begin = self._begins[name]
        if name in _ROW_PARTS_64:
            return words[begin : begin + self.num_rows]
        if name in ("ancestor_words", "full_words"):
            part = words[begin : begin + self.num_rows * MASK_WORDS]
            return part.reshape(self.num_rows, MASK_WORDS)
        return words[begin:].view(np.int32)[: self._count(name)]

    def tensor(self, words: Tensor, name: str) -> Tensor:
        """A part of a device buffer."""
        begin = self._begins[name]
        if name in _ROW_PARTS_64:
            return words[begin : begin + self.num_rows]
        if name in ("ancestor_words", "full_words"):
            part = words[begin : begin + self.num_rows * MASK_WORDS]
            return part.view(self.num_rows, MASK_WORDS)
        return words[begin:].view(torch.int32)[: self._count(name)]

    def _count(self, name: str) -> int | None:
        if name == "block_ids":
            return None
        if name == "zeros":
            return max(self.num_rows, self.num_sequences)
        return self.num_rows if name in _ROW_PARTS_32 else self.num_sequences

    def inputs(self, words: Tensor) -> PassInputs:
        """The pass's tensors, views of a device buffer."""
        ancestor_words = self.tensor(words, "ancestor_words")
        return PassInputs(
            ancestor_words=ancestor_words,
            full_words=self.tensor(words, "full_words") if self.trims else ancestor_words,
            block_ids=self.tensor(words, "block_ids"),
            **{
                name: self.tensor(words, name)
                for name in (*_ROW_PARTS_64[:3], *_ROW_PARTS_32, *_SEQUENCE_PARTS)
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPass:
    """The host's part of a pass, before it is packed.

    Device rows and their sequences stand in front of the slices'.
    """

    slices: Sequence[ForwardSlice]
    device_rows: DeviceRows | None
    block_tables: list[Ints32]
    token_ids: list[int]
    logit_rows: list[int]
    """The rows that get logits."""
    counts: Ints64
    """The rows of each slice."""

    @property
    def num_device_rows(self) -> int:
        """Rows in front."""
        return 0 if self.device_rows is None else self.device_rows.total_rows

    @property
    def num_device_sequences(self) -> int:
        """Sequences in front."""
        return 0 if self.device_rows is None else len(self.device_rows.views)

    @property
    def num_rows(self) -> int:
        """Count all rows, the padding among the device rows included."""
        return self.num_device_rows + len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """Count all sequences; one that has several slices counts as often."""
        return len(self.block_tables)

    @property
    def num_block_ids(self) -> int:
        """Block ids of all sequences."""
        return sum(len(table) for table in self.block_tables)

    @property
    def wants_all_logits(self) -> bool:
        """True if every row gets logits."""
        return len(self.logit_rows) == self.num_rows

    @property
    def rows_per_sequence(self) -> int:
        """About how many rows the longest sequence has; device rows are shared out evenly."""
        of_device = -(-self.num_device_rows // max(self.num_device_sequences, 1))
        return max(of_device, int(self.counts.max(initial=0)))

    def lora(self) -> TritonLoraRows | None:
        """Return the rows with their adapters; None where no row has one."""
        views = [] if self.device_rows is None else self.device_rows.views
        adapters = [view.adapter for view in (*views, *(each.view for each in self.slices))]
        if not any(adapters):
            return None
        counts = [1] * len(views) + self.counts.tolist()
        numbers, host = number_adapters(adapters, counts)
        slots = torch.tensor(host, dtype=torch.int32)
        if self.device_rows is not None:  # the device knows whose its rows are
            index = self.device_rows.sequence_index
            of_views = slots[: len(views)].to(index.device, non_blocking=True)
            rest = slots[len(views) :].to(index.device, non_blocking=True)
            slots = torch.cat((of_views[index], rest))
        return TritonLoraRows(numbers, slots)

    def max_keys(self, block_size: int) -> int:
        """Count how many keys a sequence has at most."""
        tables = self.block_tables[: self.num_device_sequences]
        of_device = max((len(table) for table in tables), default=0) * block_size
        return max(of_device, max((piece.end_slot for piece in self.slices), default=0))

    def mean_context(self, block_size: int) -> float:
        """Count how many tokens a row sees, on average; of device rows an upper bound."""
        total = sum(piece.end_slot * len(piece.token_ids) for piece in self.slices)
        tables = self.block_tables[: self.num_device_sequences]
        reserved = sum(len(table) for table in tables) * block_size
        total += reserved * self.num_device_rows // max(len(tables), 1)
        return total / max(self.num_rows, 1)


class StepBuffers:
    """Packs the passes of one runner.

    `block_size`: of its KV cache; `window`: of its model's layers, those that have one; `has_full`:
    some have none although others do.
    """

    def __init__(
        self, *, device: torch.device, block_size: int, window: int | None, has_full: bool
    ) -> None:
        self.device = device
        self.block_size = block_size
        self.window = window
        self.has_full = has_full and window is not None
        self.trims = window is not None and window < MAX_TREE_NODES
        # Block tables grow by a block now and then, and become arrays only when they have.
        self._tables: WeakKeyDictionary[KVView, tuple[list[int], Ints32]] = WeakKeyDictionary()

    def layout(self, *, num_rows: int, num_sequences: int) -> PassLayout:
        """The layout of a pass with so many rows and sequences."""
        return PassLayout(
            num_rows=num_rows,
            num_sequences=num_sequences,
            trims=self.trims,
            has_full=self.has_full,
        )

    def stage(self, slices: Sequence[ForwardSlice], device_rows: DeviceRows | None) -> StagedPass:
        """Gather what a pass is about."""
        views = [] if device_rows is None else list(device_rows.views)
        total = 0 if device_rows is None else device_rows.total_rows
        logit_rows = list(range(total))
        token_ids: list[int] = []
        for piece in slices:
            assert len(piece.view.block_table) * self.block_size >= piece.end_slot, (
                "slots were not reserved"
            )
            views.append(piece.view)
            token_ids += piece.token_ids
            end = total + len(token_ids)
            logit_rows += range(end - piece.num_logit_rows, end)
        return StagedPass(
            slices=slices,
            device_rows=device_rows,
            block_tables=[self._table(view) for view in views],
            token_ids=token_ids,
            logit_rows=logit_rows,
            counts=np.array([len(piece.token_ids) for piece in slices], dtype=np.int64),
        )

    def stage_views(self, views: Sequence[KVView]) -> StagedPass:
        """Gather where sequences' keys lie, for a pass whose rows the device writes."""
        return StagedPass(
            slices=[],
            device_rows=None,
            block_tables=[self._table(view) for view in views],
            token_ids=[],
            logit_rows=[],
            counts=np.zeros(0, dtype=np.int64),
        )

    def _table(self, view: KVView) -> Ints32:
        known = self._tables.get(view)
        if known is not None and known[0] == view.block_table:
            return known[1]
        table = np.array(view.block_table, dtype=np.int32)
        self._tables[view] = list(view.block_table), table
        return table

    def pack(self, staged: StagedPass, layout: PassLayout) -> Tensor:
        """int64 pinned, the used part of the layout; device rows' places are zero.

        What the layout has more of than the pass is padding: rows that see nothing and are written
        nowhere, and sequences without rows.
        """
        packed = pinned_words(layout.num_words(staged.num_block_ids), self.device)
        words: Ints64 = packed.numpy()
        words[: layout.head_words] = 0
        sizes = [len(table) for table in staged.block_tables]
        indptr = layout.array(words, "block_indptr")
        indptr[: len(sizes)] = list(accumulate(sizes, initial=0))[:-1]
        block_ids = layout.array(words, "block_ids")
        if sizes:
            np.concatenate(staged.block_tables, out=block_ids[: staged.num_block_ids])
        if staged.num_block_ids % 2:
            block_ids[-1] = 0
        layout.array(words, "slots")[:] = -1
        layout.array(words, "logit_rows")[: len(staged.logit_rows)] = staged.logit_rows
        if staged.slices:
            self._pack_rows(staged, layout, words, indptr, block_ids)
        return packed

    def _pack_rows(
        self,
        staged: StagedPass,
        layout: PassLayout,
        words: Ints64,
        indptr: npt.NDArray[np.int64 | np.int32],
        block_ids: npt.NDArray[np.int64 | np.int32],
    ) -> None:
        """The slices' rows and sequences, behind the device's."""
        first, first_sequence = staged.num_device_rows, staged.num_device_sequences
        counts, slices = staged.counts, staged.slices
        rows = slice(first, staged.num_rows)
        own = slice(first_sequence, staged.num_sequences)
        start_slots = np.array([piece.start_slot for piece in slices], dtype=np.int64)
        ends = np.cumsum(counts)
        logical = np.arange(len(staged.token_ids)) + np.repeat(
            start_slots - (ends - counts), counts
        )
        block = np.repeat(indptr[own].astype(np.int64), counts) + logical // self.block_size
        layout.array(words, "token_ids")[rows] = staged.token_ids
        layout.array(words, "slots")[rows] = (
            block_ids[block].astype(np.int64) * self.block_size + logical % self.block_size
        )
        positions = layout.array(words, "positions")[rows]
        positions[:] = logical
        row_ends = layout.array(words, "row_ends")[rows]
        row_ends[:] = logical + 1
        # In a causal sequence a row's position is its slot.
        row_begins = layout.array(words, "row_begins")[rows]
        if self.window is not None:
            row_begins[:] = np.maximum(logical - self.window + 1, 0)
        kv_lens = start_slots + counts
        tree_starts = kv_lens.copy()
        ancestors = layout.array(words, "ancestor_words")[rows]
        full = layout.array(words, "full_words")[rows] if layout.trims else ancestors
        for number, (piece, end) in enumerate(zip(slices, ends.tolist(), strict=True)):
            part = slice(end - len(piece.token_ids), end)
            if piece.positions is not None:
                positions[part] = piece.positions
            if piece.tree_start is None or piece.ancestor_masks is None:
                continue
            tree_starts[number] = row_ends[part] = piece.tree_start
            full[part] = mask_words(piece.ancestor_masks)
            if self.window is not None:
                depths = np.array([mask.bit_count() - 1 for mask in piece.ancestor_masks])
                row_begins[part] = np.maximum(piece.tree_start + depths - self.window + 1, 0)
                if self.trims:
                    near = [newest_ancestors(mask, self.window) for mask in piece.ancestor_masks]
                    ancestors[part] = mask_words(near)
        layout.array(words, "row_tree_starts")[rows] = np.repeat(tree_starts, counts)
        layout.array(words, "row_starts")[own] = first + ends - counts
        layout.array(words, "num_rows")[own] = counts
        layout.array(words, "kv_lens")[own] = kv_lens
        layout.array(words, "tree_starts")[own] = tree_starts
        if self.window is not None:
            has_rows = counts > 0
            least = np.minimum.reduceat(row_begins, (ends - counts)[has_rows])
            layout.array(words, "first_keys")[own][has_rows] = least


def mask_words(masks: Sequence[int]) -> Ints64:
    """[len(masks), 4]: 64 bits of each mask in a word, low word first."""
    packed = b"".join(mask.to_bytes(8 * MASK_WORDS, "little") for mask in masks)
    return np.frombuffer(packed, dtype=np.int64).reshape(len(masks), MASK_WORDS)


def newest_ancestors(mask: int, count: int) -> int:
    """The mask's highest `count` bits: ancestors less than `count` levels up, and the node."""
    while mask.bit_count() > count:
        mask &= mask - 1
    return mask


def tree_rows(rows: DeviceRows | FrontierRows) -> TreeRows:
    """Return the rows' tensors, for the kernel that takes them into a pass."""
    return TreeRows(
        token_ids=rows.token_ids.contiguous(),
        positions=rows.positions.contiguous(),
        logical_slots=rows.logical_slots.contiguous(),
        sequence_index=rows.sequence_index.contiguous(),
        ancestor_words=rows.ancestor_words.contiguous(),
        row_starts=rows.row_starts.contiguous(),
        num_rows=rows.num_rows.contiguous(),
        tree_starts=rows.tree_starts.contiguous(),
        kv_lens=rows.kv_lens.contiguous(),
    )
