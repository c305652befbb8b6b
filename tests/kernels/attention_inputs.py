"""Inputs of attention in tiles, and what must come out."""

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.attention.attend_tiles import attend_tiles
from outrider.kernels.attention.attention_plan import AttentionBatch
from outrider.kernels.attention.attention_rows import plan_tiles
from outrider.kernels.attention.attention_tiles import TilePlan, TileShape
from tests.kernels.attention.naive import naive_attention

FP8 = torch.float8_e4m3fn
# Fewer and larger steps, for the interpreter's sake.
WIDE = {"block_m": 64, "rows_per_tile": 32}


def small_shape(group_size: int, *, deterministic: bool = False, **changes: int) -> TileShape:
    """Tiles and splits so small that little input makes many of them."""
    shape = TileShape(
        rows_per_tile=16 // group_size,
        block_m=16,
        block_n=16,
        split_size=32,
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=2,
        is_deterministic=deterministic,
    )
    return dataclasses.replace(shape, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Queries and caches; slots that no sequence has hold NaN."""

    query: Tensor
    caches: tuple[Tensor, Tensor]
    scales: tuple[Tensor | None, Tensor | None]
    exact: tuple[Tensor, Tensor]  # what the caches mean, in float64


def make_inputs(  # noqa: PLR0913 - what attention is of
    batch: AttentionBatch,
    device: torch.device,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    is_scaled: bool = False,
    seed: int = 0,
) -> Inputs:
    """Random numbers; heads: query and key-value. `num_blocks`: the batch's own by default."""
    if num_blocks is None:
        num_blocks = 1 + max((block for table in batch.block_tables for block in table), default=0)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_blocks, block_size, heads[1], head_dim)
    numbers = torch.randn(shape, generator=generator) * 2
    is_used = torch.zeros(num_blocks * block_size, dtype=torch.bool)
    for table, kv_len in zip(batch.block_tables, batch.kv_lens, strict=True):
        slots = torch.tensor(table, dtype=torch.long)[:, None] * block_size
        is_used[(slots + torch.arange(block_size)).flatten()[:kv_len]] = True
    numbers.view(2, -1, *shape[3:])[:, ~is_used] = float("nan")
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if is_scaled:
        scale = torch.rand(shape[:-1], generator=generator) * 0.05 + 0.001
        cache = (numbers / scale[..., None]).clamp(-448, 448).to(FP8)
        exact = cache.double() * scale[..., None].double()
        scales = (scale[0].to(device), scale[1].to(device))
    else:
        cache = numbers.to(dtype)
        exact = cache.double()
    qkv = torch.randn(
        batch.query_indptr[-1], heads[0] + 2 * heads[1], head_dim, generator=generator
    )
    cache = cache.to(device)
    return Inputs(
        query=qkv.to(dtype).to(device)[:, : heads[0]],  # as the engine slices it
        caches=(cache[0], cache[1]),
        scales=scales,
        exact=(exact[0], exact[1]),
    )


def make_sinks(num_query_heads: int) -> Tensor:
    """Scores of keys without values: far below the others, among them, and far above."""
    return torch.linspace(-30.0, 30.0, num_query_heads).roll(1)


def attend(  # noqa: PLR0913 - as `paged_attention`
    batch: AttentionBatch,
    inputs: Inputs,
    *,
    shape: TileShape | None = None,
    window: int | None = None,
    deterministic: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float = 0.3,
) -> Tensor:
    plan = tile_plan(batch, inputs, sliding_window=window, deterministic=deterministic, shape=shape)
    plan.prepare()
    return attend_tiles(
        inputs.query,
        *inputs.caches,
        plan,
        scale=scale,
        k_scale=inputs.scales[0],
        v_scale=inputs.scales[1],
        softcap=softcap,
        sinks=sinks,
    )


def tile_plan(batch: AttentionBatch, inputs: Inputs, **options: Any) -> TilePlan:
    """The plan of a pass over these inputs; options: of `plan_tiles`."""
    num_kv_heads, head_dim = inputs.caches[0].shape[2:]
    return plan_tiles(
        batch,
        num_query_heads=inputs.query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=inputs.query.dtype,
        device=inputs.query.device,
        **options,
    )


TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def check(result: Tensor, inputs: Inputs, batch: AttentionBatch, **options: Any) -> None:
    expected = naive_attention(
        inputs.query.cpu().double(), *inputs.exact, batch, **{"scale": 0.3, **options}
    )
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def random_tree(num_nodes: int, seed: int, reach: int = 12) -> list[int]:
    """Ancestor masks of a tree whose nodes have a parent among the `reach` before them."""
    random_numbers = random.Random(seed)
    masks = [1]
    for node in range(1, num_nodes):
        parent = random_numbers.randrange(max(0, node - reach), node)
        masks.append(masks[parent] | 1 << node)
    return masks


def one_sequence(
    kv_len: int, num_rows: int, masks: list[int] | None = None, *, table: list[int]
) -> AttentionBatch:
    tree_start = kv_len if masks is None else kv_len - len(masks)
    return AttentionBatch(
        query_indptr=[0, num_rows],
        kv_lens=[kv_len],
        block_tables=[table],
        tree_starts=[tree_start],
        ancestor_masks=[masks if masks is None else masks[len(masks) - num_rows :]],
    )
