"""Attention in which a row's bits depend on its own keys alone, for the CPU.

Keys are read in the order of their positions, a tree node's ancestors by depth, in splits of
`SPLIT_KEYS` counted from position 0. Rows are packed into tiles, and a tile times a split is one
product whose height changes no bits, whichever rows share the tile: rows share tiles over the
splits in which they see the same slots; where tree nodes see each a path of its own they have a
tile each. Splits of a row are merged in a tree of sums that only its own splits decide: what
padding adds is zero, which changes no sum. Products, softmax and sums are float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.attention.attention_plan import AttentionBatch
from outrider.kernels.attention.ordered_plan import (
    BATCH_MULTIPLE,
    SPLIT_KEYS,
    TILE_HEIGHTS,
    Band,
    OrderedPlan,
    plan_bands,
)

__all__ = ["OrderedPlan", "attend_in_order", "plan_in_order"]

# Tiles times heads of one batch of products, by height: more would not stay in the cache.
BATCH_LINES = 2048
# Stands for the maximum of nothing: exp(-inf - it) is 0, not NaN.
LEAST_SCORE = -3.0e38


def plan_in_order(  # noqa: PLR0913 - a step's plan depends on the model's shape
    batch: AttentionBatch,
    *,
    block_size: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None = None,
    has_full_layers: bool = False,
    dtype: torch.dtype,
    device: torch.device | str,
) -> OrderedPlan:
    """Tiles, keys and masks of a step; arguments as for `attention_plan.plan_attention`.

    dtype decides nothing: everything between query and result is float32.
    """
    full = None
    if sliding_window is not None and has_full_layers:
        full = plan_in_order(
            batch,
            block_size=block_size,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
    device = torch.device(device)
    group_size = num_query_heads // num_kv_heads
    heights = library_heights(group_size, head_dim, torch.get_num_threads(), device)
    return plan_bands(
        batch if sliding_window is None else batch.of_window(),
        block_size=block_size,
        group_size=group_size,
        num_kv_heads=num_kv_heads,
        window=sliding_window,
        heights=heights or TILE_HEIGHTS[:1],
        uses_library=bool(heights),
        device=device,
        full=full,
    )


def attend_in_order(  # noqa: PLR0913 - `paged_attention`'s arguments
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: OrderedPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with an `OrderedPlan`; scores, weights and sums are float32.

    `query`: [n, num_query_heads, head_dim], as the result; `k_cache`, `v_cache`: [num_blocks,
    block_size, num_kv_heads, head_dim]; `k_scale`, `v_scale`: float32 [num_blocks, block_size,
    num_kv_heads] of an fp8 cache. With a softcap, scores are softcap * tanh(scores / softcap);
    `sinks`: float32 [num_query_heads], the score of a key without a value.
    """
    num_rows, num_query_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    if num_rows == 0:
        return torch.empty_like(query)
    attend = _BandAttention(
        query=query.float() * scale,
        caches=((k_cache, k_scale), (v_cache, v_scale)),
        softcap=softcap,
        multiply=torch.bmm if plan.uses_library else multiply_in_order,
    )
    num_lines = sum(band.mask.shape[0] * band.rows_per_tile for band in plan.bands) * num_kv_heads
    group_size = num_query_heads // num_kv_heads
    parts = _Parts(
        maxima=torch.empty((num_lines, group_size), device=query.device),
        totals=torch.empty((num_lines, group_size), device=query.device),
        outputs=torch.empty((num_lines, group_size, head_dim), device=query.device),
    )
    begin = 0
    for band in plan.bands:
        begin = attend(band, parts, begin)
    return _merge(plan, parts, num_rows, num_query_heads, sinks).to(query.dtype)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Partial results.

    A line holds the query heads of one key-value head, for a row and a split.
    """

    maxima: Tensor
    """[lines, group_size]."""
    totals: Tensor
    """[lines, group_size]."""
    outputs: Tensor
    """[lines, group_size, head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BandAttention:
    """The inputs that a call's bands share."""

    query: Tensor
    """float32, scaled."""
    caches: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    """(k, scales), (v, scales)."""
    softcap: float | None
    multiply: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, band: Band, parts: _Parts, begin: int) -> int:
        """Fill the lines of a band, from `begin` on; returns where they end."""
        _, num_query_heads, head_dim = self.query.shape
        num_kv_heads, num_pairs = self.caches[0][0].shape[2], band.mask.shape[0]
        group_size = num_query_heads // num_kv_heads
        height = band.rows_per_tile * group_size
        packed = (
            self.query.index_select(0, band.tile_rows)
            .view(-1, band.rows_per_tile, num_kv_heads, group_size, head_dim)
            .transpose(1, 2)
            .reshape(-1, height, head_dim)
        )  # [tiles * num_kv_heads, height, head_dim]
        batch = _batch_products(height, num_kv_heads)
        for start in range(0, num_pairs * num_kv_heads, batch):
            end = min(start + batch, num_pairs * num_kv_heads)
            keys = band.pair_keys[start * SPLIT_KEYS : end * SPLIT_KEYS]
            tiles = packed.index_select(0, band.pair_tiles[start:end])
            key = _gather(*self.caches[0], keys)  # [end - start, SPLIT_KEYS, head_dim]
            scores = self.multiply(tiles, key.transpose(1, 2))  # [..., height, SPLIT_KEYS]
            if self.softcap is not None:
                scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
            mask = band.mask[start // num_kv_heads : end // num_kv_heads]
            scores.view(len(mask), num_kv_heads, band.rows_per_tile, group_size, SPLIT_KEYS).add_(
                mask[:, None, :, None]
            )
            highest = scores.amax(-1, keepdim=True).clamp_(min=LEAST_SCORE)
            weights = scores.sub_(highest).exp_()
            attended = self.multiply(weights, _gather(*self.caches[1], keys))
            lines = slice(begin + start * band.rows_per_tile, begin + end * band.rows_per_tile)
            parts.maxima[lines] = highest.view(-1, group_size)
            parts.totals[lines] = weights.sum(-1).view(-1, group_size)
            parts.outputs[lines] = attended.view(-1, group_size, head_dim)
        return begin + num_pairs * num_kv_heads * band.rows_per_tile


def _batch_products(height: int, num_kv_heads: int) -> int:
    """Count how many products run at once: whole pairs, a multiple of `BATCH_MULTIPLE` of them."""
    unit = BATCH_MULTIPLE * num_kv_heads
    return max(BATCH_LINES // height // unit, 1) * unit


def _gather(cache: Tensor, scales: Tensor | None, keys: Tensor) -> Tensor:
    """Float32 [products, SPLIT_KEYS, head_dim] of the cache's rows."""
    head_dim = cache.shape[-1]
    flat = cache.reshape(-1, head_dim)
    if scales is None:
        values = flat.index_select(0, keys).float()
    else:
        octets = flat.view(torch.uint8).index_select(0, keys)
        values = octets.view(cache.dtype).float() * scales.reshape(-1, 1).index_select(0, keys)
    return values.view(-1, SPLIT_KEYS, head_dim)


def _merge(
    plan: OrderedPlan, parts: _Parts, num_rows: int, num_query_heads: int, sinks: Tensor | None
) -> Tensor:
    """[n, num_query_heads, head_dim] of the splits' partial results, and of the sinks."""

    def chosen(values: Tensor, width: int) -> Tensor:
        rows = values.view(values.shape[0], -1).index_select(0, plan.row_parts)
        return rows.view(num_rows, -1, num_query_heads, width)

    highest = chosen(parts.maxima, 1)  # [n, parts, num_query_heads, 1]
    top = highest.amax(1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks[:, None])
    factors = (highest - top).exp_().mul_(plan.is_part[..., None])
    total = _fold(chosen(parts.totals, 1).mul_(factors))
    if sinks is not None:
        total.add_((sinks[:, None] - top).exp_().squeeze(1))
    outputs = chosen(parts.outputs, parts.outputs.shape[-1])
    return _fold(outputs.mul_(factors)).div_(total)


def _fold(values: Tensor) -> Tensor:
    """Sums over dimension 1, neighbours first: zeros at the end change nothing."""
    while values.shape[1] > 1:
        even = values.shape[1] // 2 * 2
        paired = values[:, 0:even:2] + values[:, 1:even:2]
        if even < values.shape[1]:
            paired = torch.cat((paired, values[:, even:]), 1)
        values = paired
    return values.squeeze(1)


def multiply_in_order(left: Tensor, right: Tensor) -> Tensor:
    """A batch of matrix products in additions whose order is ours: right everywhere, and slow.

    `left`: [batch, height, inner]; `right`: [batch, inner, width] -> [batch, height, width].
    """
    terms = left.unsqueeze(-1) * right.unsqueeze(1)  # [batch, height, inner, width]
    return _fold(terms.transpose(1, 2).contiguous())


@functools.cache
def library_heights(
    group_size: int, head_dim: int, num_threads: int, device: torch.device
) -> tuple[int, ...]:
    """The `TILE_HEIGHTS` whose library products give a row the same bits as the first one's.

    Empty if not even those keep a row's bits wherever it stands. `num_threads`: how many torch uses
    now; it may decide how a product is shared.
    """
    generator = torch.Generator().manual_seed(0)
    heights = [-(-height // group_size) * group_size for height in TILE_HEIGHTS]
    rows = torch.randn((heights[-1], head_dim), generator=generator).to(device)
    weights = torch.rand((heights[-1], SPLIT_KEYS), generator=generator).to(device)
    keys = torch.randn((28, SPLIT_KEYS, head_dim), generator=generator).to(device)
    trials = ((rows, keys.transpose(1, 2)), (weights, keys))
    expected = [_run_tiles(left, right, heights[0]) for left, right in trials]
    equal = []
    for height, full_height in zip(TILE_HEIGHTS, heights, strict=True):
        unit = _batch_products(full_height, 1)
        sizes = (BATCH_MULTIPLE, 2 * BATCH_MULTIPLE, 28, unit)
        if all(
            _keeps_bits(left, right, right_bits, full_height, sizes)
            for (left, right), right_bits in zip(trials, expected, strict=True)
        ):
            equal.append(height)
    return tuple(equal) if TILE_HEIGHTS[0] in equal else ()


def _run_tiles(left: Tensor, right: Tensor, height: int) -> Tensor:
    """[batch, rows, width]: every row of left with every matrix of right, in tiles of a height."""
    batch = right.shape[0]
    padding = left[:1].repeat(-len(left) % height, 1)
    tiles = torch.cat((left, padding)).view(-1, height, left.shape[1])
    products = [torch.bmm(tile.repeat(batch, 1, 1), right) for tile in tiles]
    return torch.cat(products, 1)[:, : len(left)]


def _keeps_bits(
    left: Tensor, right: Tensor, expected: Tensor, height: int, sizes: tuple[int, ...]
) -> bool:
    """True if rows keep their bits in batches of these sizes, at other places, among others."""
    flipped = _run_tiles(left.flip(0), right.flip(0), height).flip(0, 1)
    single = torch.bmm(left[:1].expand(height, -1).repeat(right.shape[0], 1, 1), right)
    return (
        torch.equal(flipped, expected)
        and torch.equal(single, expected[:, :1].expand_as(single))
        and all(
            torch.equal(
                _run_tiles(left, _cycle(right, size), height)[: len(right)], expected[:size]
            )
            for size in sizes
        )
    )


def _cycle(matrices: Tensor, size: int) -> Tensor:
    """Repeat matrices cyclically up to `size`; the strides inside each stay the same."""
    places = torch.arange(size, device=matrices.device) % len(matrices)
    if matrices.is_contiguous():
        return matrices.index_select(0, places)
    return matrices.transpose(1, 2).index_select(0, places).transpose(1, 2)
