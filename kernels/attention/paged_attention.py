"""Attention over a paged cache, for causal rows and token trees in one batch.

A step's plan is made once (`plan_attention`), then every layer runs it. What runs depends on the
plan: on CUDA the Triton kernels of attend_tiles.py; on the CPU, in bfloat16 and where it was built,
compiled attention (kernels/cpu/row_attention.py), in either mode; else torch's kernels
(attention_spans.py) or, in deterministic mode, ordered_attention.py.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.kernels.attention.attend_tiles import attend_tiles
from outrider.kernels.attention.attention_plan import AttentionBatch, AttentionPlan, plan_spans
from outrider.kernels.attention.attention_rows import plan_tiles
from outrider.kernels.attention.attention_spans import attend_spans
from outrider.kernels.attention.attention_tiles import TilePlan
from outrider.kernels.attention.ordered_attention import OrderedPlan, attend_in_order, plan_in_order
from outrider.kernels.attention.row_plan import MadeOnce, RowPlan, plan_row_keys
from outrider.kernels.cpu.panel_linear import prefers_onednn
from outrider.kernels.cpu.row_attention import attend_rows, can_attend_rows
from outrider.kernels.triton_support import is_automatic, uses_triton

__all__ = [
    "AttentionBatch",
    "AttentionPlan",
    "OrderedPlan",
    "Plan",
    "RowPlan",
    "TilePlan",
    "paged_attention",
    "plan_attention",
]

Plan = AttentionPlan | TilePlan | OrderedPlan | RowPlan


def plan_attention(  # noqa: PLR0913 - a step's plan depends on the model's shape
    batch: AttentionBatch,
    *,
    block_size: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int | None = None,
    sliding_window: int | None = None,
    has_full_layers: bool = False,
    deterministic: bool = False,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Plan:
    """Locate keys, decide what is computed together, and cut it into pieces of work.

    `sliding_window`: a key is hidden from rows `sliding_window` or more positions after it; a
    tree node's position is tree_start + depth, its depth the number of its ancestors in the
    mask. `has_full_layers`: the model also has layers without the window, so plan both.
    `deterministic`: a row's result is the same bits whatever else is in the batch. `head_dim` is
    needed for it and for Triton's kernels. Raises ValueError for trees of more than 256 nodes
    and batches of more than 1024 sequences there.
    """
    device = torch.device(device)
    if head_dim is None and (deterministic or uses_triton(device)):
        raise ValueError("plan_attention needs head_dim here")
    if head_dim is not None and uses_triton(device):
        tiles = plan_tiles(
            batch,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            sliding_window=sliding_window,
            has_full_layers=has_full_layers,
            deterministic=deterministic,
            dtype=dtype,
            device=device,
        )
        tiles.prepare()
        return tiles
    kind: Callable[..., AttentionPlan | OrderedPlan] = plan_spans
    if deterministic:
        assert head_dim is not None
        kind = functools.partial(plan_in_order, head_dim=head_dim)
    plan = functools.partial(
        kind,
        batch,
        block_size=block_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        device=device,
    )
    if head_dim is not None and plans_rows(
        deterministic=deterministic, dtype=dtype, head_dim=head_dim, device=device
    ):
        return _plan_rows(
            batch, block_size, sliding_window, has_full_layers=has_full_layers, plan=plan
        )
    return plan(sliding_window=sliding_window, has_full_layers=has_full_layers)


def plans_rows(
    *, deterministic: bool, dtype: torch.dtype, head_dim: int, device: torch.device
) -> bool:
    """True if `plan_attention` makes the plan of compiled attention, a `RowPlan`."""
    may_use_rows = is_automatic() and (deterministic or not prefers_onednn())
    return may_use_rows and can_attend_rows(dtype, head_dim, device)


def _plan_rows(
    batch: AttentionBatch,
    block_size: int,
    window: int | None,
    *,
    has_full_layers: bool,
    plan: Callable[..., AttentionPlan | OrderedPlan],
) -> RowPlan:
    """`plan`: makes the plan for a cache that compiled attention does not read."""
    full = None
    if window is not None and has_full_layers:
        full = _plan_rows(batch, block_size, None, has_full_layers=False, plan=plan)
    return RowPlan(
        keys=plan_row_keys(
            batch if window is None else batch.of_window(), block_size=block_size, window=window
        ),
        for_other_caches=MadeOnce(functools.partial(plan, sliding_window=window)),
        full=full,
    )


def paged_attention(  # noqa: PLR0913 - a cache with scales is two tensors more
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each query row over the keys that the plan shows it.

    `query`: [n, num_query_heads, head_dim]; `k_cache`, `v_cache`: [num_blocks, block_size,
    num_kv_heads, head_dim], this step's rows already written, all numbers finite. Query head h
    reads key-value head h // (num_query_heads / num_kv_heads). Scores are query * key * scale,
    and with `softcap` softcap * tanh(score / softcap). A cache of float8_e4m3fn holds numbers to
    be multiplied by k_scale, v_scale: float32 [num_blocks, block_size, num_kv_heads]. `sinks`:
    float32 [num_query_heads], the score of one more key that has no value (Xiao et al., 2023).
    Returns [n, num_query_heads, head_dim]; rows of no sequence are left unwritten.
    """
    if isinstance(plan, RowPlan):
        if k_scale is None and k_cache.dtype == query.dtype:
            return attend_rows(
                query, k_cache, v_cache, plan.keys, scale=scale, softcap=softcap, sinks=sinks
            )
        plan = plan.for_other_caches()
    if isinstance(plan, AttentionPlan):
        return attend_spans(
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
    if isinstance(plan, TilePlan):
        return attend_tiles(
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
    return attend_in_order(
        query,
        k_cache,
        v_cache,
        plan,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
