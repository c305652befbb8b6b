"""Combining the splits of keys that several programs of an attention kernel have read.

A part of `attend_tiles`, whose reference is its own.
"""

from typing import Any

from torch import Tensor

from outrider.kernels.attention.attention_tiles import TilePlan
from outrider.kernels.triton_support import jit, launch, num_multiprocessors, tl

_PROGRAMS_PER_MULTIPROCESSOR = 32
# Splits that a program of the kernel reads at once. Programs of one warp wait for no barrier.
_SPLITS_AT_ONCE = 8
_NUM_WARPS = 1


@jit
def inverse_with_sink(top, total, sink, factor):  # type: ignore[no-untyped-def]
    """Return the factor of the sums where a score without a value joins the weights' total.

    `top`, `total`: as `_add_keys` leaves them; the greater of both exponents is the new reference.
    """
    sink_power = sink * 1.4426950408889634  # of 2
    top_power = tl.where(top == float("-inf"), sink_power, top * factor)
    pivot = tl.maximum(top_power, sink_power)
    decay = tl.exp2(top_power - pivot)
    return decay / tl.fma(total, decay, tl.exp2(sink_power - pivot))


@jit
def _combine_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a pass's layout
    output,
    workspace,
    row_starts,
    num_rows,
    sinks,
    work,
    batch,
    num_kv_heads,
    factor,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BATCH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A program: one query head of some rows; rows with one split are there already."""
    sequences = tl.arange(0, BATCH)
    is_sequence = sequences < batch
    starts = tl.load(row_starts + sequences, mask=is_sequence, other=0)
    ends = starts + tl.load(num_rows + sequences, mask=is_sequence, other=0)
    num_partials = tl.load(work + 2 * batch + 1)
    query_head = tl.program_id(1)
    head = query_head // GROUP_SIZE
    dim = tl.arange(0, BLOCK_D)
    if num_partials > 0:
        for row in tl.range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
            is_own = (starts <= row) & (row < ends)
            b = tl.max(tl.where(is_own, sequences, -1), axis=0)
            num_splits = 0
            num_tiles = 1
            if b >= 0:
                num_tiles = (tl.load(num_rows + b) + ROWS_PER_TILE - 1) // ROWS_PER_TILE
                num_splits = (tl.load(work + b + 1) - tl.load(work + b)) // num_tiles
            if num_splits > 1:
                first_row = tl.load(row_starts + b)
                place = row - first_row
                line = place % ROWS_PER_TILE * GROUP_SIZE + query_head % GROUP_SIZE
                first = tl.load(work + batch + 1 + b) + num_tiles - 1 - place // ROWS_PER_TILE
                sums = tl.zeros([BLOCK_D], tl.float32)
                top = tl.full([], float("-inf"), tl.float32)
                total = tl.full([], 0.0, tl.float32)
                for start in tl.range(0, num_splits, SPLITS):
                    splits = start + tl.arange(0, SPLITS)
                    is_split = splits < num_splits
                    partials = (first + splits * num_tiles).to(tl.int64) * num_kv_heads + head
                    parts = workspace + partials * (BLOCK_M * (HEAD_DIM + 2))
                    part_tops = parts + BLOCK_M * HEAD_DIM + line
                    tops = tl.load(part_tops, mask=is_split, other=float("-inf"))
                    totals = tl.load(part_tops + BLOCK_M, mask=is_split, other=0.0)
                    part_sums = tl.load(
                        parts[:, None] + line * HEAD_DIM + dim[None, :],
                        mask=is_split[:, None] & (dim < HEAD_DIM)[None, :],
                        other=0.0,
                    )  # [SPLITS, BLOCK_D], unwritten where a split saw nothing
                    part_sums = tl.where((tops > float("-inf"))[:, None], part_sums, 0.0)
                    new_top = tl.maximum(top, tl.max(tops, axis=0))
                    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
                    weights = tl.exp2((tops - pivot) * factor)
                    decay = tl.exp2((top - pivot) * factor)
                    total = tl.fma(total, decay, tl.sum(totals * weights, axis=0))
                    sums = tl.fma(sums, decay, tl.sum(part_sums * weights[:, None], axis=0))
                    top = new_top
                inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
                if HAS_SINKS:
                    inverse = inverse_with_sink(top, total, tl.load(sinks + query_head), factor)
                long_row = first_row.to(tl.int64) + place
                places = (long_row * num_kv_heads * GROUP_SIZE + query_head) * HEAD_DIM
                result = (sums * inverse).to(output.dtype.element_ty)
                tl.store(output + places + dim, result, mask=dim < HEAD_DIM)


def combine_splits(
    output: Tensor,
    plan: TilePlan,
    sinks: Tensor | None,
    factor: float,
    constants: dict[str, Any],
) -> None:
    """Store the rows that have several splits; `constants`: of the attention kernel's launch.

    `factor`: weights are exp2(factor * score).
    """
    num_rows, num_query_heads, _ = output.shape
    most = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(output.device) // num_query_heads
    launch(
        _combine_kernel,
        (min(num_rows, max(most, 1)), num_query_heads),
        output,
        plan.workspace,
        plan.row_starts,
        plan.num_rows,
        sinks,
        plan.work,
        plan.row_starts.shape[0],
        plan.num_kv_heads,
        factor,
        num_warps=_NUM_WARPS,
        num_stages=1,
        SPLITS=_SPLITS_AT_ONCE,
        **constants,
    )
