"""Compiled norms, gates and placed heads: their definitions, and a row's bits in any company."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu.product_library import InstructionSet, product_support
from outrider.kernels.layers.compiled_rows import (
    ACTIVATIONS,
    CompiledNorm,
    can_place_heads,
    can_run_rows,
    gate_rows,
    place_heads,
)
from outrider.kernels.layers.gated_mul import Activation, gated_mul_reference
from outrider.kernels.layers.rms_norm import RmsNorm
from outrider.kernels.layers.rope import RopeConfig, RotaryTable, rotate
from tests.kernels.cpu.instruction_sets import each_instruction_set
from tests.kernels.layers.bits import same_bits, torch_threads

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"products: {product_support().detail}"
)

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE, KV_HEADS = 4, 8, 2
POSITIONS = 50


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def one_rounding_apart(result: Tensor, exact: Tensor) -> bool:
    """True if bfloat16 results are at most a rounding of float32 and one of bfloat16 from exact."""
    spacing = exact.abs() * 2.0**-7 + 1e-30
    return bool(((result.float() - exact).abs() <= 0.51 * spacing + 1e-5 * exact.abs()).all())


@each_instruction_set
@settings(max_examples=40)
@given(
    rows=st.integers(0, 20),
    width=st.integers(1, 200),
    weight_rows=st.sampled_from([1, 1, 2, 3]),
    is_added=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_norm_is_its_definition_rounded_once(
    instruction_set: InstructionSet,
    rows: int,
    width: int,
    weight_rows: int,
    is_added: bool,
    seed: int,
) -> None:
    rows *= weight_rows
    x, residual = random(rows, width, seed=seed), random(rows, width, seed=seed + 1)
    weight = random(weight_rows, width, seed=seed + 2)
    norm = CompiledNorm(
        weight[0] if weight_rows == 1 else weight, 1e-5, instruction_set=instruction_set
    )
    stream = (residual + x) if is_added else x

    result = norm.add(x, residual) if is_added else norm(x)

    values = stream.double()
    inverse = torch.rsqrt(values.square().mean(1, keepdim=True) + 1e-5)
    exact = values * inverse * weight.double().repeat(rows // weight_rows, 1)
    assert one_rounding_apart(result, exact)
    if is_added:
        assert same_bits(residual, stream)


@each_instruction_set
@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=30)
@given(rows=st.integers(0, 20), width=st.integers(1, 150), scale=st.sampled_from([0.1, 3.0, 40.0]))
def test_a_gate_is_its_definition_rounded_once(
    instruction_set: InstructionSet, activation: Activation, rows: int, width: int, scale: float
) -> None:
    gate_up = (random(rows, 2 * width).float() * scale).bfloat16()

    result = gate_rows(gate_up, activation, instruction_set=instruction_set)

    exact = gated_mul_reference(gate_up.double(), activation)
    assert one_rounding_apart(result, exact) or torch.allclose(
        result.double(), exact, rtol=2**-8, atol=1e-6 * scale
    )


def heads_and_caches(rows: int, query_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = random(rows, query_heads + 2 * KV_HEADS, head_dim)
    caches = random(2, BLOCKS, BLOCK_SIZE, KV_HEADS, head_dim, seed=7)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(rows))
    return heads, caches, slots[:rows]


@each_instruction_set
@settings(max_examples=40)
@given(
    rows=st.integers(0, 20),
    query_heads=st.sampled_from([2, 6]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    rotary_dim=st.sampled_from([None, 0, 16]),
    has_norm=st.booleans(),
    without_slot=st.integers(0, 30),
)
def test_heads_are_normalised_turned_and_put_in_their_slots(
    instruction_set: InstructionSet,
    rows: int,
    query_heads: int,
    head_dim: int,
    rotary_dim: int | None,
    has_norm: bool,
    without_slot: int,
) -> None:
    heads, caches, slots = heads_and_caches(rows, query_heads, head_dim)
    if without_slot < rows:
        slots[without_slot] = -1
    positions = torch.arange(rows) * 2 % POSITIONS
    rope = RopeConfig(head_dim=head_dim, rotary_dim=rotary_dim)
    rotary = RotaryTable(rope, max_positions=POSITIONS, dtype=torch.bfloat16)
    norm = RmsNorm(random(query_heads + KV_HEADS, head_dim, seed=3), 1e-6) if has_norm else None
    before = caches.clone()

    query = place_heads(
        heads,
        positions,
        slots,
        rotary,
        caches[0],
        caches[1],
        num_query_heads=query_heads,
        qk_norm=norm,
        instruction_set=instruction_set,
    )

    turned = heads[:, : query_heads + KV_HEADS].float()
    if norm is not None:
        inverse = torch.rsqrt(turned.square().mean(-1, keepdim=True) + norm.eps)
        turned = turned * inverse * norm.weight.float()
    cos, sin = rotary.gather(positions)
    turned = rotate(turned, cos.float(), sin.float())
    assert torch.allclose(query.float(), turned[:, :query_heads], rtol=2**-8, atol=1e-5)
    expected = before.flatten(1, 2)
    kept = slots >= 0
    expected[0, slots[kept]] = turned[kept, query_heads:].bfloat16()
    expected[1, slots[kept]] = heads[kept, query_heads + KV_HEADS :]
    assert torch.allclose(caches.flatten(1, 2).float(), expected.float(), rtol=2**-7, atol=1e-5)
    others = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    others[slots[kept]] = False
    assert same_bits(caches.flatten(1, 2)[:, others], before.flatten(1, 2)[:, others])
    assert same_bits(caches[1].flatten(0, 1)[slots[kept]], heads[kept, query_heads + KV_HEADS :])


def everything(rows: Tensor, instruction_set: InstructionSet) -> Tensor:
    """All operations on rows [n, 2 * 96], one after the other: [n, any]."""
    norm = CompiledNorm(random(192, seed=5), 1e-5, instruction_set=instruction_set)
    normed = norm.add(rows, random(192, seed=6).expand(len(rows), -1).contiguous())
    gated = [gate_rows(normed, each, instruction_set=instruction_set) for each in ACTIVATIONS]
    caches = torch.zeros((2, 128, BLOCK_SIZE, 1, 32), dtype=torch.bfloat16)
    slots = torch.arange(len(rows))
    query = place_heads(
        normed.view(len(rows), 6, 32),
        torch.full((len(rows),), 11),
        slots,
        RotaryTable(RopeConfig(head_dim=32), max_positions=POSITIONS, dtype=torch.bfloat16),
        caches[0],
        caches[1],
        num_query_heads=4,
        qk_norm=RmsNorm(random(5, 32), 1e-6),
        instruction_set=instruction_set,
    )
    kept = caches.flatten(1, 2)[:, slots].transpose(0, 1)
    return torch.cat([normed, *gated, query.flatten(1), kept.flatten(1)], 1)


@pytest.mark.slow_cases
@each_instruction_set
def test_a_row_has_the_same_bits_alone_and_in_any_company(instruction_set: InstructionSet) -> None:
    rows = random(700, 192)
    alone = torch.cat([everything(row, instruction_set) for row in rows.split(1)])
    for num_threads in (1, 2, 3):
        with torch_threads(num_threads):
            for count in (2, 9, 700):
                assert same_bits(everything(rows[:count], instruction_set), alone[:count])


def test_instruction_sets_have_the_same_bits() -> None:
    library, rows = product_support().library, random(40, 192)
    assert library is not None
    first, *others = (everything(rows, each) for each in library.instruction_sets)
    assert all(same_bits(each, first) for each in others)


@each_instruction_set
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_spoils_its_own_row_only(
    instruction_set: InstructionSet, value: float
) -> None:
    rows = random(5, 192)
    right = everything(rows, instruction_set)
    rows[2, 17] = value
    result = everything(rows, instruction_set)
    others = torch.tensor([0, 1, 3, 4])
    assert same_bits(result[others], right[others])
    assert not result[2].isfinite().all()


@each_instruction_set
@pytest.mark.parametrize("extreme", [3.3e38, 1e-38, 0.0])
def test_gates_of_extreme_numbers_are_what_they_tend_to(
    instruction_set: InstructionSet, extreme: float
) -> None:
    gate_up = torch.tensor([[extreme, -extreme, 1.0, 1.0]]).bfloat16()
    for activation in ACTIVATIONS:
        result = gate_rows(gate_up, activation, instruction_set=instruction_set)[0].double()
        assert result[0] == gate_up[0, 0] if extreme > 1 else abs(result[0]) <= extreme
        assert abs(result[1]) < 1e-5


@pytest.mark.parametrize(("position", "slot"), [(POSITIONS, 0), (-1, 0), (0, 32), (0, -2)])
def test_a_place_that_does_not_exist_is_refused_before_anything_is_written(
    position: int, slot: int
) -> None:
    heads, caches, slots = heads_and_caches(9, 2, 32)
    positions = torch.zeros(9, dtype=torch.int64)
    positions[8], slots[8] = position, slot
    before = caches.clone()
    rotary = RotaryTable(RopeConfig(head_dim=32), max_positions=POSITIONS, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="positions reach from 0 to 49, slots from -1 to 31"):
        place_heads(heads, positions, slots, rotary, *caches, num_query_heads=2)
    assert same_bits(caches, before)


def test_heads_norms_and_gates_that_do_not_fit_are_refused() -> None:
    heads, caches, slots = heads_and_caches(3, 2, 32)
    rotary = RotaryTable(RopeConfig(head_dim=32), max_positions=9, dtype=torch.bfloat16)
    positions = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit caches"):
        place_heads(heads, positions, slots, rotary, *caches, num_query_heads=4)
    with pytest.raises(ValueError, match="not placed here"):
        place_heads(heads, positions, slots, rotary, *caches.float(), num_query_heads=2)
    with pytest.raises(ValueError, match="not bfloat16"):
        CompiledNorm(random(32), 1e-5)(heads.float()[:, 0])
    with pytest.raises(ValueError, match="cannot be added"):
        CompiledNorm(random(32), 1e-5).add(heads[:, 0].contiguous(), heads[:2, 0].contiguous())
    with pytest.raises(ValueError, match="not gated here"):
        gate_rows(heads.float()[:, 0], "silu")


def test_they_run_for_bfloat16_on_a_cpu() -> None:
    assert can_run_rows(torch.bfloat16, CPU)
    assert not can_run_rows(torch.float32, CPU)
    assert not can_run_rows(torch.bfloat16, torch.device("cuda"))
    assert can_place_heads(torch.bfloat16, CPU, 96)
    assert not can_place_heads(torch.bfloat16, CPU, 80)
