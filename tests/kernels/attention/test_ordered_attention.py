"""Attention in the order of positions: right, and the same bits in any company."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.attention import ordered_attention as module
from outrider.kernels.attention.attention_plan import AttentionBatch
from outrider.kernels.attention.ordered_attention import (
    attend_in_order,
    library_heights,
    multiply_in_order,
    plan_in_order,
)
from outrider.kernels.attention.ordered_plan import SPLIT_KEYS, TILE_HEIGHTS
from tests.kernels.attention.companies import (
    alone,
    assert_no_neighbour_is_read,
    assert_rows_as_alone,
    chain,
    company,
)
from tests.kernels.attention.naive import batches, naive_attention
from tests.kernels.layers.bits import same_bits, torch_threads

HEADS = [(1, 1), (2, 1), (6, 2), (16, 2), (9, 9)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with torch_threads(request.param):
        yield request.param


def attend(
    batch: AttentionBatch,
    query: Tensor,
    caches: Tensor,
    *,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    _, block_size, num_kv_heads, head_dim = caches[0].shape
    plan = plan_in_order(
        batch,
        block_size=block_size,
        num_query_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_window=window,
        dtype=query.dtype,
        device="cpu",
    )
    return attend_in_order(query, caches[0], caches[1], plan, **{"scale": 0.7, **options})


@settings(max_examples=30)
@given(
    drawn=batches(),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([4, 16, 40]),
    window=st.sampled_from([None, None, 1, 3, 17, 40]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 30),
)
def test_equals_the_definition(
    drawn: tuple[AttentionBatch, int, int],
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    batch, block_size, num_blocks = drawn
    generator = torch.Generator().manual_seed(seed)
    k_cache, v_cache = torch.randn(
        2, num_blocks, block_size, heads[1], head_dim, generator=generator
    ).to(dtype)
    query = torch.randn(batch.query_indptr[-1], heads[0], head_dim, generator=generator).to(dtype)
    result = attend(batch, query, torch.stack((k_cache, v_cache)), window=window)
    expected = naive_attention(query, k_cache, v_cache, batch, scale=0.7, window=window)
    assert result.shape == query.shape
    assert result.dtype == dtype
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), expected, atol=limit, rtol=limit)


def test_layers_with_and_without_a_window() -> None:
    caches = torch.randn(2, 50, 1, 2, 8)
    query, batch = torch.randn(3, 4, 8), chain(50, 3, list(range(50)))
    plan = plan_in_order(
        batch,
        block_size=1,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        sliding_window=9,
        has_full_layers=True,
        dtype=torch.float32,
        device="cpu",
    )
    assert plan.full is not None
    for part, window in ((plan, 9), (plan.full, None)):
        result = attend_in_order(query, caches[0], caches[1], part, scale=0.7)
        expected = naive_attention(query, caches[0], caches[1], batch, scale=0.7, window=window)
        torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


def test_a_window_far_into_a_context_is_planned_as_a_short_one() -> None:
    plan = plan_in_order(
        chain(3000, 3, list(range(3000))),
        block_size=1,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=8,
        sliding_window=SPLIT_KEYS,
        dtype=torch.float32,
        device="cpu",
    )
    assert plan.is_part.shape[1] == 2
    assert sum(len(band.mask) for band in plan.bands) == 4  # two pairs, and padding


@pytest.mark.slow_cases
@pytest.mark.parametrize("window", [None, 1, 20, 50])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [((4, 2), torch.bfloat16), ((8, 1), torch.float32), ((3, 3), torch.float32)],
)
def test_a_row_has_the_bits_of_its_path_alone(
    threads: int, window: int | None, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    batch = company(threads)
    caches = torch.randn(2, 900, 1, heads[1], 32).to(dtype)
    query = torch.randn(batch.query_indptr[-1], heads[0], 32).to(dtype)
    assert_rows_as_alone(
        partial(attend, window=window),
        batch,
        query,
        caches,
        every=3 if threads == 1 else 7,
        threads=threads,
    )


def test_neighbours_do_not_reach_a_row_even_when_infinite() -> None:
    query = torch.randn(company(0).query_indptr[-1], 4, 16)
    assert_no_neighbour_is_read(attend, query, torch.randn(2, 900, 1, 2, 16))


def test_every_row_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = company(0)
    caches, query = torch.randn(2, 900, 1, 2, 16), torch.randn(batch.query_indptr[-1], 4, 16)
    clean = attend(batch, query, caches)
    monkeypatch.setattr(
        module.torch, "empty", lambda *size, **options: torch.full(*size, float("nan"), **options)
    )
    assert same_bits(attend(batch, query, caches), clean)


def test_soft_cap() -> None:
    caches, query = torch.randn(2, 50, 1, 2, 16), 3 * torch.randn(4, 4, 16)
    batch = chain(50, 4, list(range(50)))
    result = attend(batch, query, caches, softcap=2.0)
    expected = naive_attention(query, *caches, batch, scale=0.7, window=None, softcap=2.0)
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)


def test_fp8_cache() -> None:
    """As with a cache that holds the products of values and scales."""
    caches = torch.randn(2, 20, 4, 2, 16).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 20, 4, 2) + 0.5
    query, batch = torch.randn(4, 4, 16), chain(70, 4, list(range(20)))
    result = attend(batch, query, caches, k_scale=scales[0], v_scale=scales[1])
    plain = caches.float() * scales[..., None]
    assert same_bits(result, attend(batch, query, plain))


def test_the_slow_product_is_a_product_and_keeps_bits() -> None:
    left, right = torch.randn(5, 9, 37), torch.randn(5, 37, 6)
    result = multiply_in_order(left, right)
    torch.testing.assert_close(result, torch.bmm(left, right), atol=1e-5, rtol=1e-4)
    assert same_bits(multiply_in_order(left[1:3, 4:5], right[1:3]), result[1:3, 4:5])


def fickle_products(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    """Library products whose bits change with the place in tiles of a height."""
    library = torch.bmm

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        places = torch.arange(left.shape[1])[:, None] * (left.shape[1] == height)
        return library(left, right) * (1 + 1e-5 * places)

    monkeypatch.setattr(module.torch, "bmm", bmm)
    library_heights.cache_clear()


@pytest.mark.parametrize("bad", TILE_HEIGHTS)
def test_heights_that_change_bits_are_not_used(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    usable = library_heights(2, 16, torch.get_num_threads(), device)
    assert TILE_HEIGHTS[0] in usable
    with monkeypatch.context() as patch:
        fickle_products(patch, bad)
        heights = library_heights(2, 16, torch.get_num_threads(), device)
        assert heights == (() if bad == TILE_HEIGHTS[0] else tuple(h for h in usable if h != bad))
        batch = company(0)
        caches, query = torch.randn(2, 900, 1, 2, 16), torch.randn(batch.query_indptr[-1], 4, 16)
        together = attend(batch, query, caches)
        start = batch.query_indptr[2]
        for row in (0, 1, 7, 30, 63):
            expected = alone(attend, batch, 2, row, query, caches)
            assert same_bits(together[start + row : start + row + 1], expected)
    library_heights.cache_clear()


def test_exponentials_keep_their_bits(threads: int) -> None:
    """What is not a product or a sum: torch's exp and tanh treat a leftover as they do the rest."""
    values = torch.randn(1 << 16) * 10
    for function in (torch.exp, torch.tanh):
        whole = function(values)
        for start, count in ((0, 1), (5, 3), (77, 19), (1000, 40001)):
            assert same_bits(function(values[start : start + count].clone()), whole[start:][:count])


@pytest.mark.parametrize("scale", [-30.0, 0.5, 30.0])
def test_sinks_join_the_total_and_keep_bits(scale: float) -> None:
    caches, query = torch.randn(2, 50, 1, 2, 16), 3 * torch.randn(4, 4, 16)
    sinks = scale * torch.tensor([1.0, -1.0, 0.5, 2.0])
    batch = chain(50, 4, list(range(50)))
    result = attend(batch, query, caches, sinks=sinks)
    expected = naive_attention(query, *caches, batch, scale=0.7, window=None, sinks=sinks)
    torch.testing.assert_close(result.double(), expected, atol=2e-5, rtol=1e-4)
    last = attend(chain(50, 1, list(range(50))), query[3:], caches, sinks=sinks)
    assert same_bits(last[0], result[3])
