"""Tiles and splits of `outrider.kernels.attention.ordered_attention`, cut on the host once a step.

A row's keys are the positions up to its own, in splits of `SPLIT_KEYS` counted from position 0. A
tile is a few rows with all their heads of a key-value head; a pair is a tile and a split.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.attention.attention_plan import AttentionBatch

# Measured on Zen 4 with 64 dimensions: 32 keys waste little where every tree node has a tile of
# its own; 8 lines are the fewest whose products have the same bits with 1 and 2 threads.
SPLIT_KEYS = 32
# Lines (rows times heads that share keys) of a tile: taller ones read keys for more rows at once.
# The first is always used; of the others those whose products give the same bits.
TILE_HEIGHTS = (8, 32, 128)
# Products run in batches of a multiple of this; smaller ones a library may thread differently.
BATCH_MULTIPLE = 4

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The tiles of one height, and their pairs."""

    rows_per_tile: int
    tile_rows: Tensor
    """int64 [tiles * rows_per_tile], query rows; padding repeats a row."""
    pair_tiles: Tensor
    """int64 [pairs * num_kv_heads], packed query tiles."""
    pair_keys: Tensor
    """int64 [pairs * num_kv_heads * SPLIT_KEYS], rows of the cache seen as [slots * heads,
    head_dim]."""
    mask: Tensor
    """float32, additive, [pairs, rows_per_tile, SPLIT_KEYS]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedPlan:
    """A step's tiles; the same for all layers.

    Partial results are lines of one buffer, band after band, [pairs, num_kv_heads, rows_per_tile]
    each.
    """

    bands: tuple[Band, ...]
    row_parts: Tensor
    """int64 [n * parts * num_kv_heads], the lines of a row's splits, in order."""
    is_part: Tensor
    """float32 [n, parts, 1], 0 for padding."""
    uses_library: bool
    """Torch's own products keep a row's bits on this machine."""
    full: "OrderedPlan | None" = None
    """The plan of the layers that have no window, where only some layers have one."""


