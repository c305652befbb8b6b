import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.layers.embedding import embed_tokens
from outrider.kernels.triton_support import KernelChoice, use_kernels


@pytest.mark.parametrize("kind", ["reference", "triton"])
@given(
    ids=st.lists(st.integers(0, 12), max_size=6),
    width=st.sampled_from([1, 5, 64, 2048, 2100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_takes_rows(
    device: torch.device, kind: KernelChoice, ids: list[int], width: int, dtype: torch.dtype
) -> None:
    table = torch.randn(13, width, device=device).to(dtype)
    index = torch.tensor(ids, dtype=torch.int64, device=device)
    with use_kernels(kind):
        result = embed_tokens(table, index)
    assert result.dtype == dtype
    assert torch.equal(result, table[index])


def test_kernel_gives_zeros_for_invalid_tokens(device: torch.device) -> None:
    table = torch.randn(5, 8, device=device)
    with use_kernels("triton"):
        result = embed_tokens(table[1:4], torch.tensor([-1, 3, 2, 1 << 40], device=device))
    assert torch.equal(result[2], table[3])
    assert not result[[0, 1, 3]].any()


def test_an_unknown_token_is_an_error_on_the_cpu() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        embed_tokens(torch.randn(5, 8), torch.tensor([5]))
