"""Integer products in Triton: the bits of the references, for any shape and any row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.layers.integer_linear import IntegerLinear, can_use_integer_tiles
from outrider.kernels.layers.row_invariant_linear import make_linear
from outrider.kernels.quantised.rows import int4_linear_reference, int8_linear_reference
from outrider.kernels.quantised.weight import QuantisedWeight, rounded_to_int4, rounded_to_int8
from outrider.kernels.triton_support import use_kernels
from tests.kernels.layers.bits import same_bits

pytestmark = pytest.mark.usefixtures("triton_kernels")


def reference(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if weight.bits == 4:
        return int4_linear_reference(x, weight, bias)
    return int8_linear_reference(x, weight.codes, weight.scales.flatten(), bias)


def a_weight(outputs: int, width: int, group_size: int | None, seed: int = 0) -> QuantisedWeight:
    """Of 8 bits without a group size, else of 4."""
    weight = torch.randn(outputs, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return rounded_to_int4(weight, group_size=group_size) if group_size else rounded_to_int8(weight)


@settings(max_examples=12, deadline=None)
@given(
    num_rows=st.sampled_from((1, 2, 16, 17, 64, 65, 70)),
    outputs=st.integers(1, 80),
    width=st.integers(1, 300),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_with_8_bits_have_the_reference_s_bits(
    device: torch.device, num_rows: int, outputs: int, width: int, has_bias: bool, seed: int
) -> None:
    weight = a_weight(outputs, width, None, seed)
    check(device, weight, num_rows, has_bias=has_bias)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    num_rows=st.sampled_from((1, 2, 16, 17, 64, 65, 70)),
    outputs=st.integers(1, 80),
    num_groups=st.integers(1, 5),
    group_size=st.sampled_from((32, 64, 128)),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_with_4_bits_have_the_reference_s_bits(
    device: torch.device,
    num_rows: int,
    outputs: int,
    num_groups: int,
    group_size: int,
    has_bias: bool,
    seed: int,
) -> None:
    weight = a_weight(outputs, num_groups * group_size, group_size, seed)
    check(device, weight, num_rows, has_bias=has_bias)


def check(device: torch.device, weight: QuantisedWeight, num_rows: int, *, has_bias: bool) -> None:
    outputs, width = weight.shape
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    # No subnormal numbers: Triton's interpreter reads those of bfloat16 wrongly.
    x = (torch.randn(num_rows, width) * 2.0 ** torch.randint(-90, 100, (num_rows, 1))).bfloat16()
    x[0] = 0.0
    x[num_rows // 2, width // 2] = 40.0
    linear = IntegerLinear(weight.to(device), None if bias is None else bias.to(device))
    assert same_bits(linear(x.to(device)).cpu(), reference(x, weight, bias))


@pytest.mark.slow_cases
@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_spoils_its_own_row_and_all_of_it(
    device: torch.device, group_size: int | None, value: float
) -> None:
    linear = IntegerLinear(a_weight(33, 96, group_size).to(device))
    rows = torch.randn(5, 96).bfloat16().to(device)
    right = linear(rows)
    rows[3, 40] = value
    result = linear(rows)
    assert result[3].isnan().all()
    assert same_bits(result[[0, 1, 2, 4]], right[[0, 1, 2, 4]])


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [None, 64])
def test_a_row_has_the_same_bits_alone_and_in_any_company(
    device: torch.device, group_size: int | None
) -> None:
    linear = IntegerLinear(a_weight(40, 192, group_size).to(device))
    rows = torch.randn(70, 192).bfloat16().to(device)
    alone = torch.cat([linear(rows[index : index + 1]) for index in (0, 3, 15)])
    for count in (16, 33, 70):
        assert same_bits(linear(rows[:count])[[0, 3, 15]], alone)


def test_rows_that_are_columns_of_a_wider_table_are_read_in_place(device: torch.device) -> None:
    weight = a_weight(9, 64, 32)
    table = torch.randn(4, 128).bfloat16()
    for x in (table[:, 64:], torch.randn(64, 4).bfloat16().t()):
        result = IntegerLinear(weight.to(device))(x.to(device))
        assert same_bits(result.cpu(), reference(x, weight))


@pytest.mark.parametrize("group_size", [None, 32])
def test_a_gpu_s_product_is_chosen_for_either_width(
    device: torch.device, group_size: int | None
) -> None:
    weight = a_weight(8, 64, group_size).to(device)
    for deterministic in (False, True):
        assert isinstance(make_linear(weight, deterministic=deterministic), IntegerLinear)
    assert IntegerLinear(weight)(torch.empty(0, 64).bfloat16().to(device)).shape == (0, 8)
    with use_kernels("reference"):
        assert not isinstance(make_linear(weight), IntegerLinear)


def test_groups_that_no_tile_fits_keep_torch_s_product(device: torch.device) -> None:
    weight = a_weight(8, 48, 16).to(device)
    assert not can_use_integer_tiles(weight)
    x = torch.randn(3, 48).bfloat16().to(device)
    assert same_bits(make_linear(weight)(x), reference(x, weight))
