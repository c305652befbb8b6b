from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.kv.rope_write_kv import rope_write_kv
from outrider.kernels.kv.write_kv import quantise_fp8, write_kv
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import RopeConfig, RotaryTable, norm_and_rotate
from outrider.kernels.triton_support import KernelChoice, record_launches, use_kernels
from tests.sizes import compiled_sizes

BLOCK_SIZE = 4
NUM_BLOCKS = 5
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["reference", "triton"]),
    slots=st.lists(st.integers(0, NUM_SLOTS - 1), max_size=6, unique=True),
    groups=compiled_sizes(product(range(1, 6), range(1, 10)), [(4, 2)]),
    head_dim=compiled_sizes([2, 6, 32, 96, 128, 256], [6, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_norm=st.booleans(),
    is_fp8=st.booleans(),
    hole=st.integers(0, 9),
)
def test_is_its_parts_in_one(  # noqa: PLR0913
    device: torch.device,
    kind: KernelChoice,
    slots: list[int],
    groups: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    has_norm: bool,
    is_fp8: bool,
    hole: int,
) -> None:
    """The same bits as norm_and_rotate and write_kv in turn, and nothing else is written.

    On a GPU the kernels' tiles sum a head's squares in orders of their own: a last bit may differ.
    """
    group_size, num_kv_heads = groups
    num_query_heads = group_size * num_kv_heads
    num_rotated = num_query_heads + num_kv_heads
    mapping = torch.tensor([-1 if row == hole else slot for row, slot in enumerate(slots)])
    mapping = mapping.to(torch.int64).to(device)
    positions = torch.arange(len(slots), device=device) * 7
    heads = torch.randn(len(slots), num_rotated + num_kv_heads, head_dim, device=device).to(dtype)
    before = heads.clone()
    table = RotaryTable(RopeConfig(head_dim=head_dim), max_positions=50, dtype=dtype, device=device)
    weight = torch.randn(num_rotated, head_dim, device=device).to(dtype)
    norm = RmsNorm(weight, 1e-6) if has_norm else None
    shape = (2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    caches = torch.full(shape, 3.0, device=device).to(torch.float8_e4m3fn if is_fp8 else dtype)
    scales = torch.full(shape[:-1], -1.0, device=device) if is_fp8 else None
    expected = caches.clone()
    expected_scales = None if scales is None else scales.clone()
    with use_kernels(kind):
        query_key = norm_and_rotate(heads[:, :num_rotated], positions, table, norm=norm)
        write_kv(
            query_key[:, num_query_heads:],
            heads[:, num_rotated:],
            *expected,
            mapping,
            *((None, None) if expected_scales is None else expected_scales),
        )
        query = rope_write_kv(
            heads,
            positions,
            mapping,
            table,
            *caches,
            num_query_heads=num_query_heads,
            qk_norm=norm,
            k_scale=None if scales is None else scales[0],
            v_scale=None if scales is None else scales[1],
        )
    assert torch.equal(heads, before)
    may_differ = device.type == "cuda" and has_norm
    assert_same(query, query_key[:, :num_query_heads], may_differ=may_differ)
    assert_same(caches, expected, may_differ=may_differ)
    if scales is not None and expected_scales is not None:
        assert_same(scales, expected_scales, may_differ=may_differ)


def assert_same(found: Tensor, expected: Tensor, *, may_differ: bool) -> None:
    """The same bits, or numbers one step apart."""
    if may_differ:
        step = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found.float(), expected.float(), rtol=2 * step, atol=step)
    else:
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_values_are_not_rotated_and_keys_are(device: torch.device, num_kv_heads: int) -> None:
    """Against the formula, without the parts."""
    heads = torch.randn(3, 4 + 2 * num_kv_heads, 8, device=device)
    positions = torch.tensor([0, 5, 11], device=device)
    angles = positions[:, None] * 100.0 ** (-torch.arange(0, 8, 2, device=device) / 8)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # [3, 1, 4]
    rotated = torch.view_as_real(torch.complex(heads[..., :4], heads[..., 4:]) * turns)
    rotated = torch.cat(rotated.unbind(-1), -1)  # halves are paired
    table = RotaryTable(
        RopeConfig(head_dim=8, theta=100.0), max_positions=12, dtype=torch.float32, device=device
    )
    caches = torch.zeros(2, 1, 3, num_kv_heads, 8, device=device)
    with use_kernels("triton"):
        query = rope_write_kv(
            heads, positions, torch.arange(3, device=device), table, *caches, num_query_heads=4
        )
    torch.testing.assert_close(query, rotated[:, :4], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[0, 0], rotated[:, 4 : 4 + num_kv_heads], atol=1e-5, rtol=1e-5)
    assert torch.equal(caches[1, 0], heads[:, 4 + num_kv_heads :])


def test_a_slot_outside_the_cache_writes_nothing(device: torch.device) -> None:
    memory = torch.zeros(4, 2, 4, 1, 2, device=device)
    heads = torch.ones(4, 3, 2, device=device)
    table = RotaryTable(RopeConfig(head_dim=2), max_positions=4, dtype=torch.float32, device=device)
    slots = torch.tensor([8, -2, 9, -8], device=device)
    with use_kernels("triton"):
        query = rope_write_kv(
            heads, torch.arange(4, device=device), slots, table, *memory[1:3], num_query_heads=1
        )
    assert not memory.any()
    assert query.abs().sum() > 0


def test_an_fp8_key_is_the_head_as_the_model_rounds_it(device: torch.device) -> None:
    heads = torch.randn(1, 3, 64, device=device).to(torch.bfloat16)
    table = RotaryTable(
        RopeConfig(head_dim=64), max_positions=4, dtype=torch.bfloat16, device=device
    )
    caches = torch.zeros(2, 1, 1, 1, 64, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros(2, 1, 1, 1, device=device)
    one = torch.ones(1, dtype=torch.int64, device=device)
    with use_kernels("triton"):
        rope_write_kv(
            heads,
            one,
            one - 1,
            table,
            *caches,
            num_query_heads=1,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        key = norm_and_rotate(heads[:, 1:2], one, table)
    fp8, scale = quantise_fp8(key)
    assert torch.equal(caches[0].view(torch.uint8).flatten(), fp8.view(torch.uint8).flatten())
    assert scales[0].item() == scale.item()
    assert not torch.equal(key.float(), key.float().to(torch.float8_e4m3fn).float())


def test_one_launch() -> None:
    table = RotaryTable(RopeConfig(head_dim=128), max_positions=8, dtype=torch.bfloat16)
    heads = torch.empty(64, 48, 128, dtype=torch.bfloat16)
    caches = torch.empty(2, 8, 16, 8, 128, dtype=torch.bfloat16)
    with record_launches(90) as launches:
        rope_write_kv(heads, torch.arange(64), torch.arange(64), table, *caches, num_query_heads=32)
    assert len(launches) == 1
    assert launches[0].grid == (64, 6)
