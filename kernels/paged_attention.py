"""Attention over a paged cache, for causal rows and token trees in one batch.

A step's plan is made once on the host (`plan_attention`), then every layer runs it.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

# Up to this many query rows, the query heads of a group are packed into one tile.
PACKED_MAX_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Which keys each query row of a step may see. All fields are host data.

    `query_indptr` [batch + 1] delimits each sequence's rows; `kv_lens` [batch] counts its keys,
    this step's included; `block_tables` [batch] its block ids. Row i of nq rows sees logical
    slot s < `tree_starts[b]` iff s <= kv_len - nq + i, and slot s >= `tree_starts[b]` iff bit
    s - tree_start of `ancestor_masks[b][i]` is set (its own slot's bit included). Causal
    sequences have tree_start == kv_len and None for masks; trees have tree_start <= kv_len - nq
    and parents in lower slots than their children.
    """

    query_indptr: list[int]
    kv_lens: list[int]
    block_tables: list[list[int]]
    tree_starts: list[int]
    ancestor_masks: list[list[int] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The rows of one sequence and where its keys lie.

    `slots`: a slice of the cache's slots where they are consecutive, else their indices.
    `mask`: additive, [rows of a tile, num_keys]; None where every row sees every key, or where
    `is_causal` says it all.
    """

    start: int
    end: int
    slots: slice | Tensor
    mask: Tensor | None
    is_causal: bool
    is_packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """What `paged_attention` needs to know about a step; the same for all layers.

    `full`: the plan of the layers that have no window, where only some layers have one.
    """

    num_rows: int
    num_query_heads: int
    num_kv_heads: int
    spans: tuple[_Span, ...]
    full: "AttentionPlan | None" = None


def plan_attention(  # noqa: PLR0913 - a step's plan depends on the model's shape
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
    """Locate keys and build masks.

    `sliding_window`: a key is hidden from rows `sliding_window` or more positions after it; a
    tree node's position is tree_start + depth, its depth the number of its ancestors in the
    mask. `has_full_layers`: the model also has layers without the window, so plan both.
    """
    device = torch.device(device)
    spans = []
    group_size = num_query_heads // num_kv_heads
    for index, (start, end) in enumerate(pairwise(batch.query_indptr)):
        if start == end:
            continue
        first_key, visible, is_causal = _visible_keys(batch, index, end - start, sliding_window)
        is_packed = end - start <= PACKED_MAX_ROWS
        if is_causal and is_packed:  # a packed tile's rows are not a causal triangle
            visible, is_causal = _causal(end - start, batch.kv_lens[index], 0), False
        mask = None
        if visible is not None:
            if is_packed:
                visible = visible.repeat(group_size, 0)  # row i of the tile: query i // group
            mask = torch.zeros(visible.shape, dtype=dtype)
            mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))
            mask = mask.to(device, non_blocking=True)
        spans.append(
            _Span(
                start=start,
                end=end,
                slots=_locate(
                    batch.block_tables[index], block_size, first_key, batch.kv_lens[index], device
                ),
                mask=mask,
                is_causal=is_causal,
                is_packed=is_packed,
            )
        )
    full = None
    if sliding_window is not None and has_full_layers:
        full = plan_attention(
            batch,
            block_size=block_size,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            device=device,
        )
    return AttentionPlan(
        num_rows=batch.query_indptr[-1],
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        spans=tuple(spans),
        full=full,
    )


def _visible_keys(
    batch: AttentionBatch, index: int, num_rows: int, window: int | None
) -> tuple[int, NDArray[np.bool_] | None, bool]:
    """(first key that any row sees, [num_rows, keys from there] or None for all, is_causal)."""
    kv_len, tree_start = batch.kv_lens[index], batch.tree_starts[index]
    masks = batch.ancestor_masks[index]
    if masks is None:
        first_position = kv_len - num_rows
        first_key = 0 if window is None else max(0, first_position - window + 1)
        if num_rows == 1:
            return first_key, None, False
        if num_rows == kv_len and (window is None or window >= kv_len):
            return 0, None, True
        visible = _causal(num_rows, kv_len, first_key)
        positions = np.arange(first_position, kv_len)
    else:
        depths = [mask.bit_count() - 1 for mask in masks]
        first_key = 0
        if window is not None:
            first_key = min(tree_start, max(0, tree_start + min(depths) - window + 1))
            masks = [_newest_ancestors(mask, window) for mask in masks]
        visible = np.ones((num_rows, kv_len - first_key), dtype=np.bool_)
        visible[:, tree_start - first_key :] = _unpack_bits(masks, kv_len - tree_start)
        positions = np.array([tree_start + depth for depth in depths])
    if window is not None:
        keys = np.arange(first_key, min(tree_start, kv_len))
        visible[:, : len(keys)] &= positions[:, None] - keys < window
    return first_key, None if visible.all() else visible, False


def _causal(num_rows: int, kv_len: int, first_key: int) -> NDArray[np.bool_]:
    positions = np.arange(kv_len - num_rows, kv_len)
    return np.arange(first_key, kv_len) <= positions[:, None]  # [num_rows, keys]


def _newest_ancestors(mask: int, count: int) -> int:
    """The mask's highest `count` bits: ancestors less than `count` levels up, and the node."""
    while mask.bit_count() > count:
        mask &= mask - 1
    return mask


def _unpack_bits(masks: list[int], width: int) -> NDArray[np.bool_]:
    """[len(masks), width]: bit j of each mask."""
    num_bytes = (width + 7) // 8
    packed = b"".join(mask.to_bytes(num_bytes, "little") for mask in masks)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(masks), num_bytes)
    return np.unpackbits(rows, axis=1, count=width, bitorder="little").view(np.bool_)


