"""Attention in tiles: the definition, poisoned memory, bits that depend on nobody else."""

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import attention_tiles
from kernels.attend_tiles import attend_tiles
from kernels.attention_plan import AttentionBatch
from kernels.attention_rows import pack_rows, plan_tiles
from kernels.attention_tiles import TilePlan, TileShape, tile_shape, tile_shapes
from kernels.paged_attention import paged_attention, plan_attention
from kernels.triton_support import use_kernels
from tests.kernels.test_paged_attention import batches, naive_attention

pytestmark = pytest.mark.usefixtures("triton_kernels")

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


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated without being written holds what would show: NaN, or large numbers."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 28)

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Queries and caches; slots that no sequence has hold NaN."""

    query: Tensor
    caches: tuple[Tensor, Tensor]
    scales: tuple[Tensor | None, Tensor | None]
    exact: tuple[Tensor, Tensor]  # what the caches mean, in float64


def make_inputs(  # noqa: PLR0913 - what attention is of
    batch: AttentionBatch,
    *,
    block_size: int,
    num_blocks: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    is_scaled: bool = False,
    seed: int = 0,
) -> Inputs:
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


def attend(
    batch: AttentionBatch,
    inputs: Inputs,
    *,
    shape: TileShape | None = None,
    window: int | None = None,
    deterministic: bool = False,
    softcap: float | None = None,
    scale: float = 0.3,
) -> Tensor:
    num_kv_heads, head_dim = inputs.caches[0].shape[2:]
    plan = plan_tiles(
        batch,
        num_query_heads=inputs.query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_window=window,
        deterministic=deterministic,
        dtype=inputs.query.dtype,
        device=inputs.query.device,
        shape=shape,
    )
    plan.prepare()
    return attend_tiles(
        inputs.query,
        *inputs.caches,
        plan,
        scale=scale,
        k_scale=inputs.scales[0],
        v_scale=inputs.scales[1],
        softcap=softcap,
    )


TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def check(result: Tensor, inputs: Inputs, batch: AttentionBatch, **options: Any) -> None:
    expected = naive_attention(
        inputs.query.cpu().double(), *inputs.exact, batch, **{"scale": 0.3, **options}
    )
    tolerance = TOLERANCES[result.dtype]
    torch.testing.assert_close(result.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=batches(max_sequences=3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 2), (5, 1), (6, 1), (14, 2), (8, 1)]),
    head_dim=st.sampled_from([16, 24, 64, 96, 128]),
    window=st.sampled_from([None, None, 1, 3, 17]),
    softcap=st.sampled_from([None, None, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    is_scaled=st.sampled_from([False, False, True]),
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
    deterministic: bool,
    block_n: int,
    seed: int,
    device: torch.device,
    poison: None,
) -> None:
    batch, block_size, num_blocks = drawn
    inputs = make_inputs(
        batch,
        block_size=block_size,
        num_blocks=num_blocks,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        is_scaled=is_scaled,
        seed=seed,
    )
    shape = small_shape(heads[0] // heads[1], deterministic=deterministic, block_n=block_n)
    result = attend(batch, inputs, shape=shape, window=window, softcap=softcap)
    assert result.shape == inputs.query.shape
    check(result, inputs, batch, window=window, softcap=softcap)


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


@pytest.mark.parametrize(
    ("prefix", "window", "num_rows"),
    [
        (0, None, 256),
        (48, None, 256),
        (47, 7, 256),
        (130, None, 256),
        (47, 9, -40),
        (48, None, -40),
    ],
)
def test_tree_of_256_nodes(
    prefix: int, window: int | None, num_rows: int, device: torch.device, poison: None
) -> None:
    """All four words of the masks, from places before, at and after a block's border.

    A negative number: so many of its rows in deterministic mode.
    """
    deterministic = num_rows < 0
    masks = random_tree(256, seed=prefix)
    batch = one_sequence(prefix + 256, abs(num_rows), masks, table=list(range(25)))
    inputs = make_inputs(
        batch,
        block_size=16,
        num_blocks=25,
        heads=(2, 1),
        head_dim=16,
        dtype=torch.float32,
        device=device,
    )
    shape = small_shape(2, deterministic=deterministic, block_n=32, **WIDE)
    if not deterministic:
        shape = dataclasses.replace(shape, block_n=64)
    result = attend(batch, inputs, shape=dataclasses.replace(shape, split_size=64), window=window)
    check(result, inputs, batch, window=window, softcap=None)


@pytest.mark.parametrize("group_size", [1, 3, 5, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 256])
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
        batch,
        block_size=16,
        num_blocks=100,
        heads=(group_size, 1),
        head_dim=head_dim,
        dtype=torch.float16,
        device=device,
    )
    check(
        attend(batch, inputs, scale=head_dim**-0.5),
        inputs,
        batch,
        window=None,
        scale=head_dim**-0.5,
    )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kv_len", [703, 704, 705])
def test_more_splits_than_are_combined_at_once(
    kv_len: int, deterministic: bool, device: torch.device, poison: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(attention_tiles, "num_multiprocessors", lambda device: 64)
    monkeypatch.setattr(attention_tiles, "_THRIFTY_KEYS_PER_LINE", 1)
    batch = one_sequence(kv_len, 3, table=list(range(45)))
    inputs = make_inputs(
        batch,
        block_size=16,
        num_blocks=45,
        heads=(2, 1),
        head_dim=16,
        dtype=torch.float32,
        device=device,
    )
    shape = small_shape(2, deterministic=deterministic, split_size=16)
    result = attend(batch, inputs, shape=shape)
    check(result, inputs, batch, window=None)


def test_sequences_may_share_blocks(device: torch.device, poison: None) -> None:
    batch = AttentionBatch(
        query_indptr=[0, 1, 4, 9],
        kv_lens=[50, 50, 37],
        block_tables=[[7, 2, 5, 0], [7, 2, 5, 1], [7, 2, 3]],
        tree_starts=[50, 47, 37],
        ancestor_masks=[None, [1, 3, 5], None],
    )
    inputs = make_inputs(
        batch,
        block_size=16,
        num_blocks=8,
        heads=(4, 2),
        head_dim=32,
        dtype=torch.float32,
        device=device,
    )
    check(attend(batch, inputs, shape=small_shape(2)), inputs, batch, window=None)


def test_rows_of_nobody_are_left_alone(device: torch.device, poison: None) -> None:
    """Padding rows stay as they are; rows that see nothing are 0, not NaN."""
    batch = one_sequence(20, 2, table=[0, 1])
    inputs = make_inputs(
        batch,
        block_size=16,
        num_blocks=2,
        heads=(2, 1),
        head_dim=16,
        dtype=torch.float32,
        device=device,
    )
    plan = plan_tiles(
        batch,
        num_query_heads=2,
        num_kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=device,
        shape=small_shape(2),
    )
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
        begin = 0 if deterministic else first // shape.block_n * shape.block_n
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


@pytest.mark.parametrize(
    ("prefix", "window", "dtype"),
    [
        (0, None, torch.bfloat16),
        (61, None, torch.float32),
        (121, 9, torch.float32),
        (121, None, torch.bfloat16),
    ],
)
def test_bits_depend_on_nobody_else(
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
        block_size=8,
        num_blocks=60,
        heads=num_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
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


def test_plan_and_dispatch(device: torch.device) -> None:
    """The public functions; layers with and without a window; the torch reference of the tiles."""
    batch = AttentionBatch(
        query_indptr=[0, 3, 8],
        kv_lens=[30, 25],
        block_tables=[[4, 2], [0, 1]],
        tree_starts=[30, 20],
        ancestor_masks=[None, [1, 3, 7, 9, 19]],
    )
    inputs = make_inputs(
        batch,
        block_size=16,
        num_blocks=5,
        heads=(4, 2),
        head_dim=32,
        dtype=torch.float32,
        device=device,
    )
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
            result = paged_attention(inputs.query, *inputs.caches, layer, scale=0.3, softcap=5.0)
            check(result, inputs, batch, window=window, softcap=5.0)
            with use_kernels("reference"):
                result = paged_attention(
                    inputs.query, *inputs.caches, layer, scale=0.3, softcap=5.0
                )
            check(result, inputs, batch, window=window, softcap=5.0)


def test_an_empty_batch(device: torch.device) -> None:
    batch = AttentionBatch(
        query_indptr=[0], kv_lens=[], block_tables=[], tree_starts=[], ancestor_masks=[]
    )
    inputs = make_inputs(
        batch,
        block_size=16,
        num_blocks=1,
        heads=(2, 1),
        head_dim=16,
        dtype=torch.float32,
        device=device,
    )
    assert attend(batch, inputs).shape == (0, 2, 16)


def test_what_cannot_be_is_refused(device: torch.device) -> None:
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
    inputs = make_inputs(
        batch,
        block_size=16,
        num_blocks=2,
        heads=(2, 1),
        head_dim=16,
        dtype=torch.float32,
        device=device,
    )
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
        assert shape.rows_per_tile >= rows or shape == shapes[-1]
    assert tile_shapes(**options, deterministic=True) == tile_shapes(**options, deterministic=True)
    assert len(tile_shapes(**options, deterministic=True)) == 1
