"""Cuts a pass's attention into tiles of query rows and splits of keys.

The plan lives on the device, because the rows of token trees that the device grows are unknown to
the host. What the host does know, the kernels' shapes, is `TileShape`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.triton_support import (
    jit,
    launch,
    next_power_of_2,
    num_multiprocessors,
    tl,
    uses_triton,
)

MAX_SEQUENCES = 1024
# Splits are counted from a multiple of this, and blocks of keys are a part of it.
SPLIT_ALIGNMENT = 64
# Work is cut so that it fills the device once, or, where that makes partial sums cheap beside the
# keys that are read for them (1/8 as many bytes), up to so many times: even pieces, short tails.
_MAX_WAVES = 4
_THRIFTY_KEYS_PER_LINE = 16
_FIXED_SPLIT_SIZE = 1024
# So many tiles of the second largest shape are better than one or two of the largest.
_FEW_TILES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Constants that the attention kernels are compiled for."""

    rows_per_tile: int
    """Query rows of a tile."""
    block_m: int
    """Rows of a tile: its query rows, with all heads of a key-value head."""
    block_n: int
    """Keys read at a time."""
    split_size: int
    """Keys of one work unit, a multiple of `block_n`."""
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    is_deterministic: bool
    """A work unit has exactly `split_size` keys, counted from position 0; else at least so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """A pass as the attention kernels need it, on the device; the same for all layers.

    Row i sees its sequence's logical slot s iff `row_begins[i]` <= s < `row_ends[i]`, or s >=
    `tree_starts[b]` and bit s - tree_starts[b] of its `ancestor_words` is set. Rows of no sequence
    are left as they are.
    """

    row_starts: Tensor
    """int32 [batch], batch at most 1024. Sequence b has the rows from here on."""
    num_rows: Tensor
    """int32 [batch]."""
    kv_lens: Tensor
    """int32 [batch], keys, this pass's included."""
    first_keys: Tensor
    """int32 [batch]. The sequence's rows see no key before it."""
    tree_starts: Tensor
    """int32 [batch]. A causal sequence has tree_starts[b] == kv_lens[b]."""
    block_indptr: Tensor
    """int32 [batch]. The sequence's blocks are `block_ids[block_indptr[b]:]`."""
    block_ids: Tensor
    """int32."""
    row_begins: Tensor
    """int32 [n]."""
    row_ends: Tensor
    """int32 [n]. A tree's rows have row_ends == tree_starts[b]."""
    ancestor_words: Tensor
    """int64 [n, num_words], low word first."""
    path_slots: Tensor | None = None
    """int32 [n, max_path], only in deterministic mode with trees. The logical slots of a tree row's
    ancestors in order of depth, itself last, then -1."""
    work: Tensor
    """int32 [3, batch + 1], written by `prepare` (see there)."""
    workspace: Tensor
    """float32, what partial sums need (`workspace_size`). Layers and plans that run one after the
    other may share it."""
    shape: TileShape
    num_kv_heads: int
    max_tiles: int
    """An upper bound of the tiles of all sequences, only to size launches."""
    may_split: bool = True
    """False if the host knows that no sequence's keys are split."""
    full: "TilePlan | None" = None
    """The plan of layers without a window, where only some layers have one."""

    def prepare(self) -> None:
        """Cut the pass into units of work: once a pass, before the first layer, on the device.

        A unit is a tile of rows and a split of keys. `work[0]`: sequence b's units are
        work[0, b] to work[0, b + 1], tile after tile, split after split; `work[1, :batch]`: where
        the partial sums begin of sequences with more than one split, and `work[1, batch]` how many
        there are; `work[2, :batch]`: keys of a split.
        """
        if self.row_starts.shape[0] == 0:
            return
        if not uses_triton(self.work):
            return  # the reference does without
        shape = self.shape
        launch(
            _divide_work_kernel,
            (1,),
            self.num_rows,
            self.kv_lens,
            self.first_keys,
            self.work,
            self.row_starts.shape[0],
            _units_of_a_wave(shape, self.num_kv_heads, self.work.device),
            num_warps=4,
            num_stages=1,
            ROWS_PER_TILE=shape.rows_per_tile,
            BLOCK_N=shape.block_n,
            ALIGNMENT=SPLIT_ALIGNMENT,
            SPLIT_SIZE=shape.split_size,
            THRIFTY_SIZE=_THRIFTY_KEYS_PER_LINE * shape.block_m,
            MAX_WAVES=_MAX_WAVES,
            IS_DETERMINISTIC=shape.is_deterministic,
            BATCH=MAX_SEQUENCES,
        )
        if self.full is not None:
            self.full.prepare()


