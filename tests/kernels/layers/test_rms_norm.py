import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.layers.rms_norm import RmsNorm, add_rms_norm, rms_norm
from outrider.kernels.triton_support import KernelChoice, use_kernels
from tests.sizes import compiled_sizes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# For values near 1, a last place of the type and a bit.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(0, 9), width=st.integers(1, 70), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_equals_transformers(dtype: torch.dtype, rows: int, width: int, scale: float) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs = llama.LlamaRMSNorm(width, eps=1e-5).to(dtype)
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


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(
    rows=st.integers(0, 5),
    width=compiled_sizes([1, 3, 64, 100, 1000, 2048, 5120], [3, 1000, 5120]),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
def test_kernel_rounds_once(
    device: torch.device, dtype: torch.dtype, rows: int, width: int, scale: float
) -> None:
    """Against float64, so that only the last rounding is left."""
    # parts of wider rows, as a fused projection gives them
    x = (torch.randn(rows, width + 3, device=device) * scale).to(dtype)[:, :width]
    weight = torch.randn(width, device=device).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    with use_kernels("triton"):
        result = rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    assert result.shape == x.shape
    torch.testing.assert_close(result.double(), exact, atol=1e-6, rtol=TOLERANCE[dtype] / 2)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["reference", "triton"])
@settings(max_examples=20)
@given(rows=st.integers(0, 5), width=compiled_sizes([1, 33, 256, 1000], [33, 256]))
def test_the_sum_that_is_normalised_is_the_one_that_is_kept(
    device: torch.device, kind: KernelChoice, dtype: torch.dtype, rows: int, width: int
) -> None:
    x = torch.randn(rows, width, device=device).to(dtype)
    residual = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    before, total = x.clone(), residual + x
    with use_kernels(kind):
        normed = add_rms_norm(x, residual, weight, 1e-6)
        alone = rms_norm(total, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    assert torch.equal(normed, alone)


def test_kernel_with_a_weight_for_each_head(device: torch.device) -> None:
    x = torch.randn(5, 3, 8, device=device)[:, :2]
    weight = torch.randn(2, 8, device=device)
    with use_kernels("triton"):
        result = rms_norm(x, weight, 1e-6)
        torch.testing.assert_close(result, RmsNorm(weight, 1e-6)(x))
        with pytest.raises(ValueError, match="does not fit"):
            rms_norm(x, weight.repeat(2, 1), 1e-6)


@pytest.mark.parametrize("width", [100, 4096])
def test_a_row_has_the_same_bits_in_any_company(device: torch.device, width: int) -> None:
    x = torch.randn(9, width, device=device).to(torch.bfloat16)
    weight = torch.randn(width, device=device).to(torch.bfloat16)
    with use_kernels("triton"):
        together = rms_norm(x, weight, 1e-6)
        for row in range(9):
            assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])