def _locate(
    block_table: list[int], block_size: int, first_key: int, kv_len: int, device: torch.device
) -> slice | Tensor:
    """The cache slots of logical slots [first_key, kv_len)."""
    first_block, num_blocks = first_key // block_size, -(-kv_len // block_size)
    blocks = block_table[first_block:num_blocks]
    offset = first_key - first_block * block_size
    num_keys = kv_len - first_key
    if blocks == list(range(blocks[0], blocks[0] + num_blocks - first_block)):
        begin = blocks[0] * block_size + offset
        return slice(begin, begin + num_keys)
    slots = np.array(blocks, dtype=np.int64)[:, None] * block_size + np.arange(block_size)
    return torch.from_numpy(slots.reshape(-1)[offset : offset + num_keys].copy()).to(
        device, non_blocking=True
    )


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, *, scale: float
) -> Tensor:
    """Softmax attention of each query row over the keys that the plan shows it.

    query: [n, num_query_heads, head_dim]; k_cache, v_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], this step's rows already written. Query head h reads key-value head
    h // (num_query_heads / num_kv_heads). Returns [n, num_query_heads, head_dim].
    """
    k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, kv_heads, dim]
    if len(plan.spans) == 1:
        return _attend(query, k_slots, v_slots, plan, plan.spans[0], scale)
    output = torch.empty_like(query)
    for span in plan.spans:
        output[span.start : span.end] = _attend(
            query[span.start : span.end], k_slots, v_slots, plan, span, scale
        )
    return output


def _attend(
    query: Tensor, k_slots: Tensor, v_slots: Tensor, plan: AttentionPlan, span: _Span, scale: float
) -> Tensor:
    """One sequence. query: [nq, num_query_heads, head_dim], the result as well.

    Heads that share keys are packed into one tile, so keys and values are never repeated:
    [num_kv_heads, nq * group_size, head_dim]. For many rows the group is a head dimension with
    keys of stride 0, which needs no packing and can use the causal kernel.
    """
    num_rows, num_query_heads, head_dim = query.shape
    num_kv_heads = plan.num_kv_heads
    group_size = num_query_heads // num_kv_heads
    if isinstance(span.slots, slice):
        key, value = k_slots[span.slots], v_slots[span.slots]  # [keys, num_kv_heads, head_dim]
    else:
        key, value = k_slots.index_select(0, span.slots), v_slots.index_select(0, span.slots)
    tiles = query.view(num_rows, num_kv_heads, group_size, head_dim)
    if span.is_packed:
        packed = tiles.transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(
            packed,
            key.transpose(0, 1).unsqueeze(0),
            value.transpose(0, 1).unsqueeze(0),
            attn_mask=span.mask,
            scale=scale,
        )  # [1, num_kv_heads, nq * group_size, head_dim]
        attended = attended.view(num_kv_heads, num_rows, group_size, head_dim).transpose(0, 1)
        return attended.reshape(num_rows, num_query_heads, head_dim)
    shape = (num_kv_heads, group_size, key.shape[0], head_dim)
    attended = F.scaled_dot_product_attention(
        tiles.permute(1, 2, 0, 3),
        key.transpose(0, 1).unsqueeze(1).expand(shape),
        value.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=span.mask,
        is_causal=span.is_causal,
        scale=scale,
    )  # [num_kv_heads, group_size, nq, head_dim]
    return attended.permute(2, 0, 1, 3).reshape(num_rows, num_query_heads, head_dim)