def plan_bands(  # noqa: PLR0913 - a step's plan depends on the model's shape
    batch: AttentionBatch,
    *,
    block_size: int,
    group_size: int,
    num_kv_heads: int,
    window: int | None,
    heights: tuple[int, ...],
    uses_library: bool,
    device: torch.device,
    full: OrderedPlan | None = None,
) -> OrderedPlan:
    """Cut every sequence; `heights` are ascending."""
    bands = tuple(
        _BandBuilder(number=number, rows_per_tile=-(-height // group_size))
        for number, height in enumerate(heights)
    )
    planner = _Planner(batch=batch, block_size=block_size, window=window, bands=bands)
    sequences = [
        planner.parts(index, start, end)
        for index, (start, end) in enumerate(pairwise(batch.query_indptr))
        if start < end
    ]
    width = max((parts.shape[1] for parts in sequences), default=0)
    padded = [
        np.pad(parts, ((0, 0), (0, width - parts.shape[1])), constant_values=-1)
        for parts in sequences
    ]
    parts = np.concatenate([np.empty((0, width), np.int64), *padded])
    has_part = parts >= 0
    # padding repeats a part of the row: what others left there could be infinite
    parts = np.where(has_part, parts, parts.max(1, keepdims=True, initial=0))
    row_parts = _lines(parts, bands, num_kv_heads)
    return OrderedPlan(
        bands=tuple(band.build(num_kv_heads, device) for band in bands if band.num_pairs),
        row_parts=_tensor(row_parts.reshape(-1), device),
        is_part=_tensor(has_part.astype(np.float32)[:, :, None], device),
        uses_library=uses_library,
        full=full,
    )


def _lines(parts: Integers, bands: tuple["_BandBuilder", ...], num_kv_heads: int) -> Integers:
    """[n, parts, num_kv_heads]: where partial results stand once the bands are padded."""
    band_of, place = np.divmod(parts, _BAND_STRIDE)
    lines = np.empty((*parts.shape, num_kv_heads), np.int64)
    begin = 0
    for band in bands:
        pair, row = np.divmod(place, band.rows_per_tile)
        first = begin + row + pair * num_kv_heads * band.rows_per_tile
        of_heads = first[..., None] + np.arange(num_kv_heads) * band.rows_per_tile
        lines = np.where((band_of == band.number)[..., None], of_heads, lines)
        begin += band.pad() * num_kv_heads * band.rows_per_tile
    return lines


# A part's number is its band times this, plus pair * rows_per_tile + row of the tile.
_BAND_STRIDE = 1 << 48


@dataclass(slots=True, kw_only=True)
class _BandBuilder:
    """Collects tiles of one height."""

    number: int
    rows_per_tile: int
    num_tiles: int = 0
    num_pairs: int = 0
    rows: list[Integers] = field(default_factory=list)
    pair_tiles: list[Integers] = field(default_factory=list)
    slots: list[Integers] = field(default_factory=list)
    visible: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(
        self,
        rows: Integers,
        is_pair: NDArray[np.bool_],
        slots: Callable[[Integers, Integers], Integers],
        visible: Callable[[Integers, Integers], NDArray[np.bool_]],
    ) -> Integers:
        """Append tiles; returns the part number of each pair's first row, -1 for no pair.

        `rows`: [tiles, rows_per_tile]; `is_pair`: [tiles, splits]; slots and visible are asked for
        pairs (tiles, splits): [pairs, SPLIT_KEYS] and [pairs, rows_per_tile, SPLIT_KEYS].
        """
        tiles, splits = np.nonzero(is_pair)
        numbers = self.num_pairs + np.cumsum(is_pair).reshape(is_pair.shape) - 1
        self.rows.append(rows)
        self.pair_tiles.append(tiles + self.num_tiles)
        self.slots.append(slots(tiles, splits))
        self.visible.append(visible(tiles, splits))
        self.num_tiles += len(rows)
        self.num_pairs += len(tiles)
        begin = self.number * _BAND_STRIDE
        return np.where(is_pair, begin + numbers * self.rows_per_tile, -1)

    def pad(self) -> int:
        """Add unread pairs up to a multiple of `BATCH_MULTIPLE`; returns the total."""
        missing = -self.num_pairs % BATCH_MULTIPLE
        if missing:
            self.pair_tiles.append(np.zeros(missing, np.int64))
            self.slots.append(np.zeros((missing, SPLIT_KEYS), np.int64))
            self.visible.append(np.zeros((missing, self.rows_per_tile, SPLIT_KEYS), np.bool_))
            self.num_pairs += missing
        return self.num_pairs

    def build(self, num_kv_heads: int, device: torch.device) -> Band:
        """Indices for every key-value head, as tensors."""
        heads = np.arange(num_kv_heads)
        pair_tiles, slots = np.concatenate(self.pair_tiles), np.concatenate(self.slots)
        pair_keys = slots[:, None] * num_kv_heads + heads[:, None]  # [pairs, kv heads, keys]
        visible = np.concatenate(self.visible)
        return Band(
            rows_per_tile=self.rows_per_tile,
            tile_rows=_tensor(np.concatenate(self.rows).reshape(-1), device),
            pair_tiles=_tensor((pair_tiles[:, None] * num_kv_heads + heads).reshape(-1), device),
            pair_keys=_tensor(pair_keys.reshape(-1), device),
            mask=_tensor(np.where(visible, np.float32(0), np.float32("-inf")), device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """Cuts sequences into tiles and splits."""

    batch: AttentionBatch
    block_size: int
    window: int | None
    bands: tuple[_BandBuilder, ...]

    def parts(self, index: int, start: int, end: int) -> Integers:
        """[n, parts]: of the rows [start, end) of one sequence, every row's splits in order."""
        kv_len, masks = self.batch.kv_lens[index], self.batch.ancestor_masks[index]
        rows = np.arange(start, end)
        if masks is None:
            ends = np.arange(kv_len - len(rows), kv_len) + 1
            begins = self._begins(ends)
            parts = self._shared(index, rows, begins, ends)
        else:
            tree_start = self.batch.tree_starts[index]
            paths = paths_by_depth(masks, tree_start)  # [n, depths]
            ends = tree_start + (paths >= 0).sum(1)
            begins = self._begins(ends)
            shared = np.minimum(ends, tree_start // SPLIT_KEYS * SPLIT_KEYS)
            parts = np.concatenate(
                (
                    self._shared(index, rows, begins, shared),
                    self._own(index, rows, begins, ends, paths),
                ),
                1,
            )
        if self.window is None:
            return parts
        # Counted from the first split that the row itself sees: no one else moves them.
        places = np.arange(parts.shape[1]) + (begins // SPLIT_KEYS)[:, None]
        parts = np.pad(parts, ((0, 0), (0, 1)), constant_values=-1)
        parts = np.take_along_axis(parts, np.minimum(places, parts.shape[1] - 1), 1)
        return parts[:, : int((parts >= 0).sum(1).max())]

    def _begins(self, ends: Integers) -> Integers:
        """The first position that each row sees."""
        if self.window is None:
            return np.zeros_like(ends)
        return np.maximum(ends - self.window, 0)

    def _shared(self, index: int, rows: Integers, begins: Integers, ends: Integers) -> Integers:
        """Parts over positions that are slots, in tiles of several rows."""
        band = self.bands[0]
        for taller in self.bands[1:]:
            if 2 * len(rows) > taller.rows_per_tile:
                band = taller
        num_tiles = -(-len(rows) // band.rows_per_tile)
        padding = num_tiles * band.rows_per_tile - len(rows)
        limit = int(ends.max())

        def tiled(values: Integers) -> Integers:
            return np.pad(values, (0, padding), mode="edge").reshape(num_tiles, -1)

        tile_begins, tile_ends = tiled(begins), tiled(ends)
        firsts = np.arange(0, limit, SPLIT_KEYS)  # [splits]

        def positions(splits: Integers) -> Integers:
            return splits[:, None] * SPLIT_KEYS + np.arange(SPLIT_KEYS)

        parts = band.add(
            tiled(rows),
            (firsts + SPLIT_KEYS > tile_begins.min(1, keepdims=True))
            & (firsts < tile_ends.max(1, keepdims=True)),
            lambda _, splits: self._locate(index, np.minimum(positions(splits), limit - 1)),
            lambda tiles, splits: (
                (positions(splits)[:, None] >= tile_begins[tiles][:, :, None])
                & (positions(splits)[:, None] < tile_ends[tiles][:, :, None])
            ),
        )
        tile_of, place = np.divmod(np.arange(len(rows)), band.rows_per_tile)
        return np.where(parts[tile_of] >= 0, parts[tile_of] + place[:, None], -1)

    def _own(
        self, index: int, rows: Integers, begins: Integers, ends: Integers, paths: Integers
    ) -> Integers:
        """Parts from the split on in which the tree begins: a tile for each node."""
        band, tree_start = self.bands[0], self.batch.tree_starts[index]
        first = tree_start // SPLIT_KEYS
        firsts = np.arange(first * SPLIT_KEYS, int(ends.max()), SPLIT_KEYS)  # [splits]
        positions = np.arange(firsts[0], firsts[-1] + SPLIT_KEYS)
        depths = np.clip(positions - tree_start, 0, ends[:, None] - tree_start - 1)
        slots = np.where(
            positions < tree_start, positions, np.take_along_axis(paths, depths, 1)
        ).reshape(len(rows), -1, SPLIT_KEYS)
        is_seen = ((positions >= begins[:, None]) & (positions < ends[:, None])).reshape(
            slots.shape
        )

        def visible(tiles: Integers, splits: Integers) -> NDArray[np.bool_]:
            shown = np.zeros((len(tiles), band.rows_per_tile, SPLIT_KEYS), dtype=np.bool_)
            shown[:, 0] = is_seen[tiles, splits]
            return shown

        return band.add(
            rows[:, None].repeat(band.rows_per_tile, 1),
            np.any(is_seen, axis=2),
            lambda tiles, splits: self._locate(index, slots[tiles, splits]),
            visible,
        )

    def _locate(self, index: int, logical: Integers) -> Integers:
        """The cache's slots of a sequence's logical ones."""
        table = np.array(self.batch.block_tables[index], dtype=np.int64)
        return table[logical // self.block_size] * self.block_size + logical % self.block_size


def paths_by_depth(masks: list[int], tree_start: int) -> Integers:
    """[n, greatest depth + 1]: the slots of each row's ancestors and its own, by depth; -1 beyond.

    Parents have lower slots than their children, so the bits are in the order of depth.
    """
    num_bytes = (max(mask.bit_length() for mask in masks) + 7) // 8
    packed = b"".join(mask.to_bytes(num_bytes, "little") for mask in masks)
    octets = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), num_bytes)
    bits = np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_)
    rows, offsets = np.nonzero(bits)
    ranks = (np.cumsum(bits, 1) - 1)[rows, offsets]
    paths = np.full((len(masks), int(ranks.max()) + 1), -1, dtype=np.int64)
    paths[rows, ranks] = tree_start + offsets
    return paths


def _tensor(values: Integers | NDArray[np.float32], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
