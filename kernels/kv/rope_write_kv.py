"""QK-norm, rotation and the cache's new rows in one launch, from a fused projection."""

import torch
from torch import Tensor

from outrider.kernels.kv.write_kv import fp8_bits, fp8_scale, write_kv_reference
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import (
    RotaryTable,
    heads_per_program,
    norm_and_rotate_reference,
    rotated_halves,
)
from outrider.kernels.triton_support import (
    jit,
    launch,
    next_power_of_2,
    rounded,
    tl,
    triton,
    uses_triton,
)


def rope_write_kv_reference(  # noqa: PLR0913 - as the launcher
    heads: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rotary: RotaryTable,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_query_heads: int,
    qk_norm: RmsNorm | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`rope_write_kv` as what it is made of."""
    num_rotated = num_query_heads + k_cache.shape[2]
    query_key = norm_and_rotate_reference(heads[:, :num_rotated], positions, rotary, norm=qk_norm)
    key, value = query_key[:, num_query_heads:], heads[:, num_rotated:]
    write_kv_reference(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return query_key[:, :num_query_heads]


@jit
def _store_heads(  # type: ignore[no-untyped-def] # noqa: PLR0913
    first,
    second,
    cache_row,
    scale_row,
    kv_head,
    value_type: tl.constexpr,
    IS_FP8: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Write the heads whose kv_head is one of the cache's, at a slot's row of it."""
    columns = tl.arange(0, HALF_BLOCK)
    is_head = (kv_head >= 0) & (kv_head < NUM_KV_HEADS)
    mask = is_head[:, None] & (columns < HALF)[None, :]
    target = cache_row + kv_head[:, None] * (2 * HALF) + columns[None, :]
    # What is quantised is the head as the projection's type holds it.
    first, second = rounded(first, value_type), rounded(second, value_type)
    if IS_FP8:
        first, second = first.to(tl.float32), second.to(tl.float32)
        scale = fp8_scale(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1))
        tl.store(scale_row + kv_head, scale, mask=is_head)
        tl.store(target, fp8_bits(first, scale[:, None]), mask=mask)
        tl.store(target + HALF, fp8_bits(second, scale[:, None]), mask=mask)
    else:
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)


@jit
def _rope_write_kv_kernel(  # type: ignore[no-untyped-def] # noqa: PLR0913
    heads,
    positions,
    slot_mapping,
    table,
    weight,
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    row_stride,
    slot_stride,
    num_slots,
    max_positions,
    eps,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Program (i, j): heads j * HEADS and so on of row i, be they queries, keys or values."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_BLOCK)
    first, second = rotated_halves(
        heads + row * row_stride,
        head,
        weight,
        table,
        tl.load(positions + row),
        max_positions,
        eps,
        HAS_NORM,
        NUM_QUERY_HEADS + 2 * NUM_KV_HEADS,
        NUM_QUERY_HEADS + NUM_KV_HEADS,
        HALF,
        HALF_BLOCK,
    )
    is_query = (head < NUM_QUERY_HEADS)[:, None] & (columns < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + columns[None, :]
    target = query + row * (2 * HALF * NUM_QUERY_HEADS) + at
    tl.store(target, rounded(first, query.dtype.element_ty), mask=is_query)
    tl.store(target + HALF, rounded(second, query.dtype.element_ty), mask=is_query)
    slot = tl.load(slot_mapping + row)
    key_head = head - NUM_QUERY_HEADS
    value_head = key_head - NUM_KV_HEADS
    has_keys = (tl.program_id(1) + 1) * HEADS > NUM_QUERY_HEADS  # most tiles are all queries
    if has_keys & (slot >= 0) & (slot < num_slots):
        k_scale_row, v_scale_row = k_scale, v_scale
        if IS_FP8:
            k_scale_row += slot * NUM_KV_HEADS
            v_scale_row += slot * NUM_KV_HEADS
        _store_heads(
            first, second, k_cache + slot * slot_stride, k_scale_row, key_head,
            query.dtype.element_ty, IS_FP8, NUM_KV_HEADS, HALF, HALF_BLOCK,
        )  # fmt: skip
        _store_heads(
            first, second, v_cache + slot * slot_stride, v_scale_row, value_head,
            query.dtype.element_ty, IS_FP8, NUM_KV_HEADS, HALF, HALF_BLOCK,
        )  # fmt: skip


def rope_write_kv(  # noqa: PLR0913 - what goes in, and where it goes
    heads: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rotary: RotaryTable,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_query_heads: int,
    qk_norm: RmsNorm | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`norm_and_rotate` of the queries and keys, `write_kv` of keys and values; returns queries.

    `heads`: [n, num_query_heads + 2 * num_kv_heads, head_dim], queries, keys, values, a row's heads
    contiguous; `positions`, `slot_mapping`: [n] int64; `qk_norm`: with a weight for each query and
    key head; caches and scales as for `write_kv`. Returns [n, num_query_heads, head_dim]. A row's
    result does not depend on the other rows.
    """
    if not uses_triton(heads):
        return rope_write_kv_reference(
            heads,
            positions,
            slot_mapping,
            rotary,
            k_cache,
            v_cache,
            num_query_heads=num_query_heads,
            qk_norm=qk_norm,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    num_rows, num_heads, head_dim = heads.shape
    query = torch.empty(
        (num_rows, num_query_heads, head_dim), dtype=heads.dtype, device=heads.device
    )
    tile = heads_per_program(num_heads, head_dim)
    is_fp8 = k_scale is not None
    launch(
        _rope_write_kv_kernel,
        (num_rows, triton.cdiv(num_heads, tile)),
        heads,
        positions,
        slot_mapping,
        rotary.table,
        None if qk_norm is None else qk_norm.weight,
        query,
        k_cache.view(torch.uint8) if is_fp8 else k_cache,
        v_cache.view(torch.uint8) if is_fp8 else v_cache,
        k_scale,
        v_scale,
        heads.stride(0),
        k_cache.stride(1),
        k_cache.shape[0] * k_cache.shape[1],
        rotary.table.shape[0],
        0.0 if qk_norm is None else qk_norm.eps,
        num_warps=4,
        HAS_NORM=qk_norm is not None,
        IS_FP8=is_fp8,
        NUM_QUERY_HEADS=num_query_heads,
        NUM_KV_HEADS=k_cache.shape[2],
        HALF=head_dim // 2,
        HEADS=tile,
        HALF_BLOCK=next_power_of_2(head_dim // 2),
    )
    return query
