"""Attention in tiles: the definition, poisoned memory, bits that depend on no other row."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.kernels.attention import attention_tiles
from outrider.kernels.attention.attend_tiles import attend_tiles
from outrider.kernels.attention.attention_plan import AttentionBatch
from outrider.kernels.attention.attention_rows import plan_tiles
from outrider.kernels.attention.attention_tiles import TilePlan
from outrider.kernels.attention.paged_attention import paged_attention, plan_attention
from outrider.kernels.triton_support import use_kernels
from tests.kernels.attention.naive import batches, naive_attention
from tests.kernels.attention_inputs import (
    FP8,
    WIDE,
    Inputs,
    attend,
    check,
    make_inputs,
    make_sinks,
    one_sequence,
    random_tree,
    small_shape,
    tile_plan,
)
from tests.sizes import repeats

pytestmark = pytest.mark.usefixtures("triton_kernels")


@pytest.mark.slow
@settings(max_examples=repeats(8, 4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=batches(max_sequences=3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 2), (5, 1), (6, 1), (14, 2), (8, 1)]),
    head_dim=st.sampled_from([16, 24, 64, 96, 128]),
    window=st.sampled_from([None, None, 1, 3, 17]),
    softcap=st.sampled_from([None, None, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    is_scaled=st.sampled_from([False, False, True]),
    has_sinks=st.sampled_from([False, False, True]),
    deterministic=st.booleans(),
    block_n=st.sampled_from([16, 32]),
    seed=st.integers(0, 1 << 30),
)
def test_equals_the_definition(  # noqa: PLR0913 - what is drawn
    drawn: tuple[AttentionBatch, int, int],
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    is_scaled: bool,
    has_sinks: bool,
    deterministic: bool,
    block_n: int,
    seed: int,
    device: torch.device,
    poison: None,
) -> None:
    batch, block_size, num_blocks = drawn
    inputs = make_inputs(
        batch,
        device,
        block_size=block_size,
        num_blocks=num_blocks,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        is_scaled=is_scaled,
        seed=seed,
    )
    shape = small_shape(heads[0] // heads[1], deterministic=deterministic, block_n=block_n)
    sinks = make_sinks(heads[0]).to(device) if has_sinks else None
    result = attend(batch, inputs, shape=shape, window=window, softcap=softcap, sinks=sinks)
    assert result.shape == inputs.query.shape
    sinks = None if sinks is None else sinks.cpu()
    check(result, inputs, batch, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize(
    ("prefix", "window", "deterministic"),
    [
        pytest.param(0, None, False, marks=pytest.mark.slow),
        pytest.param(48, None, False, marks=pytest.mark.long),
        (47, 7, False),
        pytest.param(130, None, False, marks=pytest.mark.slow),
        pytest.param(47, 9, True, marks=pytest.mark.long),
        (48, None, True),
    ],
)
def test_tree_of_256_nodes(
    prefix: int, window: int | None, deterministic: bool, device: torch.device, poison: None
) -> None:
    """All four words of the masks, from places before, at and after a block's border.

    In deterministic mode, which takes longer, the last 40 rows.
    """
    masks = random_tree(256, seed=prefix)
    batch = one_sequence(prefix + 256, 40 if deterministic else 256, masks, table=list(range(25)))
    inputs = make_inputs(batch, device)
    shape = small_shape(2, deterministic=deterministic, block_n=32, **WIDE)
    if not deterministic:
        shape = dataclasses.replace(shape, block_n=64)
    result = attend(batch, inputs, shape=dataclasses.replace(shape, split_size=64), window=window)
    check(result, inputs, batch, window=window, softcap=None)


@pytest.mark.parametrize(
    ("group_size", "head_dim"),
    [
        *((group_size, 64) for group_size in (1, 3, 5, 7, 8)),
        pytest.param(1, 256, marks=pytest.mark.slow),
        pytest.param(7, 256, marks=pytest.mark.slow),
    ],
)
def test_shapes_of_serving(group_size: int, head_dim: int, device: torch.device) -> None:
    """What `tile_shape` chooses, with a prefill chunk, a tree and plain decoding in one pass."""
    num_rows, kv_lens = [1, 40, 21, 0, 1], [65, 300, 85, 12, 64]
    masks: list[list[int] | None] = [None] * 5
    masks[2] = random_tree(21, seed=1)
    tree_starts = list(kv_lens)
    tree_starts[2] -= 21
    blocks = torch.randperm(100, generator=torch.Generator().manual_seed(3)).tolist()
    batch = AttentionBatch(
        query_indptr=[0, *itertools.accumulate(num_rows)],
        kv_lens=kv_lens,
        block_tables=[blocks[20 * b : 20 * b + 20] for b in range(5)],
        tree_starts=tree_starts,
        ancestor_masks=masks,
    )
    inputs = make_inputs(
        batch, device, heads=(group_size, 1), head_dim=head_dim, dtype=torch.float16
    )
    check(
        attend(batch, inputs, scale=head_dim**-0.5),
        inputs,
        batch,
        window=None,
        scale=head_dim**-0.5,
    )


@pytest.mark.parametrize(
    ("kv_len", "deterministic"),
    [
        (704, False),
        (705, True),
        *(pytest.param(n, False, marks=pytest.mark.slow) for n in (703, 705)),
    ],
)
def test_many_splits_are_combined_in_their_order(
    kv_len: int, deterministic: bool, device: torch.device, poison: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention_tiles, "num_multiprocessors", lambda device: 64)
    monkeypatch.setattr(attention_tiles, "_THRIFTY_KEYS_PER_LINE", 1)
    batch = one_sequence(kv_len, 3, table=list(range(45)))
    inputs = make_inputs(batch, device)
    growing = torch.linspace(0.1, 3, 45 * 16).view(45, 16, 1, 1)  # so that later scores are greater
    inputs.caches[0].mul_(growing.to(device))
    inputs.exact[0].copy_(inputs.caches[0])
    shape = small_shape(2, deterministic=deterministic, split_size=16)
    result = attend(batch, inputs, shape=shape)
    check(result, inputs, batch, window=None)


SHARED = AttentionBatch(
    query_indptr=[0, 1, 4, 9],
    kv_lens=[50, 50, 37],
    block_tables=[[7, 2, 5, 0], [7, 2, 5, 1], [7, 2, 3]],
    tree_starts=[50, 47, 37],
    ancestor_masks=[None, [1, 3, 5], None],
)


@pytest.mark.parametrize(
    ("dtype", "is_scaled", "softcap", "window", "deterministic"),
    [
        (torch.float32, True, None, 20, True),
        (torch.float16, True, 2.0, None, False),
        (torch.bfloat16, False, 2.0, 3, True),
        pytest.param(torch.float32, False, None, None, False, marks=pytest.mark.slow),
        pytest.param(torch.float16, True, 2.0, None, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, True, None, None, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, 2.0, 3, False, marks=pytest.mark.slow),
    ],
)
def test_options_with_shared_blocks(
    dtype: torch.dtype,
    is_scaled: bool,
    softcap: float | None,
    window: int | None,
    deterministic: bool,
    device: torch.device,
    poison: None,
) -> None:
    inputs = make_inputs(
        SHARED, device, heads=(4, 2), head_dim=32, dtype=dtype, is_scaled=is_scaled
    )
    result = attend(
        SHARED,
        inputs,
        shape=small_shape(2, deterministic=deterministic),
        softcap=softcap,
        window=window,
    )
    check(result, inputs, SHARED, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_float8_number_is_read_exactly(dtype: torch.dtype, device: torch.device) -> None:
    """A row with one key gets its value: all numbers that a byte can mean, subnormal ones too."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0  # not numbers
    cache = codes.view(FP8).view(1, 1, 1, 256).to(device)
    inputs = Inputs(
        query=torch.ones(1, 1, 256, dtype=dtype, device=device),
        caches=(cache, cache),
        scales=(torch.ones(1, 1, 1, device=device), torch.full((1, 1, 1), 0.5, device=device)),
        exact=(cache.double(), cache.double()),
    )
    result = attend(one_sequence(1, 1, table=[0]), inputs, shape=small_shape(1), scale=1e-3)
    assert torch.equal(result[0, 0], (cache.float() * 0.5).to(dtype)[0, 0, 0])


