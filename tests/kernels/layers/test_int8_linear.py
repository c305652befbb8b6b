"""Integer products without the compiled panels: the same bits as the reference."""

import pytest
import torch

from outrider.kernels.layers.int8_linear import Int8Linear
from outrider.kernels.layers.row_invariant_linear import make_linear
from outrider.kernels.quantised.rows import int8_linear_reference
from outrider.kernels.quantised.weight import rounded_to_int8
from tests.kernels.layers.bits import same_bits


@pytest.mark.parametrize(("num_rows", "outputs", "width"), [(1, 5, 3), (7, 33, 64), (70, 40, 257)])
def test_torch_s_integer_product_and_the_chosen_one_agree_with_the_reference(
    num_rows: int, outputs: int, width: int
) -> None:
    weight = rounded_to_int8(torch.randn(outputs, width).bfloat16())
    bias = torch.randn(outputs).bfloat16()
    x = torch.randn(num_rows, width).bfloat16()
    x[num_rows // 2, width // 2] = 40.0
    expected = int8_linear_reference(x, weight.codes, weight.scales.flatten(), bias)
    assert same_bits(Int8Linear(weight, bias)(x), expected)
    assert same_bits(make_linear(weight, bias)(x), expected)
    assert same_bits(make_linear(weight, bias, deterministic=True)(x), expected)


def test_a_row_without_a_finite_scale_is_nan_alone() -> None:
    weight = rounded_to_int8(torch.randn(8, 16).bfloat16())
    x = torch.randn(3, 16).bfloat16()
    clean = Int8Linear(weight)(x)
    x[1, 4] = torch.inf
    result = Int8Linear(weight)(x)
    assert result[1].isnan().all()
    assert same_bits(result[[0, 2]], clean[[0, 2]])


def test_no_rows_have_no_results() -> None:
    weight = rounded_to_int8(torch.randn(8, 16).bfloat16())
    assert make_linear(weight)(torch.empty(0, 16).bfloat16()).shape == (0, 8)
    assert Int8Linear(weight)(torch.empty(0, 16).bfloat16()).shape == (0, 8)
