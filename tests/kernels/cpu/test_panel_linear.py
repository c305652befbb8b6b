"""The compiled products against torch's, and the bits of a row in any company."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu.panel_linear import (
    INT8_MAX_IN_FEATURES,
    Int8PanelLinear,
    PanelLinear,
    can_use_panels,
)
from outrider.kernels.cpu.product_library import InstructionSet, product_support
from outrider.kernels.quantised.rows import int8_linear_reference
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int8
from tests.kernels.cpu.instruction_sets import each_instruction_set
from tests.kernels.layers.bits import same_bits, torch_threads

# Odd, below a panel and a step, around panels (32 columns), blocks (256 of k) and several of each.
OUT_FEATURES = [1, 5, 31, 32, 33, 64, 97, 200]
IN_FEATURES = [1, 2, 3, 5, 8, 31, 127, 256, 257, 300, 517, 1030]
NUM_ROWS = [1, 2, 3, 4, 5, 13, 14, 15, 28, 29, 33, 63, 64, 65, 130]

pytestmark = pytest.mark.skipif(
    product_support().library is None, reason=f"compiled products: {product_support().detail}"
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random_int8(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def int8_weight(codes: Tensor, scales: Tensor) -> QuantisedWeight:
    return QuantisedWeight(
        codes=codes, scales=scales.unsqueeze(1), bits=8, group_size=codes.shape[1]
    )


def int8_linear(out_features: int, in_features: int, chosen: InstructionSet) -> Int8PanelLinear:
    scales = torch.rand(out_features, generator=torch.Generator().manual_seed(3))
    weight = int8_weight(random_int8(out_features, in_features), scales)
    return Int8PanelLinear(weight, random(out_features, seed=4), instruction_set=chosen)


def bfloat16_linear(out_features: int, in_features: int, chosen: InstructionSet) -> PanelLinear:
    weight = random(out_features, in_features)
    return PanelLinear(weight, random(out_features, seed=4), instruction_set=chosen)


MAKERS = [bfloat16_linear, int8_linear]
Maker = Callable[[int, int, InstructionSet], PanelLinear]


@each_instruction_set
@given(
    num_rows=st.sampled_from([0, *NUM_ROWS]),
    out_features=st.sampled_from(OUT_FEATURES),
    in_features=st.sampled_from(IN_FEATURES),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_bfloat16_equals_the_product(
    instruction_set: InstructionSet,
    num_rows: int,
    out_features: int,
    in_features: int,
    has_bias: bool,
    seed: int,
) -> None:
    weight, x = random(out_features, in_features, seed=seed), random(num_rows, in_features)
    bias = random(out_features, seed=seed + 1) if has_bias else None
    result = PanelLinear(weight, bias, instruction_set=instruction_set)(x)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert result.dtype == torch.bfloat16
    # Rounding to bfloat16 is half a unit of 2^-8; float32 sums of `in_features` terms add little.
    torch.testing.assert_close(
        result.double(), expected, rtol=2**-8, atol=1e-5 * in_features**0.5, check_dtype=False
    )


@each_instruction_set
@given(
    num_rows=st.sampled_from([0, *NUM_ROWS]),
    out_features=st.sampled_from(OUT_FEATURES),
    in_features=st.sampled_from(IN_FEATURES),
    has_bias=st.booleans(),
    exponents=st.tuples(st.integers(-60, 60), st.integers(-60, 60)),
    seed=st.integers(0, 1 << 20),
)
def test_int8_has_the_bits_of_its_reference(
    instruction_set: InstructionSet,
    num_rows: int,
    out_features: int,
    in_features: int,
    has_bias: bool,
    exponents: tuple[int, int],
    seed: int,
) -> None:
    weight = random_int8(out_features, in_features, seed=seed)
    scales = torch.rand(out_features) * 2.0 ** exponents[0]
    bias = random(out_features, seed=seed + 1) if has_bias else None
    x = random(num_rows, in_features, seed=seed + 2) * 2.0 ** exponents[1]
    x[num_rows // 2 :: 7] = 0
    result = Int8PanelLinear(int8_weight(weight, scales), bias, instruction_set=instruction_set)(x)
    assert same_bits(result, int8_linear_reference(x, weight, scales, bias))


@each_instruction_set
@pytest.mark.parametrize("maker", MAKERS)
def test_a_row_has_the_same_bits_alone_in_company_and_with_two_threads(
    instruction_set: InstructionSet, maker: Maker
) -> None:
    for out_features, in_features in ((33, 7), (600, 517)):
        linear = maker(out_features, in_features, instruction_set)
        x = random(150, in_features, seed=1)
        with torch_threads(1):
            whole = linear(x)
            alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
        assert same_bits(alone, whole)
        with torch_threads(2):
            for count in NUM_ROWS:
                for start in (0, 17):
                    window = slice(start, start + count)
                    assert same_bits(linear(x[window]), whole[window]), (count, start)


@each_instruction_set
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_in_their_row(
    instruction_set: InstructionSet, maker: Maker, value: float
) -> None:
    linear = maker(40, 300, instruction_set)
    x = random(20, 300, seed=1)
    clean = linear(x)
    x[7, 250] = value
    result = linear(x)
    assert not result[7].isfinite().any()
    others = [row for row in range(20) if row != 7]
    assert same_bits(result[others], clean[others])
    assert clean.isfinite().all()


@each_instruction_set
def test_extremes_of_bfloat16(instruction_set: InstructionSet) -> None:
    largest = torch.finfo(torch.bfloat16).max
    weight = torch.tensor([[1.0, 1.0], [1.0, -1.0], [0.0, 0.0], [-1.0, 0.0]]).bfloat16()
    x = torch.tensor([[largest, largest], [largest, 1.0], [0.0, -0.0]]).bfloat16()
    result = PanelLinear(weight, instruction_set=instruction_set)(x)
    assert result[0].tolist() == [float("inf"), 0.0, 0.0, -largest]
    assert result[1].tolist() == [largest, largest, 0.0, -largest]
    assert result[2].tolist() == [0.0] * 4


@each_instruction_set
def test_int8_sums_as_large_as_they_get(instruction_set: InstructionSet) -> None:
    """Every product -127 * 128 or 127 * 127: partial sums of unsigned rows pass 2^31."""
    weight = torch.full((3, INT8_MAX_IN_FEATURES), -128, dtype=torch.int8)
    weight[1] = 127
    scales = torch.ones(3)
    x = torch.ones(5, INT8_MAX_IN_FEATURES, dtype=torch.bfloat16)
    x[1::2] = -1
    result = Int8PanelLinear(int8_weight(weight, scales), instruction_set=instruction_set)(x)
    assert same_bits(result, int8_linear_reference(x, weight, scales))
    assert result[0].float().abs().min() > 127 / 128 * INT8_MAX_IN_FEATURES


@each_instruction_set
def test_rows_that_begin_anywhere_in_memory(instruction_set: InstructionSet) -> None:
    for maker in MAKERS:
        linear = maker(40, 30, instruction_set)
        x = random(12, 30, seed=1)
        shifted = torch.empty(12 * 30 + 1, dtype=torch.bfloat16)[1:].view(12, 30).copy_(x)
        strided = torch.cat((x, x), 1)[:, 30:]
        assert same_bits(linear(shifted), linear(x))
        assert same_bits(linear(strided), linear(x))


def test_weights_are_held_once() -> None:
    weight = random(96, 256)
    assert PanelLinear(weight).packed_bytes == weight.nbytes
    quantised = rounded_to_int8(weight)
    assert Int8PanelLinear(quantised).packed_bytes == quantised.codes.nbytes


def test_wrong_arguments_are_refused_before_any_memory_is_read() -> None:
    linear = PanelLinear(random(8, 16))
    for x in (random(3, 15), random(16), random(3, 16).float()):
        with pytest.raises(ValueError, match=r"not torch.bfloat16 \[n, 16\]"):
            linear(x)
    with pytest.raises(ValueError, match=r"\[7\] is not \[8\]"):
        PanelLinear(random(8, 16), random(7))
    with pytest.raises(ValueError, match="float32 cannot be held"):
        PanelLinear(random(8, 16).float())
    with pytest.raises(ValueError, match="could overflow"):
        Int8PanelLinear(int8_weight(random_int8(1, INT8_MAX_IN_FEATURES + 1), torch.ones(1)))
    grouped = QuantisedWeight(
        codes=random_int8(8, 16), scales=torch.ones(8, 2), bits=8, group_size=8
    )
    with pytest.raises(ValueError, match="with a scale for each output"):
        Int8PanelLinear(grouped)
    with pytest.raises(ValueError, match="not NONE"):
        PanelLinear(random(8, 16), instruction_set=InstructionSet.NONE)


def test_panels_hold_bfloat16_on_a_cpu_only() -> None:
    assert can_use_panels(random(8, 16))
    assert not can_use_panels(random(8, 16).float())
    assert not can_use_panels(torch.empty(0, 16, dtype=torch.bfloat16))
    assert not can_use_panels(torch.empty(8, 16, dtype=torch.bfloat16, device="meta"))