def test_rows_without_a_sequence_are_not_written(device: torch.device, poison: None) -> None:
    """Padding rows stay as they are; rows that see nothing are 0, not NaN."""
    batch = one_sequence(20, 2, table=[0, 1])
    inputs = make_inputs(batch, device)
    plan = tile_plan(batch, inputs, shape=small_shape(2))
    plan.row_ends[1] = 0
    plan.prepare()
    query = torch.cat((inputs.query, inputs.query))
    result = attend_tiles(query, *inputs.caches, plan, scale=0.3)
    assert result[2:].isnan().all()
    assert (result[1] == 0).all()
    assert result[0].isfinite().all()


def test_offsets_beyond_31_bits(device: torch.device) -> None:
    """A cache of more than 2**31 numbers, of which a sequence has blocks at the far end."""
    num_blocks = (1 << 31) // (16 * 128) + 64
    if device.type == "cuda":
        caches = [
            torch.zeros(num_blocks, 16, 1, 128, dtype=torch.float16, device=device)
            for _ in range(2)
        ]
    else:  # pages that are not touched take no memory
        shape = (num_blocks, 16, 1, 128)
        caches = [torch.from_numpy(np.zeros(shape, dtype=np.float16)) for _ in range(2)]
    table = [num_blocks - 1, 3, num_blocks - 40]
    numbers = torch.randn(2, 3, 16, 1, 128, generator=torch.Generator().manual_seed(0))
    for cache, part in zip(caches, numbers, strict=True):
        for block, content in zip(table, part, strict=True):
            cache[block] = content.half()
    batch = one_sequence(45, 2, table=table)
    query = torch.randn(2, 2, 128, generator=torch.Generator().manual_seed(1)).half()
    plan = plan_tiles(
        batch,
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=128,
        dtype=torch.float16,
        device=device,
    )
    plan.prepare()
    result = attend_tiles(query.to(device), caches[0], caches[1], plan, scale=0.1)
    small = dataclasses.replace(batch, block_tables=[[0, 1, 2]])
    expected = naive_attention(
        query.double(), *numbers.half().double(), small, scale=0.1, window=None
    )
    torch.testing.assert_close(result.cpu().double(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.usefixtures("equal_rows")
@pytest.mark.parametrize(
    ("prefix", "window", "dtype"),
    [
        pytest.param(0, None, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(61, None, torch.float32, marks=pytest.mark.long),
        (121, 70, torch.float32),
        pytest.param(121, None, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_bits_do_not_depend_on_other_rows(
    prefix: int, window: int | None, dtype: torch.dtype, device: torch.device, poison: None
) -> None:
    """A row alone, in a tree of 64, as a chunk of a prompt, and among 31 others."""
    num_nodes, num_heads, head_dim = 64, (2, 1), 32
    masks = random_tree(num_nodes, seed=prefix)
    shape = small_shape(2, deterministic=True, block_n=32, split_size=64, **WIDE)
    blocks = torch.randperm(60, generator=torch.Generator().manual_seed(prefix)).tolist()
    tree = one_sequence(prefix + num_nodes, num_nodes, masks, table=blocks[:40])
    inputs = make_inputs(
        tree,
        device,
        block_size=8,
        num_blocks=60,
        heads=num_heads,
        head_dim=head_dim,
        dtype=dtype,
        seed=prefix,
    )
    in_tree = attend(tree, inputs, shape=shape, window=window)
    assert in_tree.isfinite().all()
    deepest = max(range(num_nodes), key=lambda node: masks[node].bit_count())
    for node in (deepest, 17):
        path = [j for j in range(num_nodes) if masks[node] >> j & 1]
        length = prefix + len(path)
        # The same keys, in order, in blocks of their own.
        caches = tuple(torch.zeros(60, 8, *cache.shape[2:]).to(cache) for cache in inputs.caches)
        table = list(range(59, 59 - (length + 7) // 8, -1))
        for position in range(length):
            source = position if position < prefix else prefix + path[position - prefix]
            for cache, old in zip(caches, inputs.caches, strict=True):
                cache[table[position // 8], position % 8] = old[blocks[source // 8], source % 8]
        queries = inputs.query[path[0] : path[0] + 1].repeat(len(path), 1, 1)
        for place, ancestor in enumerate(path):
            queries[place] = inputs.query[ancestor]
        causal = dataclasses.replace(inputs, query=queries[-1:], caches=caches)
        alone = attend(one_sequence(length, 1, table=table), causal, shape=shape, window=window)
        assert torch.equal(alone[0], in_tree[node])
        chunk = attend(
            one_sequence(length, len(path), table=table),
            dataclasses.replace(causal, query=queries),
            shape=shape,
            window=window,
        )
        assert torch.equal(chunk[-1], in_tree[node])
        assert torch.equal(chunk[0], in_tree[path[0]])
        if node != deepest:
            continue
        others = [1 + 7 * index % length // 2 for index in range(31)]
        crowd = AttentionBatch(
            query_indptr=list(range(33)),
            kv_lens=[*others[:20], length, *others[20:]],
            block_tables=[table] * 32,
            tree_starts=[*others[:20], length, *others[20:]],
            ancestor_masks=[None] * 32,
        )
        rows = queries[-1:].repeat(32, 1, 1) * torch.arange(-20, 12).view(32, 1, 1).to(queries)
        rows[20] = queries[-1]
        among = attend(crowd, dataclasses.replace(causal, query=rows), shape=shape, window=window)
        assert torch.equal(among[20], in_tree[node])


@pytest.mark.slow
def test_plan_and_dispatch(device: torch.device) -> None:
    """The public functions; layers with and without a window; the torch reference of the tiles."""
    batch = AttentionBatch(
        query_indptr=[0, 3, 8],
        kv_lens=[30, 25],
        block_tables=[[4, 2], [0, 1]],
        tree_starts=[30, 20],
        ancestor_masks=[None, [1, 3, 7, 9, 19]],
    )
    inputs = make_inputs(batch, device, heads=(4, 2), head_dim=32)
    for deterministic in (False, True):
        plan = plan_attention(
            batch,
            block_size=16,
            num_query_heads=4,
            num_kv_heads=2,
            head_dim=32,
            sliding_window=3,
            has_full_layers=True,
            deterministic=deterministic,
            dtype=torch.float32,
            device=device,
        )
        assert isinstance(plan, TilePlan)
        assert plan.full is not None
        assert plan.shape.is_deterministic == deterministic
        for layer, window in ((plan, 3), (plan.full, None)):
            for kind in ("triton", "reference"):
                with use_kernels(kind):
                    result = paged_attention(
                        inputs.query, *inputs.caches, layer, scale=0.3, softcap=5.0
                    )
                check(result, inputs, batch, window=window, softcap=5.0)


def test_an_empty_batch(device: torch.device) -> None:
    batch = AttentionBatch(
        query_indptr=[0], kv_lens=[], block_tables=[], tree_starts=[], ancestor_masks=[]
    )
    inputs = make_inputs(batch, device)
    assert attend(batch, inputs).shape == (0, 2, 16)
