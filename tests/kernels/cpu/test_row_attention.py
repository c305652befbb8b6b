"""Compiled attention against its definition, and the bits of a row in any company."""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.attention.attention_plan import AttentionBatch
from outrider.kernels.attention.paged_attention import RowPlan, paged_attention, plan_attention
from outrider.kernels.attention.row_plan import plan_row_keys
from outrider.kernels.cpu.product_library import InstructionSet, product_support
from outrider.kernels.cpu.row_attention import attend_rows
from outrider.kernels.triton_support import use_kernels
from tests.kernels.attention.companies import (
    assert_no_neighbour_is_read,
    assert_rows_as_alone,
    chain,
    company,
)
from tests.kernels.attention.naive import batches, naive_attention
from tests.kernels.cpu.instruction_sets import each_instruction_set
from tests.kernels.layers.bits import same_bits, torch_threads

HEADS = [(1, 1), (2, 1), (6, 2), (16, 1), (9, 9)]

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"products: {product_support().detail}"
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def attend(
    batch: AttentionBatch,
    query: Tensor,
    caches: Tensor,
    *,
    instruction_set: InstructionSet | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """caches: [2, num_blocks, block_size, num_kv_heads, head_dim]."""
    return attend_rows(
        query,
        caches[0],
        caches[1],
        plan_row_keys(batch, block_size=caches.shape[2], window=window),
        scale=0.7,
        softcap=softcap,
        sinks=sinks,
        instruction_set=instruction_set,
    )


@each_instruction_set
@settings(max_examples=40)
@given(
    drawn=batches(),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([16, 64, 80]),
    window=st.sampled_from([None, None, 1, 3, 17, 40]),
    softcap=st.sampled_from([None, None, 2.0, 50.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_equals_the_definition(  # noqa: PLR0913 - a draw each
    instruction_set: InstructionSet,
    drawn: tuple[AttentionBatch, int, int],
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    batch, block_size, num_blocks = drawn
    caches = random(2, num_blocks, block_size, heads[1], head_dim, seed=seed)
    query = random(batch.query_indptr[-1], heads[0], head_dim, seed=seed + 1)
    sinks = 3 * torch.randn(heads[0]) if has_sinks else None
    result = attend(
        batch,
        query,
        caches,
        instruction_set=instruction_set,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    expected = naive_attention(
        query, caches[0], caches[1], batch, scale=0.7, window=window, softcap=softcap, sinks=sinks
    )
    # Nothing but the result is rounded to bfloat16.
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=2**-8 * 1.01)


@each_instruction_set
def test_a_long_context_loses_no_digits(instruction_set: InstructionSet) -> None:
    batch, caches = chain(4000, 2, list(range(4000))), random(2, 4000, 1, 2, 64)
    query = 3 * random(2, 8, 64, seed=1)  # scores of some 30: few keys have all the weight
    result = attend(batch, query, caches, instruction_set=instruction_set)
    expected = naive_attention(query, caches[0], caches[1], batch, scale=0.7, window=None)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=2**-8 * 1.02)


@pytest.mark.slow_cases
@pytest.mark.parametrize("window", [None, 1, 20, 50])
@pytest.mark.parametrize("heads", [(4, 2), (16, 1), (3, 3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_bits_of_its_path_alone(
    threads: int, window: int | None, heads: tuple[int, int]
) -> None:
    batch = company(threads)
    caches = random(2, 900, 1, heads[1], 32)
    query = random(batch.query_indptr[-1], heads[0], 32, seed=1)
    assert_rows_as_alone(
        partial(attend, window=window),
        batch,
        query,
        caches,
        every=1 if threads == 1 else 7,
        threads=threads,
    )


@each_instruction_set
@pytest.mark.parametrize("threads", [1, 2])
def test_a_head_has_the_bits_of_that_head_alone(
    threads: int, instruction_set: InstructionSet
) -> None:
    """So many heads, and so long, that a thread takes them in parts."""
    batch, caches = chain(70, 16, list(range(70))), random(2, 70, 1, 8, 128)
    query = random(16, 32, 128, seed=1)
    with torch_threads(threads):
        result = attend(batch, query, caches, instruction_set=instruction_set)
    for head in range(8):
        own = slice(4 * head, 4 * head + 4)
        alone = attend(
            batch,
            query[:, own],
            caches[:, :, :, head : head + 1].contiguous(),
            instruction_set=instruction_set,
        )
        assert same_bits(result[:, own], alone)


def test_neighbours_do_not_reach_a_row_even_when_infinite() -> None:
    query = random(company(0).query_indptr[-1], 4, 16, seed=1)
    assert_no_neighbour_is_read(attend, query, random(2, 900, 1, 2, 16))


def test_blocks_that_no_row_sees_are_not_read() -> None:
    """Behind a window a block id may be any number, one far outside the cache too."""
    batch, caches = chain(90, 3, list(range(90))), random(2, 90, 1, 2, 16)
    query = random(3, 4, 16, seed=1)
    expected = attend(batch, query, caches, window=20)
    batch.block_tables[0][:60] = [1 << 20] * 60
    assert same_bits(attend(batch, query, caches, window=20), expected)


@pytest.mark.parametrize("deterministic", [True, False])
def test_both_modes_plan_it_for_bfloat16_caches(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.kernels.attention.paged_attention.prefers_onednn", lambda: False)
    caches, query = random(2, 40, 1, 2, 16), random(3, 4, 16, seed=1)
    batch = chain(40, 3, list(range(40)))

    def run(cache: Tensor, **scales: Tensor) -> tuple[object, Tensor]:
        plan = plan_attention(
            batch,
            block_size=1,
            num_query_heads=4,
            num_kv_heads=2,
            head_dim=16,
            sliding_window=9,
            has_full_layers=True,
            deterministic=deterministic,
            dtype=torch.bfloat16,
            device="cpu",
        )
        return plan, paged_attention(query, cache[0], cache[1], plan, scale=0.7, **scales)

    plan, result = run(caches)
    assert isinstance(plan, RowPlan)
    assert same_bits(result, attend(batch, query, caches, window=9))
    assert plan.full is not None
    full = paged_attention(query, caches[0], caches[1], plan.full, scale=0.7)
    assert same_bits(full, attend(batch, query, caches))
    # A cache in fp8 is read by the torch operations.
    octets = caches.to(torch.float8_e4m3fn)
    scales = torch.ones(2, 40, 1, 2)
    _, of_octets = run(octets, k_scale=scales[0], v_scale=scales[1])
    expected = naive_attention(
        query, octets[0].float(), octets[1].float(), batch, scale=0.7, window=9
    )
    torch.testing.assert_close(of_octets.double(), expected, atol=2e-2, rtol=2e-2)
    with use_kernels("reference"):
        assert not isinstance(run(caches)[0], RowPlan)


def test_caches_of_another_kind_are_refused() -> None:
    batch, query = chain(4, 1, [0, 1, 2, 3]), random(1, 2, 16)
    for caches in (random(2, 4, 1, 1, 32), random(2, 4, 1, 1, 16).float()):
        with pytest.raises(ValueError, match="cannot be read"):
            attend(batch, query, caches)


@each_instruction_set
def test_takes_no_more_time_than_torchs_products(instruction_set: InstructionSet) -> None:
    """Prompts pay with the square of their length: sums must stay in registers."""
    num_keys, num_rows, num_heads, head_dim = 1024, 64, 4, 64
    batch = chain(num_keys, num_rows, list(range(num_keys)))
    caches = random(2, num_keys, 1, num_heads, head_dim)
    query = random(num_rows, num_heads, head_dim, seed=1)
    queries, keys = query.float().transpose(0, 1), caches[0, :, 0].float().permute(1, 2, 0)

    def cpu_seconds(run: Callable[[], object]) -> float:
        begun_s = time.thread_time()
        run()
        return time.thread_time() - begun_s

    with torch_threads(1):
        pairs = [
            (
                cpu_seconds(lambda: attend(batch, query, caches, instruction_set=instruction_set)),
                # As many additions and products as attention has, and no more.
                cpu_seconds(lambda: (queries @ keys) @ keys.transpose(1, 2)),
            )
            for _ in range(20)
        ]
    ours_s, products_s = (min(seconds) for seconds in zip(*pairs, strict=True))
    assert ours_s < 4 * products_s, f"{ours_s / products_s:.1f}"
