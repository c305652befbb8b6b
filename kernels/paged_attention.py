"""Attention over a paged cache, for causal rows and token trees in one batch.

A step's plan is made once on the host (`plan_attention`), then every layer runs it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_plan import AttentionBatch, AttentionPlan, Group, Span, plan_attention

__all__ = ["AttentionBatch", "AttentionPlan", "paged_attention", "plan_attention"]


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, *, scale: float
) -> Tensor:
    """Softmax attention of each query row over the keys that the plan shows it.

    query: [n, num_query_heads, head_dim]; k_cache, v_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], this step's rows already written. Query head h reads key-value head
    h // (num_query_heads / num_kv_heads). Returns [n, num_query_heads, head_dim].
    """
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


def _attend_span(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, span: Span, scale: float
) -> Tensor:
    """One sequence. query: [nq, num_query_heads, head_dim], the result as well.

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
    """Several sequences. query: [batch * max_rows, num_query_heads, head_dim], as the result."""
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