@jit
def _divide_work_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913 - constants of the shape
    num_rows,
    kv_lens,
    first_keys,
    work,
    batch,
    wave,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    THRIFTY_SIZE: tl.constexpr,
    MAX_WAVES: tl.constexpr,
    IS_DETERMINISTIC: tl.constexpr,
    BATCH: tl.constexpr,
):
    """One program. `wave`: units that the device works on at the same time."""
    b = tl.arange(0, BATCH)
    is_sequence = b < batch
    rows = tl.load(num_rows + b, mask=is_sequence, other=0)
    tiles = (rows + ROWS_PER_TILE - 1) // ROWS_PER_TILE
    span = tl.load(kv_lens + b, mask=is_sequence, other=0)
    size = tl.full([BATCH], SPLIT_SIZE, tl.int32)
    if not IS_DETERMINISTIC:
        span -= tl.load(first_keys + b, mask=is_sequence, other=0) // ALIGNMENT * ALIGNMENT
        total = tl.sum(tiles.to(tl.int64) * span, axis=0)
        one_wave = (total + wave - 1) // wave
        many_waves = (total + wave * MAX_WAVES - 1) // (wave * MAX_WAVES)
        common = tl.minimum(one_wave, tl.maximum(many_waves, THRIFTY_SIZE))
        common = tl.minimum(tl.maximum(common, SPLIT_SIZE), 1 << 30).to(tl.int32)
        # One wave must not become a little more than one: fewer pieces, rather. Of many waves
        # the last one may as well be filled by even pieces.
        fewest = tl.maximum(span // common, 1)
        splits = tl.where(common < one_wave, (span + common - 1) // common, fewest)
        splits = tl.maximum(splits, 1)
        size = ((span + splits - 1) // splits + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        size = tl.maximum(size, BLOCK_N)
    splits = (span + size - 1) // size
    units = tl.where(rows > 0, tiles * splits, 0)
    partials = tl.where(splits > 1, units, 0)
    unit_ends = tl.cumsum(units, axis=0)
    partial_ends = tl.cumsum(partials, axis=0)
    tl.store(work + b * 0, 0, mask=b == 0)
    tl.store(work + 1 + b, unit_ends, mask=is_sequence)
    tl.store(work + batch + 1 + b, partial_ends - partials, mask=is_sequence)
    tl.store(work + 2 * batch + 1 + b * 0, tl.sum(partials, axis=0), mask=b == 0)
    tl.store(work + 2 * (batch + 1) + b, size, mask=is_sequence)


def workspace_size(
    shape: TileShape,
    *,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    max_tiles: int,
    max_kv_len: int,
) -> int:
    """Count how many float32 a plan's workspace needs.

    `max_tiles`: of all sequences together; `max_kv_len`: keys of a sequence. Neither matters unless
    the shape is deterministic: else splits grow with the work.
    """
    if shape.is_deterministic:
        num_splits = -(-max_kv_len // shape.split_size)
        num_partials = max_tiles * num_splits if num_splits > 1 else 0
    else:
        # A unit of split keys has at least half as many of them as the work over MAX_WAVES waves.
        num_partials = 2 * _MAX_WAVES * _units_of_a_wave(shape, num_kv_heads, device)
    return num_partials * num_kv_heads * shape.block_m * (head_dim + 2)


def max_tiles_of(shape: TileShape, num_rows: npt.ArrayLike) -> int:
    """Tiles of sequences with so many rows (array-like), or with at most so many."""
    return int(np.sum(-(-np.asarray(num_rows, dtype=np.int64) // shape.rows_per_tile)))


def new_work(batch_size: int, device: torch.device) -> Tensor:
    """Return what `TilePlan.work` must be."""
    return torch.empty((3, batch_size + 1), dtype=torch.int32, device=device)


def tile_shape(
    *,
    max_rows_per_sequence: int,
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    architecture: int,
    deterministic: bool = False,
) -> TileShape:
    """The shape for passes of which no sequence has more rows than that; there are few shapes.

    `group_size`: query heads of a key-value head; `architecture`: as `triton_support.architecture`.
    """
    shapes = tile_shapes(
        group_size=group_size,
        head_dim=head_dim,
        dtype=dtype,
        architecture=architecture,
        deterministic=deterministic,
    )
    # Large tiles read keys less often, but leave most of the device idle unless there are many.
    last = len(shapes) - 1
    return next(
        shape
        for place, shape in enumerate(shapes)
        if place == last
        or shape.rows_per_tile >= max_rows_per_sequence
        or (place == last - 1 > 0 and _FEW_TILES * shape.rows_per_tile >= max_rows_per_sequence)
    )


def tile_shapes(
    *,
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    architecture: int,
    deterministic: bool = False,
) -> tuple[TileShape, ...]:
    """Return all that `tile_shape` may return for a model, the smallest tiles first.

    The shapes that fit into the registers, by ahead-of-time compilation. Stages are enough for two
    blocks of keys and values under way; the block ids that these depend on take stages as well. A
    thread holds block_m * head_dim / (32 * num_warps) sums.
    """
    if dtype == torch.float32:  # products without tensor cores: unrolled, so few of them
        # of block_m, block_n, num_warps and num_stages
        variants = [(16, 16, 8, 2) if head_dim > 128 else (16, 32, 4, 3)]
    elif deterministic:
        variants = [(32, 32, 8 if head_dim > 128 else 4, 5)]
    elif head_dim > 128:
        variants = [(16, 32, 4, 4 if architecture < 90 else 5), (32, 32, 8, 5)]
    elif architecture < 90:  # the operands of products pass through registers
        variants = [(16, 64, 4, 5), (64, 32, 8, 5), (128, 32, 8, 5)]
    else:
        large = (128, 64, 8, 3) if architecture < 100 else (128, 32, 8, 5)
        variants = [(16, 64, 4, 3), (64, 64 if head_dim <= 64 else 32, 4, 5), large]
    shapes = []
    for number_of_lines, block_n, num_warps, num_stages in variants:
        block_m = max(number_of_lines, next_power_of_2(group_size))
        shapes.append(
            TileShape(
                rows_per_tile=block_m // group_size,
                block_m=block_m,
                block_n=block_n,
                split_size=_FIXED_SPLIT_SIZE if deterministic else max(64, 2 * block_m),
                num_warps=num_warps,
                num_stages=num_stages,
                programs_per_multiprocessor=1 if num_warps > 4 else 2,
                is_deterministic=deterministic,
            )
        )
    return tuple(shapes)


def _units_of_a_wave(shape: TileShape, num_kv_heads: int, device: torch.device) -> int:
    """Units that fill the device, for all heads: one program works on one head of a unit."""
    num_programs = shape.programs_per_multiprocessor * num_multiprocessors(device)
    return max(num_programs // num_kv_heads, 1)
