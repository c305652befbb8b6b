"""Attention over a paged cache in tiles of query rows and splits of keys: the kernels.

The query heads that share a key-value head are packed with several rows into one tile, so that a
token tree reads its prefix once or twice. Keys are read in splits by as many programs as there are
(split-KV: Dao et al., "Flash-Decoding for long-context inference", 2023), with the recurrence of
Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. A second kernel combines
the splits: on an H200 that takes half the time of having the last program of a tile do it, and less
in long contexts: that program has all of a tile's splits to read.
"""

import math

import torch
from torch import Tensor

from outrider.kernels.attention.attention_blocks import attend_in_any_order, attend_in_order
from outrider.kernels.attention.attention_spans import read_cache
from outrider.kernels.attention.attention_tiles import MAX_SEQUENCES, SPLIT_ALIGNMENT, TilePlan
from outrider.kernels.attention.combine_splits import combine_splits, inverse_with_sink
from outrider.kernels.triton_support import (
    jit,
    launch,
    next_power_of_2,
    num_multiprocessors,
    tl,
    uses_triton,
)

# Programs beyond this many a multiprocessor are not launched: the others take over their work.
_PROGRAMS_PER_MULTIPROCESSOR = 16
_LOG2_E = math.log2(math.e)
# What the kernels read from a cache of e4m3 numbers has to be multiplied by this.
_E4M3_FACTOR = 256.0


