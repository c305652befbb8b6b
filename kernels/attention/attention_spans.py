"""Attention by torch's own kernels: what runs on the CPU.

Sequences are computed one by one or padded into batches, as their `AttentionPlan` says.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.attention.attention_plan import AttentionPlan, Group, KeySpan


def attend_spans(  # noqa: PLR0913 - a cache with scales is two tensors more
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` for an AttentionPlan.

    Scores with a softcap, a sink or a cache with scales take memory for all of them.
    """
    if softcap is not None or sinks is not None or k_scale is not None:
        return _attend_plainly(
            query, (k_cache, k_scale), (v_cache, v_scale), plan, scale, softcap, sinks
        )
    if len(plan.spans) + len(plan.groups) == 1:
        if plan.spans:
            return _attend_span(query, k_cache, v_cache, plan.spans[0], scale)
        if plan.groups[0].rows is None:
            return _attend_group(query, k_cache, v_cache, plan.groups[0], scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for span in plan.spans:
        rows = query[span.start : span.end]
        output[span.start : span.end] = _attend_span(rows, k_cache, v_cache, span, scale)
    for group in plan.groups:
        if group.rows is None:
            return _attend_group(query, k_cache, v_cache, group, scale)
        attended = _attend_group(query.index_select(0, group.rows), k_cache, v_cache, group, scale)
        output.index_copy_(0, group.targets, attended.index_select(0, group.sources))
    return output


def read_cache(cache: Tensor, slots: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[num_slots, num_kv_heads, head_dim] of the slots, times their scales if there are any.

    `cache`: [num_blocks, block_size, num_kv_heads, head_dim]; `scales`: without the last dimension.
    """
    raw = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    read = raw.flatten(0, 1).index_select(0, slots).view(cache.dtype)
    if scales is None:
        return read.to(dtype)
    chosen = scales.flatten(0, 1).index_select(0, slots)  # [num_slots, num_kv_heads]
    return (read.float() * chosen[:, :, None]).to(dtype)


def _attend_plainly(
    query: Tensor,
    keys: tuple[Tensor, Tensor | None],
    values: tuple[Tensor, Tensor | None],
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Scores as matrices in float32; keys and values are caches with their scales."""
    num_query_heads, num_kv_heads = query.shape[1], keys[0].shape[2]
    group_size = num_query_heads // num_kv_heads
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)

    def attend(rows: Tensor, batch_size: int, slots: Tensor, mask: Tensor | None) -> Tensor:
        key, value = (
            read_cache(cache, slots, scales, torch.float32)
            .view(batch_size, -1, num_kv_heads, query.shape[2])
            .transpose(1, 2)
            for cache, scales in (keys, values)
        )  # [batch_size, num_kv_heads, num_keys, head_dim] each
        packed = _pack(rows.float(), batch_size, num_kv_heads)
        scores = packed @ key.transpose(2, 3) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores + mask
        if sinks is not None:  # one more column; a row of a tile has a query head of its group
            column = sinks.view(num_kv_heads, 1, group_size)
            column = column.expand(-1, scores.shape[2] // group_size, -1).reshape(num_kv_heads, -1)
            sink = column.unsqueeze(-1).expand(batch_size, -1, -1, 1)
            weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        attended = weights @ value
        return _unpack(attended, len(rows), num_query_heads).to(query.dtype)

    for span in plan.spans:
        slots = span.slots
        if isinstance(slots, range):
            slots = torch.arange(slots.start, slots.stop, device=query.device)
        mask = span.mask
        num_rows = span.end - span.start
        if span.is_causal:
            mask = torch.full((num_rows, num_rows), float("-inf"), device=query.device).triu(1)
        if mask is not None and not span.is_packed:
            mask = mask.repeat_interleave(group_size, 0)
        output[span.start : span.end] = attend(query[span.start : span.end], 1, slots, mask)
    for group in plan.groups:
        rows = query if group.rows is None else query.index_select(0, group.rows)
        attended = attend(rows, group.batch_size, group.slots, group.mask)
        output.index_copy_(0, group.targets, attended.index_select(0, group.sources))
    return output


def _attend_span(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, span: KeySpan, scale: float
) -> Tensor:
    """Attend for one sequence. `query`: [nq, num_query_heads, head_dim], the result as well.

    Heads that share keys are packed into one tile, so keys and values are never repeated:
    [num_kv_heads, nq * group_size, head_dim]. For many rows the group is a head dimension with
    keys of stride 0, which can use the causal kernel: half the work.
    """
    num_rows, num_query_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    group_size = num_query_heads // num_kv_heads
    key, value = _heads_of(k_cache, span.slots), _heads_of(v_cache, span.slots)
    if span.has_scores:
        assert span.mask is not None
        packed = _pack(query, 1, num_kv_heads).squeeze(0)  # [kv heads, nq * group_size, dim]
        scores = torch.bmm(packed, key.squeeze(0).transpose(1, 2))
        weights = torch.softmax(torch.add(span.mask, scores, alpha=scale), -1)
        attended = torch.bmm(weights, value.squeeze(0)).unsqueeze(0)
        return _unpack(attended, num_rows, num_query_heads)
    if span.is_packed:
        attended = F.scaled_dot_product_attention(
            _pack(query, 1, num_kv_heads), key, value, attn_mask=span.mask, scale=scale
        )
        return _unpack(attended, num_rows, num_query_heads)
    shape = (num_kv_heads, group_size, key.shape[2], head_dim)
    attended = F.scaled_dot_product_attention(
        query.view(num_rows, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3),
        key.transpose(0, 1).expand(shape),
        value.transpose(0, 1).expand(shape),
        attn_mask=span.mask,
        is_causal=span.is_causal,
        scale=scale,
    )  # [num_kv_heads, group_size, nq, head_dim]
    return attended.permute(2, 0, 1, 3).reshape(num_rows, num_query_heads, head_dim)


def _attend_group(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, group: Group, scale: float
) -> Tensor:
    """Several sequences. `query`: [batch * max_rows, num_query_heads, head_dim], as the result."""
    num_rows, num_query_heads, head_dim = query.shape
    num_kv_heads, batch_size = k_cache.shape[2], group.batch_size
    shape = (batch_size, -1, num_kv_heads, head_dim)
    key = k_cache.flatten(0, 1).index_select(0, group.slots).view(shape).transpose(1, 2)
    value = v_cache.flatten(0, 1).index_select(0, group.slots).view(shape).transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        _pack(query, batch_size, num_kv_heads), key, value, attn_mask=group.mask, scale=scale
    )
    return _unpack(attended, num_rows, num_query_heads)


def _heads_of(cache: Tensor, slots: range | Tensor) -> Tensor:
    """[1, num_kv_heads, num_keys, head_dim] of the slots, without a copy for a range."""
    if isinstance(slots, range):
        _, _, num_heads, head_dim = cache.shape
        _, slot_stride, head_stride, _ = cache.stride()
        return cache.as_strided(  # one call where slicing and transposing take four
            (1, num_heads, len(slots), head_dim),
            (0, head_stride, slot_stride, 1),
            cache.storage_offset() + slots.start * slot_stride,
        )
    return cache.flatten(0, 1).index_select(0, slots).transpose(0, 1).unsqueeze(0)


def _pack(query: Tensor, batch_size: int, num_kv_heads: int) -> Tensor:
    """[batch * rows, query heads, dim] -> [batch, kv heads, rows * group_size, dim]."""
    num_rows, num_query_heads, head_dim = query.shape
    group_size = num_query_heads // num_kv_heads
    if num_rows == batch_size:
        return query.view(batch_size, num_kv_heads, group_size, head_dim)
    tiles = query.view(batch_size, -1, num_kv_heads, group_size, head_dim).transpose(1, 2)
    return tiles.reshape(batch_size, num_kv_heads, -1, head_dim)


def _unpack(attended: Tensor, num_rows: int, num_query_heads: int) -> Tensor:
    """[batch, kv heads, rows * group_size, dim] -> [batch * rows, query heads, dim]."""
    batch_size, num_kv_heads, _, head_dim = attended.shape
    if num_rows == batch_size:
        return attended.reshape(num_rows, num_query_heads, head_dim)
    group_size = num_query_heads // num_kv_heads
    tiles = attended.view(batch_size, num_kv_heads, -1, group_size, head_dim).transpose(1, 2)
    return tiles.reshape(num_rows, num_query_heads, head_dim)
