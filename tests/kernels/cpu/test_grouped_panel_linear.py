"""Compiled products of 8-bit rows with weights in groups: the references' bits, in any company."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu.grouped_panel_linear import (
    GroupedPanelLinear,
    Int4PanelLinear,
)
from outrider.kernels.cpu.product_library import InstructionSet, product_support
from outrider.kernels.layers.int4_linear import Int4Linear
from outrider.kernels.layers.row_invariant_linear import make_linear
from outrider.kernels.quantised.rows import int4_linear_reference
from outrider.kernels.quantised.stored_weight import Number
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int8
from outrider.kernels.triton_support import use_kernels
from tests.kernels.cpu.instruction_sets import each_instruction_set
from tests.kernels.layers.bits import same_bits, torch_threads
from tests.kernels.quantised.grouped_reference import grouped_linear_reference
from tests.kernels.quantised.stored_weights import random_stored

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"compiled products: {product_support().detail}"
)


SCALES = (torch.float16, torch.bfloat16, torch.float32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random_weight(out_features: int, num_groups: int, group_size: int) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(out_features)
    shape = (out_features, num_groups * group_size)
    return QuantisedWeight(
        codes=torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator),
        scales=random(out_features, num_groups, seed=3).float(),
        bits=4,
        group_size=group_size,
    )


@each_instruction_set
@settings(max_examples=60)
@given(
    out_features=st.sampled_from([1, 5, 31, 32, 33, 64, 97]),
    num_groups=st.integers(1, 6),
    group_size=st.sampled_from([8, 16, 32, 64, 128]),
    num_rows=st.sampled_from([1, 2, 3, 7, 8, 14, 15, 33]),
    has_bias=st.booleans(),
)
def test_4_bits_are_the_reference_to_the_bit(
    instruction_set: InstructionSet,
    out_features: int,
    num_groups: int,
    group_size: int,
    num_rows: int,
    has_bias: bool,
) -> None:
    weight = random_weight(out_features, num_groups, group_size)
    bias = random(out_features, seed=4) if has_bias else None
    x = random(num_rows, num_groups * group_size, seed=5)
    result = Int4PanelLinear(weight, bias, instruction_set=instruction_set)(x)
    assert same_bits(result, int4_linear_reference(x, weight, bias))


@each_instruction_set
@settings(max_examples=80)
@given(
    number=st.sampled_from(["int4", "int8"]),
    out_features=st.sampled_from([1, 5, 31, 32, 33, 64, 97]),
    num_groups=st.integers(1, 6),
    group_size=st.sampled_from([8, 16, 32, 40, 64, 136]),
    num_rows=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 15, 33]),
    kinds=st.tuples(*[st.booleans()] * 3, st.sampled_from(SCALES)),
)
def test_stored_weights_are_the_reference_to_the_bit(
    instruction_set: InstructionSet,
    number: Number,
    out_features: int,
    num_groups: int,
    group_size: int,
    num_rows: int,
    kinds: tuple[bool, bool, bool, torch.dtype],
) -> None:
    has_bias, zeros, minimums, scale_dtype = kinds
    weight = random_stored(
        number,
        out_features,
        num_groups,
        group_size,
        zeros=zeros,
        minimums=minimums,
        scale_dtype=scale_dtype,
    )
    bias = random(out_features, seed=4) if has_bias else None
    x = random(num_rows, num_groups * group_size, seed=5)
    result = GroupedPanelLinear(weight, bias, instruction_set=instruction_set)(x)
    assert same_bits(result, grouped_linear_reference(x, weight, bias))


@pytest.mark.parametrize("number", ["int4", "int8"])
def test_stored_weights_are_the_product_of_what_is_meant(number: Number) -> None:
    weight, x = random_stored(number, 40, 8, 32, minimums=True), random(9, 256)
    exact = x.float() @ weight.decoded(torch.float32).T
    error = (GroupedPanelLinear(weight)(x).float() - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.01  # the rows are rounded to 8 bits


def test_the_reference_is_the_product_of_what_is_meant() -> None:
    weight, x = random_weight(40, 4, 32), random(9, 128)
    exact = x.float() @ weight.dequantised(torch.float32).T
    error = (int4_linear_reference(x, weight).float() - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.01  # the rows are rounded to 8 bits


@each_instruction_set
def test_a_row_has_the_same_bits_alone_and_in_any_company(instruction_set: InstructionSet) -> None:
    linear = Int4PanelLinear(random_weight(300, 9, 64), instruction_set=instruction_set)
    rows = random(150, 576)
    alone = torch.cat([linear(row) for row in rows.split(1)])
    for num_threads in (1, 2, 3):
        with torch_threads(num_threads):
            for count in (2, 7, 8, 64, 150):
                assert same_bits(linear(rows[:count]), alone[:count])


@each_instruction_set
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_spoils_its_own_row_and_all_of_it(
    instruction_set: InstructionSet, value: float
) -> None:
    linear = Int4PanelLinear(random_weight(70, 2, 32), instruction_set=instruction_set)
    rows = random(9, 64)
    right = linear(rows)
    rows[4, 33] = value
    result = linear(rows)
    others = [row for row in range(9) if row != 4]
    assert same_bits(result[others], right[others])
    assert result[4].isnan().all()


@each_instruction_set
def test_extreme_codes_rows_and_scales_do_not_overflow(instruction_set: InstructionSet) -> None:
    codes = torch.full((33, 1024), -8, dtype=torch.int8)
    codes[1::2] = 7
    scales = torch.tensor([2.0**-120, 1.0, 2.0**100, -1.0]).repeat(33, 2)
    weight = QuantisedWeight(codes=codes, scales=scales, bits=4, group_size=128)
    x = torch.stack((torch.full((1024,), 1.0), torch.full((1024,), -3e38), torch.zeros(1024)))
    linear = Int4PanelLinear(weight, instruction_set=instruction_set)
    assert same_bits(linear(x.bfloat16()), int4_linear_reference(x.bfloat16(), weight))


def test_every_device_without_the_library_has_the_same_bits() -> None:
    weight, bias, x = random_weight(40, 3, 32), random(40), random(6, 96)
    compiled = make_linear(weight, bias)
    with use_kernels("reference"):
        plain = make_linear(weight, bias)
    assert type(compiled) is Int4PanelLinear
    assert type(plain) is Int4Linear
    assert (compiled.is_packed, plain.is_packed) == (True, False)
    assert same_bits(compiled(x), plain(x))


def test_panels_take_4_bits_a_number_and_16_a_group() -> None:
    weight = random_weight(64, 4, 32)
    assert Int4PanelLinear(weight).packed_bytes == weight.num_bytes == 64 * 128 // 2 + 64 * 4 * 2


def test_no_rows_have_no_results() -> None:
    assert Int4PanelLinear(random_weight(40, 3, 32))(random(0, 96)).shape == (0, 40)


def test_other_weights_and_rows_are_refused() -> None:
    weight = random_weight(8, 2, 32)
    with pytest.raises(ValueError, match="8 bits is not one of 4"):
        Int4PanelLinear(rounded_to_int8(random(8, 64)))
    with pytest.raises(ValueError, match="8 bits, or with zero points, is not one of 4"):
        int4_linear_reference(random(3, 64), rounded_to_int8(random(8, 64)))
    with pytest.raises(ValueError, match="int4 in groups of 4 cannot be multiplied"):
        Int4PanelLinear(random_weight(8, 2, 4))
    with pytest.raises(ValueError, match=r"shape \[9\] is not \[8\]"):
        Int4PanelLinear(weight, random(9))
    with pytest.raises(ValueError, match=r"not torch.bfloat16 \[n, 64\]"):
        Int4PanelLinear(weight)(random(3, 65))
    with pytest.raises(ValueError, match="this processor runs up to"):
        Int4PanelLinear(weight, instruction_set=InstructionSet.NONE)