def attend_tiles_reference(  # noqa: PLR0913 - a cache with scales is two tensors more
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TilePlan,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend_tiles` in plain torch, a row at a time; the specification."""
    num_query_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    group_size, block_size = num_query_heads // num_kv_heads, k_cache.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for b, num_rows in enumerate(plan.num_rows.tolist()):
        kv_len, tree_start = int(plan.kv_lens[b]), int(plan.tree_starts[b])
        logical = torch.arange(kv_len, device=query.device)
        blocks = plan.block_ids[plan.block_indptr[b] + logical // block_size].long()
        slots = blocks * block_size + logical % block_size  # [kv_len]
        keys, values = (
            read_cache(cache, slots, scales, torch.float32).repeat_interleave(group_size, 1)
            for cache, scales in ((k_cache, k_scale), (v_cache, v_scale))
        )  # [kv_len, num_query_heads, head_dim] each
        first_row = int(plan.row_starts[b])
        for row in range(first_row, first_row + num_rows):
            visible = (logical >= plan.row_begins[row]) & (logical < plan.row_ends[row])
            for node in range(kv_len - tree_start):
                word = int(plan.ancestor_words[row, node // 64])
                visible[tree_start + node] |= bool(word >> node % 64 & 1)
            scores = torch.einsum("hd,khd->hk", query[row].float(), keys[visible]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None]), -1)
            weights = torch.softmax(scores, -1)  # [num_query_heads, visible keys]
            weights = weights[:, : int(visible.sum())]
            output[row] = torch.einsum("hk,khd->hd", weights, values[visible]).to(query.dtype)
    return output


@jit
def _attend_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913 - a pass's layout
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    output,
    workspace,
    row_starts,
    num_rows,
    kv_lens,
    tree_starts,
    first_keys,
    block_indptr,
    block_ids,
    row_begins,
    row_ends,
    ancestor_words,
    path_slots,
    sinks,
    work,
    batch,
    num_kv_heads,
    factor,
    inner_factor,
    query_stride,
    query_head_stride,
    cache_stride,
    cache_head_stride,
    scale_stride,
    scale_head_stride,
    max_path,
    NUM_WORDS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS_PER_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BATCH: tl.constexpr,
    IS_DETERMINISTIC: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """A program: units of work, each a tile of rows and a split of keys, of one key-value head.

    Row m of a tile is the query row m // GROUP_SIZE with query head m % GROUP_SIZE of the group.
    """
    sequences = tl.arange(0, BATCH)
    unit_ends = tl.load(work + 1 + sequences, mask=sequences < batch, other=0x7FFFFFFF)
    num_works = tl.load(work + batch) * num_kv_heads
    lines = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    for index in tl.range(tl.program_id(0), num_works, tl.num_programs(0)):
        # Heads are neighbours in memory, so they are neighbours in time.
        head = index % num_kv_heads
        unit = index // num_kv_heads
        b = tl.sum((unit_ends <= unit).to(tl.int32), axis=0)
        first_unit = tl.load(work + b)
        num_units = tl.load(work + b + 1) - first_unit
        partial = tl.load(work + batch + 1 + b) + unit - first_unit
        split_size = tl.load(work + 2 * (batch + 1) + b)
        count = tl.load(num_rows + b)
        kv_len = tl.load(kv_lens + b)
        tree_start = tl.load(tree_starts + b)
        blocks = block_ids + tl.load(block_indptr + b)
        num_tiles = (count + ROWS_PER_TILE - 1) // ROWS_PER_TILE
        # The last rows first: a causal sequence's have the most keys.
        tile_index = num_tiles - 1 - (unit - first_unit) % num_tiles
        split_begin = (unit - first_unit) // num_tiles * split_size
        if not IS_DETERMINISTIC:
            split_begin += tl.load(first_keys + b) // ALIGNMENT * ALIGNMENT

        place = tile_index * ROWS_PER_TILE + lines // GROUP_SIZE  # of the row in its sequence
        is_row = (lines < ROWS_PER_TILE * GROUP_SIZE) & (place < count)
        first_row = tl.load(row_starts + b) + tile_index * ROWS_PER_TILE
        row = (first_row + lines // GROUP_SIZE).to(tl.int64)
        query_head = head * GROUP_SIZE + lines % GROUP_SIZE
        is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        query_places = query + row * query_stride + query_head * query_head_stride
        rows_of_heads = tl.load(query_places[:, None] + dim[None, :], mask=is_element, other=0.0)
        begin = tl.load(row_begins + row, mask=is_row, other=0)
        end = tl.load(row_ends + row, mask=is_row, other=0)

        # Blocks of keys that some row of the tile sees. A tree's slots count here as positions,
        # which is right: an ancestor's slot is never below its position.
        some_begin = tl.min(tl.where(is_row, begin, kv_len), axis=0)
        some_end = tl.minimum(tl.max(end, axis=0), kv_len)
        if tree_start < kv_len:
            some_end = kv_len
        some_end = tl.minimum(some_end, split_begin + split_size)
        low = tl.maximum(some_begin, split_begin) // BLOCK_N
        high = tl.maximum((some_end + BLOCK_N - 1) // BLOCK_N, low)

        cache = (
            k_cache + head * cache_head_stride,
            v_cache + head * cache_head_stride,
            k_scale + head * scale_head_stride,
            v_scale + head * scale_head_stride,
            cache_stride,
            scale_stride,
            factor,
            inner_factor,
        )
        tile = (rows_of_heads, begin, end, row, is_row)
        if IS_DETERMINISTIC:
            sums, top, total = attend_in_order(
                tile, cache, blocks, kv_len, low, high, split_begin + split_size, first_row,
                tl.minimum(count - tile_index * ROWS_PER_TILE, ROWS_PER_TILE),
                path_slots, max_path, tree_start,
                HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
                HAS_PATHS, HAS_SOFTCAP, HAS_SCALES,
            )  # fmt: skip
        else:
            all_begin = tl.max(begin, axis=0)
            all_end = tl.minimum(tl.min(tl.where(is_row, end, kv_len), axis=0), some_end)
            free_low = tl.minimum(tl.maximum((all_begin + BLOCK_N - 1) // BLOCK_N, low), high)
            free_high = tl.maximum(all_end // BLOCK_N, free_low)
            sums, top, total = attend_in_any_order(
                tile, cache, blocks, kv_len, low, high, free_low, free_high,
                ancestor_words, tree_start, NUM_WORDS,
                HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, HAS_SOFTCAP, HAS_SCALES,
            )  # fmt: skip

        # Read again, so that addresses and masks need not be held in registers all the while.
        place = tile_index * ROWS_PER_TILE + lines // GROUP_SIZE
        is_row = (lines < ROWS_PER_TILE * GROUP_SIZE) & (place < tl.load(num_rows + b))
        is_element = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        if num_units == num_tiles:  # all keys in one split
            row = (tl.load(row_starts + b) + place).to(tl.int64)
            inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
            if HAS_SINKS:
                sink = tl.load(sinks + head * GROUP_SIZE + lines % GROUP_SIZE)
                inverse = inverse_with_sink(top, total, sink, factor)
            places = (row * num_kv_heads + head) * GROUP_SIZE + lines % GROUP_SIZE
            places = output + places[:, None] * HEAD_DIM + dim[None, :]
            tl.store(places, (sums * inverse[:, None]).to(rows_of_heads.dtype), mask=is_element)
        else:
            part_size = BLOCK_M * (HEAD_DIM + 2)
            part = (partial.to(tl.int64) * num_kv_heads + head) * part_size
            part_tops = workspace + part + BLOCK_M * HEAD_DIM + lines
            tl.store(part_tops, top, mask=is_row)
            tl.store(part_tops + BLOCK_M, total, mask=is_row)
            if high > low:  # else top says that there is nothing to be read
                places = workspace + part + lines[:, None] * HEAD_DIM + dim[None, :]
                tl.store(places, sums, mask=is_element)


def attend_tiles(  # noqa: PLR0913 - a cache with scales is two tensors more
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TilePlan,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` for a TilePlan whose `prepare` has run.

    Raises ValueError for caches or scales that the kernels cannot address.
    """
    if not uses_triton(query):
        return attend_tiles_reference(
            query,
            k_cache,
            v_cache,
            plan,
            scale=scale,
            k_scale=k_scale,
            v_scale=v_scale,
            softcap=softcap,
            sinks=sinks,
        )
    _check(query, k_cache, v_cache, plan, scale, k_scale, v_scale)
    if k_scale is not None:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        scale *= _E4M3_FACTOR
    # Weights are exp2(factor * x), x the product of query and key or the tangent.
    factor = scale * _LOG2_E if softcap is None else softcap * _LOG2_E
    inner_factor = 0.0 if softcap is None else 2 * _LOG2_E * scale / softcap
    shape, batch_size = plan.shape, plan.row_starts.shape[0]
    # Numbers are decoded in registers, of which there are no more than before.
    is_scaled, is_large = k_scale is not None, shape.block_m > 64
    _, num_query_heads, head_dim = query.shape
    num_kv_heads = plan.num_kv_heads
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if batch_size == 0:
        return output
    constants = {
        "GROUP_SIZE": num_query_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROWS_PER_TILE": shape.rows_per_tile,
        "BLOCK_M": shape.block_m,
        "BLOCK_D": max(next_power_of_2(head_dim), 16),
        # Few different numbers: each is one more kernel to compile.
        "BATCH": 32 if batch_size <= 32 else MAX_SEQUENCES,
        "HAS_SINKS": sinks is not None,
    }
    launch(
        _attend_kernel,
        (_num_programs(plan, head_dim),),
        query,
        k_cache,
        v_cache,
        # A tuple inside the kernel holds them, and must not hold None.
        plan.workspace if k_scale is None else k_scale,
        plan.workspace if v_scale is None else v_scale,
        output,
        plan.workspace,
        plan.row_starts,
        plan.num_rows,
        plan.kv_lens,
        plan.tree_starts,
        plan.first_keys,
        plan.block_indptr,
        plan.block_ids,
        plan.row_begins,
        plan.row_ends,
        plan.ancestor_words,
        plan.path_slots,
        sinks,
        plan.work,
        batch_size,
        num_kv_heads,
        factor,
        inner_factor,
        query.stride(0),
        query.stride(1),
        k_cache.stride(1),
        k_cache.stride(2),
        0 if k_scale is None else k_scale.stride(1),
        0 if k_scale is None else k_scale.stride(2),
        0 if plan.path_slots is None else plan.path_slots.shape[1],
        num_warps=shape.num_warps,
        num_stages=min(shape.num_stages, 4) if is_scaled and is_large else shape.num_stages,
        NUM_WORDS=plan.ancestor_words.shape[1],
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_N=min(shape.block_n, 32) if is_scaled else shape.block_n,
        ALIGNMENT=SPLIT_ALIGNMENT,
        IS_DETERMINISTIC=shape.is_deterministic,
        HAS_PATHS=plan.path_slots is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SCALES=is_scaled,
        **constants,
    )
    if plan.may_split:
        combine_splits(output, plan, sinks, factor, constants)
    return output


def _num_programs(plan: TilePlan, head_dim: int) -> int:
    """Return the number of programs: enough for all possible work, within the device's bounds."""
    multiprocessors = num_multiprocessors(plan.workspace.device)
    num_works = plan.max_tiles * plan.num_kv_heads
    if not plan.may_split:  # few of them are in vain, and the device balances their work
        return min(num_works, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
    num_works += plan.workspace.numel() // (plan.shape.block_m * (head_dim + 2))
    return min(num_works, plan.shape.programs_per_multiprocessor * multiprocessors)


def _check(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TilePlan,
    scale: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Raise ValueError for what the kernels do not address."""
    num_kv_heads, num_query_heads = k_cache.shape[2], query.shape[1]
    if num_kv_heads != plan.num_kv_heads or num_query_heads % num_kv_heads:
        raise ValueError(
            f"{num_query_heads} query and {num_kv_heads} key-value heads, but the plan is for "
            f"{plan.num_kv_heads} key-value heads"
        )
    rows = plan.shape.rows_per_tile * (num_query_heads // num_kv_heads)
    if rows > plan.shape.block_m or scale <= 0:
        raise ValueError(f"{rows} rows in a tile of {plan.shape.block_m}, or scale={scale} <= 0")
    pairs = [(k_cache, v_cache)]
    if (k_cache.dtype == torch.float8_e4m3fn) != (k_scale is not None):
        raise ValueError(f"a cache of {k_cache.dtype} with k_scale={type(k_scale).__name__}")
    if k_scale is not None and v_scale is not None:
        pairs.append((k_scale, v_scale))
    for first, second in pairs:
        strides = first.stride()
        if strides != second.stride() or strides[0] != first.shape[1] * strides[1]:
            raise ValueError(f"strides {strides} and {second.stride()}: slots must be equidistant")
    if query.stride(2) != 1 or k_cache.stride(3) != 1:
        raise ValueError("the numbers of a head must be neighbours in memory")
