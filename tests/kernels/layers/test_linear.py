import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import outrider.kernels.layers.linear
from outrider.kernels.layers.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    rows=st.sampled_from([0, 1, 2, 3, 8, 17, 33, 64, 130]),
    shape=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    has_bias=st.booleans(),
    pack=st.booleans(),
)
def test_equals_the_product(
    dtype: torch.dtype, rows: int, shape: tuple[int, int], has_bias: bool, pack: bool
) -> None:
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    x = torch.randn(rows, shape[1]).to(dtype)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected = expected + bias.double()
    linear = Linear(weight.clone(), bias, pack=pack)
    result = linear(x)
    assert result.shape == (rows, shape[0])
    assert result.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(
        result.double(), expected, atol=tolerance * shape[1] ** 0.5, rtol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_of_a_large_weight_are_the_rows_of_a_longer_product(
    dtype: torch.dtype, has_bias: bool
) -> None:
    weight = torch.randn(1030, 1024).to(dtype)
    bias = torch.randn(1030).to(dtype) if has_bias else None
    linear = Linear(weight.clone(), bias)
    x = torch.randn(5, 1024).to(dtype)
    x[3] = torch.nan
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for rows in range(6):
        result = linear(x[:rows])
        assert result.shape == (rows, 1030)
        torch.testing.assert_close(
            result.double(),
            expected[:rows],
            atol=0.3 if dtype == torch.bfloat16 else 1e-4,
            rtol=1e-2,
            equal_nan=True,
        )


def test_without_packing_operations_it_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS or with another device: the same result through the plain product."""
    monkeypatch.setattr(outrider.kernels.layers.linear, "can_pack_dtype", lambda dtype: False)
    weight = torch.randn(5, 4)
    linear = Linear(weight)
    assert not linear.is_packed
    x = torch.randn(3, 4)
    torch.testing.assert_close(linear(x), x @ weight.T)
