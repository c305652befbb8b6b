"""Keys that a step's rows see, and their grouping for attention on the CPU.

Made once on the host, used by every layer.
"""

import functools
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.layers.linear import can_pack_dtype

# Up to this many query rows, the query heads of a group are packed into one tile.
PACKED_MAX_ROWS = 64
# From this many rows of a tile on, and up to this many scores, bfloat16 attention on CPU goes
# through two plain products: torch's flash kernel does not use the bfloat16 instructions unless
# there is AMX. Measured on Zen 5, a 400M model at 300 to 550 keys: 5 to 10 % of a 24 to 32 row
# pass, 20 % of a 256 row chunk; scores rounded to bfloat16 (as in transformers' eager
# attention) add about 5 % to the distance from float32 logits.
PRODUCTS_MIN_TILE_ROWS = 96
PRODUCTS_MAX_SCORES = 4 << 20
# Sequences are padded into one batch while that wastes less than this share of the products.
_MAX_PADDING = 1.35
# ... and while their keys, which have to be gathered, are no more than this, times the number of
# key-value heads: buffers beyond some 2 MB are returned to the system after every layer, and the
# page faults cost five times what the batch saves.
_MAX_GROUP_KEYS = 12288


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """Keys that each query row of a step may see. All fields are host data.

    Row i of nq rows sees logical slot s < `tree_starts[b]` iff s <= kv_len - nq + i, and a later
    slot s iff bit s - tree_start of `ancestor_masks[b][i]` is set. Causal sequences have tree_start
    == kv_len; trees have tree_start <= kv_len - nq, and parents in lower slots than their children.
    """

    query_indptr: list[int]
    """[batch + 1], delimits each sequence's rows."""
    kv_lens: list[int]
    """[batch], counts a sequence's keys, this step's included."""
    block_tables: list[list[int]]
    """[batch], block ids."""
    tree_starts: list[int]
    """[batch], logical slots."""
    ancestor_masks: list[list[int] | None]
    """[batch][nq], a row's own slot included. None for a causal sequence."""
    window_tables: list[list[int]] | None = None
    """Block ids for layers with a window, where those have a cache of their own. Blocks that no row
    sees may be any number."""

    def of_window(self) -> "AttentionBatch":
        """Return the batch as the layers with a window find it."""
        if self.window_tables is None:
            return self
        return replace(self, block_tables=self.window_tables, window_tables=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpan:
    """The rows [start, end) of one sequence and where its keys lie."""

    start: int
    end: int
    slots: range | Tensor
    """A range of the cache's slots where they are consecutive, else their indices."""
    mask: Tensor | None
    """Additive, [rows of a tile, num_keys]. None where every row sees every key, or where
    `is_causal` says it all."""
    is_causal: bool
    is_packed: bool
    """Heads that share keys form one tile."""
    has_scores: bool
    """Its scores are computed as a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences with about as many rows and keys, padded into one batch."""

    batch_size: int
    rows: Tensor | None
    """[batch * max_rows], the query rows, padding included. None if they are the step's rows in
    order."""
    targets: Tensor
    """[num_rows], the rows that are no padding."""
    sources: Tensor
    """[num_rows], the places of `targets` in the batch."""
    slots: Tensor
    """[batch * max_keys]."""
    mask: Tensor
    """Additive, [batch, 1, max_rows * group_size or 1, max_keys]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The keys that the rows of one sequence see."""

    index: int
    num_rows: int
    num_keys: int
    """From `first_key` on."""
    first_key: int
    visible: NDArray[np.bool_] | None
    """[num_rows, num_keys]; None for everything, and where `is_causal`."""
    is_causal: bool
    """A plain triangle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """A step as `paged_attention` needs it; the same for all layers."""

    spans: tuple[KeySpan, ...]
    groups: tuple[Group, ...]
    full: "AttentionPlan | None" = None
    """The plan of the layers that have no window, where only some layers have one."""


def plan_spans(  # noqa: PLR0913 - a step's plan depends on the model's shape
    batch: AttentionBatch,
    *,
    block_size: int,
    num_query_heads: int,
    num_kv_heads: int,
    sliding_window: int | None = None,
    has_full_layers: bool = False,
    dtype: torch.dtype,
    device: torch.device | str,
) -> AttentionPlan:
    """Locate keys, build masks, and decide which sequences are computed together.

    The arguments are those of `outrider.kernels.attention.paged_attention.plan_attention`.
    """
    planner = _Planner(
        batch=batch if sliding_window is None else batch.of_window(),
        block_size=block_size,
        num_query_heads=num_query_heads,
        group_size=num_query_heads // num_kv_heads,
        window=sliding_window,
        dtype=dtype,
        device=torch.device(device),
    )
    spans, groups = planner.plan()
    full = None
    if sliding_window is not None and has_full_layers:
        full = plan_spans(
            batch,
            block_size=block_size,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            device=device,
        )
    return AttentionPlan(
        spans=spans,
        groups=groups,
        full=full,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """Turns a batch into spans and groups."""

    batch: AttentionBatch
    block_size: int
    num_query_heads: int
    group_size: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def plan(self) -> tuple[tuple[KeySpan, ...], tuple[Group, ...]]:
        """Every sequence that has rows, alone or with others of about its size."""
        spans, groups = [], []
        small = []
        for index, (start, end) in enumerate(pairwise(self.batch.query_indptr)):
            if start == end:
                continue
            keys = _visible_keys(self.batch, index, end - start, self.window)
            if end - start <= PACKED_MAX_ROWS and not self._prefers_products(keys):
                small.append(keys)
            else:
                spans.append(self._span(keys))
        max_keys = _MAX_GROUP_KEYS // (self.num_query_heads // self.group_size)
        for members in _similar(small, max_keys):
            if len(members) == 1:
                spans.append(self._span(members[0]))
            else:
                groups.append(self._group(members))
        return tuple(spans), tuple(groups)

    def _span(self, keys: _Keys) -> KeySpan:
        visible, is_causal = keys.visible, keys.is_causal
        has_scores = self._prefers_products(keys)
        is_packed = has_scores or keys.num_rows <= PACKED_MAX_ROWS
        if is_causal and is_packed:  # a packed tile's rows are not a triangle
            visible, is_causal = _triangle(keys.num_rows, keys.num_keys, 0), False
        mask = None
        if visible is not None:
            # row i of a packed tile belongs to query row i // group_size
            mask = self._additive(visible.repeat(self.group_size, 0) if is_packed else visible)
        slots = self._locate(keys)
        return KeySpan(
            start=self.batch.query_indptr[keys.index],
            end=self.batch.query_indptr[keys.index + 1],
            slots=slots if isinstance(slots, range) else self._tensor(slots),
            mask=mask,
            is_causal=is_causal,
            is_packed=is_packed,
            has_scores=has_scores,
        )

    def _prefers_products(self, keys: _Keys) -> bool:
        """True if two matrix products beat the flash kernel for these rows."""
        is_triangle = keys.is_causal and keys.num_rows > PACKED_MAX_ROWS  # flash skips half
        return (
            keys.num_rows * self.group_size >= PRODUCTS_MIN_TILE_ROWS
            and self.num_query_heads * keys.num_rows * keys.num_keys <= PRODUCTS_MAX_SCORES
            and not is_triangle
            and self.device.type == "cpu"
            and self.dtype == torch.bfloat16
            and has_fast_bfloat16_products()
        )

    def _group(self, members: list[_Keys]) -> Group:
        batch_size = len(members)
        max_rows = max(keys.num_rows for keys in members)
        max_keys = max(keys.num_keys for keys in members)
        visible = np.zeros((batch_size, max_rows, max_keys), dtype=np.bool_)
        visible[:, :, 0] = True  # padding sees something: a softmax over nothing is not a number
        slots = np.zeros((batch_size, max_keys), dtype=np.int64)
        rows = np.zeros((batch_size, max_rows), dtype=np.int64)
        is_padding = np.ones((batch_size, max_rows), dtype=np.bool_)
        for place, keys in enumerate(members):
            shown = keys.visible
            if shown is None and keys.is_causal:
                shown = _triangle(keys.num_rows, keys.num_keys, 0)
            visible[place, : keys.num_rows, : keys.num_keys] = True if shown is None else shown
            located = self._locate(keys)
            slots[place] = located[0]  # padding reads the sequence's own keys, not a stranger's
            slots[place, : keys.num_keys] = located
            start = self.batch.query_indptr[keys.index]
            rows[place, : keys.num_rows] = np.arange(start, start + keys.num_rows)
            is_padding[place, : keys.num_rows] = False
        flat_rows, flat_real = rows.reshape(-1), ~is_padding.reshape(-1)
        if max_rows > 1:
            visible = visible.repeat(self.group_size, 1)
        in_order = np.array_equal(flat_rows, np.arange(self.batch.query_indptr[-1]))
        return Group(
            batch_size=batch_size,
            rows=None if in_order else self._tensor(flat_rows),
            targets=self._tensor(flat_rows[flat_real]),
            sources=self._tensor(np.flatnonzero(flat_real)),
            slots=self._tensor(slots.reshape(-1)),
            mask=self._additive(visible[:, None]),
        )

    def _locate(self, keys: _Keys) -> range | NDArray[np.int64]:
        """The cache slots of the sequence's logical slots from first_key on."""
        block_size, table = self.block_size, self.batch.block_tables[keys.index]
        first_block, offset = divmod(keys.first_key, block_size)
        end_block = -(-(keys.first_key + keys.num_keys) // block_size)
        blocks = table[first_block:end_block]
        if blocks == list(range(blocks[0], blocks[0] + end_block - first_block)):
            begin = blocks[0] * block_size + offset
            return range(begin, begin + keys.num_keys)
        slots = np.array(blocks, dtype=np.int64)[:, None] * block_size + np.arange(block_size)
        return slots.reshape(-1)[offset : offset + keys.num_keys]

    def _additive(self, visible: NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))
        return mask.to(self.device, non_blocking=True)

    def _tensor(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


@functools.cache
def has_fast_bfloat16_products() -> bool:
    """True if this CPU multiplies bfloat16 matrices faster than torch's flash kernel does."""
    return can_pack_dtype(torch.bfloat16) and not torch.cpu._is_amx_tile_supported()


def _similar(sequences: list[_Keys], max_group_keys: int) -> list[list[_Keys]]:
    """Sort sequences into groups that padding would not blow up by more than `_MAX_PADDING`."""
    groups: list[list[_Keys]] = []
    num_products = 0
    for keys in sorted(sequences, key=lambda keys: (keys.num_rows, keys.num_keys)):
        num_products += keys.num_rows * keys.num_keys
        if groups:
            members = groups[-1]
            max_keys = max(keys.num_keys, *(member.num_keys for member in members))
            padded_keys = (len(members) + 1) * max_keys
            if (
                padded_keys * keys.num_rows <= _MAX_PADDING * num_products
                and padded_keys <= max_group_keys
            ):
                members.append(keys)
                continue
        groups.append([keys])
        num_products = keys.num_rows * keys.num_keys
    for members in groups:
        members.sort(key=lambda keys: keys.index)
    return groups


def _visible_keys(batch: AttentionBatch, index: int, num_rows: int, window: int | None) -> _Keys:
    kv_len, tree_start = batch.kv_lens[index], batch.tree_starts[index]
    masks = batch.ancestor_masks[index]
    first_key, visible, is_causal = 0, None, False
    if masks is not None:
        first_key, visible = _tree(masks, kv_len, tree_start, window)
    else:
        if window is not None:
            first_key = max(0, kv_len - num_rows - window + 1)
        if num_rows == kv_len and (window is None or window >= kv_len):
            is_causal = num_rows > 1
        elif num_rows > 1:
            visible = _triangle(num_rows, kv_len, first_key)
            if window is not None:
                visible &= ~_triangle(num_rows, kv_len - window, first_key, kv_len)
    return _Keys(
        index=index,
        num_rows=num_rows,
        num_keys=kv_len - first_key,
        first_key=first_key,
        visible=visible,
        is_causal=is_causal,
    )


def _triangle(
    num_rows: int, end: int, first_key: int, num_keys: int | None = None
) -> NDArray[np.bool_]:
    """[num_rows, keys from first_key on]: key s in row i iff s <= end - num_rows + i."""
    last_keys = np.arange(end - num_rows, end)
    return np.arange(first_key, end if num_keys is None else num_keys) <= last_keys[:, None]


def _tree(
    masks: list[int], kv_len: int, tree_start: int, window: int | None
) -> tuple[int, NDArray[np.bool_]]:
    """(first key that any row sees, [num_rows, keys from there on])."""
    first_key = 0
    depths = np.array([mask.bit_count() - 1 for mask in masks])
    if window is not None:
        first_key = min(tree_start, max(0, tree_start + int(depths.min()) - window + 1))
        masks = [newest_ancestors(mask, window) for mask in masks]
    visible = np.ones((len(masks), kv_len - first_key), dtype=np.bool_)
    visible[:, tree_start - first_key :] = _unpack_bits(masks, kv_len - tree_start)
    if window is not None:
        prefix = np.arange(first_key, tree_start)
        visible[:, : len(prefix)] = prefix > (tree_start + depths - window)[:, None]
    return first_key, visible


def newest_ancestors(mask: int, count: int) -> int:
    """Return the highest `count` bits: the node, and its ancestors less than `count` levels up."""
    while mask.bit_count() > count:
        mask &= mask - 1
    return mask


def _unpack_bits(masks: list[int], width: int) -> NDArray[np.bool_]:
    """[len(masks), width]: bit j of each mask."""
    num_bytes = (width + 7) // 8
    packed = b"".join(mask.to_bytes(num_bytes, "little") for mask in masks)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), num_bytes)
    return np.unpackbits(rows, axis=1, count=width, bitorder="little").view(np.bool_)
