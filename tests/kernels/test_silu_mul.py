import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.silu_mul import silu_mul


@given(rows=st.integers(0, 7), width=st.integers(1, 40))
def test_gate_is_the_first_half(rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width)
    before = x.clone()
    gate, up = x[:, :width].double(), x[:, width:].double()
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_mul(x).double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(x, before)
