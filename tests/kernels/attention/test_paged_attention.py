import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.attention import attention_plan
from outrider.kernels.attention.attention_plan import PRODUCTS_MIN_TILE_ROWS
from outrider.kernels.attention.paged_attention import (
    AttentionBatch,
    paged_attention,
    plan_attention,
)
from tests.kernels.attention.naive import batches, naive_attention
from tests.kernels.attention_inputs import make_sinks


@given(
    drawn=batches(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 4), (6, 2)]),
    head_dim=st.sampled_from([4, 16]),
    window=st.sampled_from([None, None, 1, 3, 17]),
    seed=st.integers(0, 1 << 30),
)
def test_equals_the_definition(
    drawn: tuple[AttentionBatch, int, int],
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    seed: int,
) -> None:
    batch, block_size, num_blocks = drawn
    num_query_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, generator=generator)
    query = torch.randn(batch.query_indptr[-1], num_query_heads, head_dim, generator=generator)
    plan = plan_attention(
        batch,
        block_size=block_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        sliding_window=window,
        has_full_layers=True,
        dtype=torch.float32,
        device="cpu",
    )
    result = paged_attention(query, caches[0], caches[1], plan, scale=0.7)
    expected = naive_attention(query, caches[0], caches[1], batch, scale=0.7, window=window)
    assert result.shape == query.shape
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)
    if window is None:
        assert plan.full is None
    else:
        assert plan.full is not None
        result = paged_attention(query, caches[0], caches[1], plan.full, scale=0.7)
        expected = naive_attention(query, caches[0], caches[1], batch, scale=0.7, window=None)
        torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("num_rows", "prefix"), [(1, 30), (7, 30), (50, 0), (50, 30), (80, 30)])
def test_half_precision(
    dtype: torch.dtype, is_tree: bool, num_rows: int, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the flash kernel and, from PRODUCTS_MIN_TILE_ROWS on, with plain products."""
    torch.manual_seed(0)
    kv_len = prefix + num_rows
    masks = [1]
    for node in range(1, num_rows):
        masks.append(masks[(node - 1) // 2] | 1 << node)
    batch = AttentionBatch(
        query_indptr=[0, num_rows],
        kv_lens=[kv_len],
        block_tables=[list(range(10))],
        tree_starts=[prefix if is_tree else kv_len],
        ancestor_masks=[masks if is_tree else None],
    )
    caches = torch.randn(2, 10, 16, 2, 32).to(dtype)
    query = torch.randn(num_rows, 4, 32).to(dtype)
    expected = naive_attention(
        query, caches[0], caches[1], batch, scale=1 / math.sqrt(32), window=None
    )
    for has_products in (False, True):
        monkeypatch.setattr(
            attention_plan, "has_fast_bfloat16_products", lambda value=has_products: value
        )
        plan = plan_attention(
            batch, block_size=16, num_query_heads=4, num_kv_heads=2, dtype=dtype, device="cpu"
        )
        assert plan.spans[0].has_scores == (
            has_products and dtype == torch.bfloat16 and 2 * num_rows >= PRODUCTS_MIN_TILE_ROWS
        )
        result = paged_attention(query, caches[0], caches[1], plan, scale=1 / math.sqrt(32))
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_sequences_of_about_the_same_size_are_padded_into_one_batch(is_shuffled: bool) -> None:
    torch.manual_seed(0)
    num_rows, kv_lens = [6, 5, 70, 6, 1, 1], [40, 38, 90, 37, 25, 31]
    blocks = torch.randperm(160).tolist() if is_shuffled else list(range(160))
    masks: list[list[int] | None] = [None] * 6
    masks[1] = [1, 3, 5, 11, 19]  # a tree; the others are causal
    tree_starts = list(kv_lens)
    tree_starts[1] = 33
    batch = AttentionBatch(
        query_indptr=[0, *itertools.accumulate(num_rows)],
        kv_lens=kv_lens,
        block_tables=[blocks[25 * index : 25 * index + 25] for index in range(6)],
        tree_starts=tree_starts,
        ancestor_masks=masks,
    )
    caches = torch.randn(2, 160, 4, 2, 8)
    query = torch.randn(sum(num_rows), 6, 8)
    plan = plan_attention(
        batch,
        block_size=4,
        num_query_heads=6,
        num_kv_heads=2,
        dtype=torch.float32,
        device="cpu",
    )
    assert [group.batch_size for group in plan.groups] == [2, 3]
    assert len(plan.spans) == 1
    result = paged_attention(query, caches[0], caches[1], plan, scale=0.5)
    expected = naive_attention(query, caches[0], caches[1], batch, scale=0.5, window=None)
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


def test_consecutive_blocks_are_not_gathered() -> None:
    """A sequence whose blocks follow each other is read in place: no copy of its keys."""
    plan = plan_attention(
        AttentionBatch(
            query_indptr=[0, 1],
            kv_lens=[40],
            block_tables=[[5, 6, 7]],
            tree_starts=[40],
            ancestor_masks=[None],
        ),
        block_size=16,
        num_query_heads=4,
        num_kv_heads=2,
        dtype=torch.float32,
        device="cpu",
    )
    assert plan.spans[0].slots == range(80, 120)
    assert plan.spans[0].mask is None


@given(
    drawn=batches(),
    heads=st.sampled_from([(2, 1), (6, 2)]),
    window=st.sampled_from([None, 3]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    is_scaled=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_softcap_sinks_and_a_float8_cache(
    drawn: tuple[AttentionBatch, int, int],
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    is_scaled: bool,
    seed: int,
) -> None:
    batch, block_size, num_blocks = drawn
    num_query_heads, num_kv_heads = heads
    sinks = make_sinks(num_query_heads) if has_sinks else None
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2, num_blocks, block_size, num_kv_heads, 16, generator=generator)
    scales = torch.rand(2, num_blocks, block_size, num_kv_heads, generator=generator) + 0.01
    caches = numbers
    if is_scaled:
        caches = (numbers / scales[..., None]).to(torch.float8_e4m3fn)
    query = torch.randn(batch.query_indptr[-1], num_query_heads, 16, generator=generator)
    plan = plan_attention(
        batch,
        block_size=block_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        sliding_window=window,
        dtype=torch.float32,
        device="cpu",
    )
    result = paged_attention(
        query,
        caches[0],
        caches[1],
        plan,
        scale=0.7,
        k_scale=scales[0] if is_scaled else None,
        v_scale=scales[1] if is_scaled else None,
        softcap=softcap,
        sinks=sinks,
    )
    exact = caches.double() * scales[..., None] if is_scaled else caches.double()
    expected = naive_attention(
        query, exact[0], exact[1], batch, scale=0.7, window=window, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)
