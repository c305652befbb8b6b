"""Division of attention's work into tiles, and their shapes."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.kernels.attention import attention_tiles
from outrider.kernels.attention.attention_plan import AttentionBatch
from outrider.kernels.attention.attention_rows import pack_rows, plan_tiles
from outrider.kernels.attention.attention_tiles import SPLIT_ALIGNMENT, tile_shape, tile_shapes
from tests.kernels.attention_inputs import (
    attend,
    make_inputs,
    one_sequence,
    random_tree,
    small_shape,
)

pytestmark = pytest.mark.usefixtures("triton_kernels")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 9, 200]), st.integers(0, 9000), st.integers(0, 9000)),
        min_size=1,
        max_size=40,
    ),
    num_multiprocessors=st.sampled_from([1, 3, 17, 132]),
    deterministic=st.booleans(),
)
def test_work_is_divided_within_the_workspace(
    sequences: list[tuple[int, int, int]],
    num_multiprocessors: int,
    deterministic: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    poison: None,
) -> None:
    """Every key of every tile has its unit, and partial sums fit however the work is spread."""
    monkeypatch.setattr(attention_tiles, "num_multiprocessors", lambda device: num_multiprocessors)
    num_rows = [rows for rows, _, _ in sequences]
    kv_lens = [max(rows, kv_len) for rows, kv_len, _ in sequences]
    batch = AttentionBatch(
        query_indptr=[0, *itertools.accumulate(num_rows)],
        kv_lens=kv_lens,
        block_tables=[[] for _ in sequences],
        tree_starts=kv_lens,
        ancestor_masks=[None] * len(sequences),
    )
    shape = small_shape(4, deterministic=deterministic)
    plan = plan_tiles(
        batch,
        num_query_heads=8,
        num_kv_heads=2,
        head_dim=16,
        dtype=torch.float32,
        device=device,
        shape=shape,
    )
    first_keys = [
        min(first, kv_len) for (_, _, first), kv_len in zip(sequences, kv_lens, strict=True)
    ]
    plan.first_keys[: len(sequences)] = torch.tensor(first_keys, dtype=torch.int32)
    plan.prepare()
    units, partials, sizes = plan.work.cpu().tolist()
    assert units[0] == 0
    num_partials = 0
    for b, (rows, kv_len, first) in enumerate(zip(num_rows, kv_lens, first_keys, strict=True)):
        tiles = -(-rows // shape.rows_per_tile)
        assert sizes[b] % shape.block_n == 0
        begin = 0 if deterministic else first // SPLIT_ALIGNMENT * SPLIT_ALIGNMENT
        splits = -(-(kv_len - begin) // sizes[b])
        assert units[b + 1] - units[b] == tiles * splits
        assert partials[b] == num_partials
        num_partials += tiles * splits if splits > 1 else 0
        if deterministic:
            assert sizes[b] == shape.split_size
    assert partials[-1] == num_partials
    assert num_partials <= plan.workspace.numel() // (2 * shape.block_m * (16 + 2))
    if num_partials:
        assert plan.may_split


def test_impossible_tiles_are_refused(device: torch.device) -> None:
    batch = one_sequence(300, 257, random_tree(257, seed=0), table=list(range(20)))
    with pytest.raises(ValueError, match="257 nodes"):
        pack_rows(batch)
    crowd = AttentionBatch(
        query_indptr=[0] * 1026,
        kv_lens=[0] * 1025,
        block_tables=[[]] * 1025,
        tree_starts=[0] * 1025,
        ancestor_masks=[None] * 1025,
    )
    with pytest.raises(ValueError, match="1025 sequences"):
        pack_rows(crowd)
    batch = one_sequence(20, 2, table=[0, 1])
    inputs = make_inputs(batch, device)
    one_scale = torch.ones(2, 16, 1, device=device)
    with pytest.raises(ValueError, match="float32"):
        attend(batch, dataclasses.replace(inputs, scales=(one_scale, one_scale)))
    with pytest.raises(ValueError, match="scale=0"):
        attend(batch, inputs, scale=0.0)
    odd = inputs.caches[1].transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="equidistant"):
        attend(batch, dataclasses.replace(inputs, caches=(odd, odd)))


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("group_size", [1, 4, 5, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes_are_few_and_hold_a_group(
    architecture: int, group_size: int, head_dim: int, dtype: torch.dtype
) -> None:
    options: Any = {
        "group_size": group_size,
        "head_dim": head_dim,
        "dtype": dtype,
        "architecture": architecture,
    }
    shapes = tile_shapes(**options)
    chosen = [tile_shape(max_rows_per_sequence=rows, **options) for rows in range(1, 300)]
    assert set(chosen) <= set(shapes)
    assert len(shapes) <= 3
    for rows, shape in enumerate(chosen, start=1):
        assert 1 <= shape.rows_per_tile * group_size <= shape.block_m
        assert shape.split_size % shape.block_n == 0
        assert SPLIT_ALIGNMENT % shape.block_n == 0
        # A few tiles of the second largest shape are better than one of the largest.
        own = 4 if len(shapes) == 3 and shape == shapes[1] else 1
        assert own * shape.rows_per_tile >= rows or shape == shapes[-1]
    assert tile_shapes(**options, deterministic=True) == tile_shapes(**options, deterministic=True)
    assert len(tile_shapes(**options, deterministic=True)) == 1
