import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.rms_norm import RmsNorm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(rows=st.integers(0, 9), width=st.integers(1, 70), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_equals_transformers(dtype: torch.dtype, rows: int, width: int, scale: float) -> None:
    theirs = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    weight = theirs.weight.detach()
    x = (torch.randn(rows, width) * scale).to(dtype)
    expected = theirs(x).detach()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for norm in (lambda x: rms_norm(x, weight, 1e-5), RmsNorm(weight, 1e-5)):
        result = norm(x)
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)

    residual = torch.randn(rows, width).to(dtype)
    total = residual + x
    normed = RmsNorm(weight, 1e-5).add(x, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, theirs(total).detach(), atol=tolerance, rtol=tolerance)


def test_a_weight_for_each_head() -> None:
    x = torch.randn(5, 3, 8)[:, :2]  # strided, as heads of a fused projection are
    weight = torch.randn(2, 8)
    result = RmsNorm(weight, 1e-6)(x)
    for head in range(2):
        torch.testing.assert_close(result[:, head], rms_norm(x[:, head], weight[head], 1e-6))


def test_large_values_do_not_overflow_in_half_precision() -> None:
    x = torch.full((1, 64), 60000.0, dtype=torch.float16)
    weight = torch.ones(64, dtype=torch.float16)
    assert torch.equal(rms_norm(x, weight, 1e-5), torch.ones_like(x))
    assert torch.equal(RmsNorm(weight, 1e-5)(x), torch.ones_like(x))
