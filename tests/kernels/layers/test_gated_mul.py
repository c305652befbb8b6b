import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.layers.gated_mul import Activation, gated_mul
from outrider.kernels.triton_support import KernelChoice, use_kernels


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["reference", "triton"])
@given(rows=st.integers(0, 7), width=st.sampled_from([1, 2, 7, 40, 1024, 1300]))
def test_gate_is_the_first_half(
    device: torch.device, kind: KernelChoice, rows: int, width: int
) -> None:
    x = torch.randn(rows, 2 * width, device=device)
    before = x.clone()
    gate, up = x[:, :width].double(), x[:, width:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    with use_kernels(kind):
        result = gated_mul(x)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_rounds_once(device: torch.device, dtype: torch.dtype) -> None:
    x = (torch.randn(50, 2 * 333, device=device) * 3).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    with use_kernels("triton"):
        result = gated_mul(x)
    assert result.dtype == dtype
    half_a_place = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(result.double(), expected, atol=1e-7, rtol=1.01 * half_a_place)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_gates_at_the_ends_of_the_range(device: torch.device, kind: KernelChoice) -> None:
    gates = torch.tensor([-3e4, -100.0, -88.0, 0.0, 88.0, 100.0, 3e4], device=device)
    with use_kernels(kind):
        result = gated_mul(torch.cat((gates, torch.full_like(gates, 2.0)))[None])[0]
    torch.testing.assert_close(result, 2 * gates.clamp(min=0), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(("activation", "approximate"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gelu_is_torchs(
    device: torch.device, kind: KernelChoice, activation: Activation, approximate: str
) -> None:
    gate = torch.cat((torch.randn(300) * 3, torch.tensor([-3e4, -9.0, 0.0, 9.0, 3e4])))
    up = torch.randn(len(gate))
    expected = F.gelu(gate.double(), approximate=approximate) * up.double()
    with use_kernels(kind):
        result = gated_mul(torch.cat((gate, up))[None].to(device), activation)[0]
    torch.testing.assert_close(result.cpu().double(), expected, atol=1e-5, rtol=1e-5)
