"""Attention straight from its definition, and batches to compare it on."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.attention.attention_plan import PACKED_MAX_ROWS
from outrider.kernels.attention.paged_attention import AttentionBatch


def naive_attention(  # noqa: PLR0913 - as `paged_attention`
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, one row at a time, in float64."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    group_size = query.shape[1] // num_kv_heads
    result = torch.zeros_like(query, dtype=torch.float64)
    for b, table in enumerate(batch.block_tables):
        start, end = batch.query_indptr[b], batch.query_indptr[b + 1]
        kv_len, tree_start, masks = batch.kv_lens[b], batch.tree_starts[b], batch.ancestor_masks[b]
        for i in range(end - start):
            if masks is None:
                visible = {s: s for s in range(kv_len - (end - start) + i + 1)}
            else:
                visible = {s: s for s in range(tree_start)}
                ancestors = [j for j in range(kv_len - tree_start) if masks[i] >> j & 1]
                for depth, j in enumerate(ancestors):
                    visible[tree_start + j] = tree_start + depth
            position = max(visible.values())
            if window is not None:
                visible = {s: p for s, p in visible.items() if position - p < window}
            slots = [table[s // block_size] * block_size + s % block_size for s in visible]
            keys, values = (
                cache.flatten(0, 1)[slots].double().repeat_interleave(group_size, 1)
                for cache in (k_cache, v_cache)
            )  # [keys, num_query_heads, head_dim] each
            scores = torch.einsum("hd,khd->hk", query[start + i].double(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), -1)
            weights = scores.softmax(-1)[:, : len(slots)]
            result[start + i] = torch.einsum("hk,khd->hd", weights, values)
    return result


@st.composite
def batches(draw: st.DrawFn, max_sequences: int = 5) -> tuple[AttentionBatch, int, int]:
    """(batch, block_size, num_blocks): causal and tree sequences over scattered blocks."""
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    indptr, kv_lens, tree_starts, masks = [0], [], [], []
    for _ in range(draw(st.integers(0, max_sequences))):
        num_rows = draw(st.sampled_from([0, 1, 1, 2, 5, 13, PACKED_MAX_ROWS + 3]))
        prefix = draw(st.integers(0, 40))
        if num_rows and num_rows < 20 and draw(st.booleans()):
            num_old = draw(st.integers(0, 4))  # tree nodes of earlier passes
            num_nodes = num_old + num_rows
            node_masks: list[int] = []
            for node in range(num_nodes):
                parent = draw(st.integers(0, node - 1)) if node else None
                above = node_masks[parent] if parent is not None else 0
                node_masks.append(above | 1 << node)
            masks.append(node_masks[num_old:])
            kv_lens.append(prefix + num_nodes)
            tree_starts.append(prefix)
        else:
            masks.append(None)
            kv_lens.append(prefix + num_rows)
            tree_starts.append(prefix + num_rows)
        indptr.append(indptr[-1] + num_rows)
    needed = [-(-length // block_size) for length in kv_lens]
    num_blocks = sum(needed) + 3
    blocks = list(range(num_blocks))
    if draw(st.booleans()):
        blocks = draw(st.permutations(blocks))
    tables = []
    for count in needed:
        tables.append(blocks[:count])
        blocks = blocks[count:]
    batch = AttentionBatch(
        query_indptr=indptr,
        kv_lens=kv_lens,
        block_tables=tables,
        tree_starts=tree_starts,
        ancestor_masks=masks,
    )
    return batch, block_size, num_blocks
