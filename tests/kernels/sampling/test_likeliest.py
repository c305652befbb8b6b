"""Ranked rows against torch's softmax and topk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.sampling.likeliest import likeliest_tokens
from outrider.kernels.triton_support import use_kernels


@settings(max_examples=60)
@given(
    num_rows=st.integers(0, 20),
    vocab_size=st.sampled_from([1, 5, 16, 127, 128, 129, 1000, 5003]),
    count=st.integers(1, 16),
    spread=st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 1 << 30),
)
def test_equals_softmax_and_topk(
    num_rows: int, vocab_size: int, count: int, spread: float, masked: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, vocab_size, generator=generator) * spread + 5.0
    hidden = torch.rand(num_rows, vocab_size, generator=generator) < masked
    hidden[:, -1] = False  # a grammar leaves at least one token
    scores.masked_fill_(hidden, -torch.inf)
    count = min(count, vocab_size)
    found = likeliest_tokens(scores, count)
    expected = scores.softmax(-1).topk(count)
    torch.testing.assert_close(found.probs, expected.values, rtol=1e-5, atol=1e-7)
    own = scores.softmax(-1).gather(1, found.token_ids)
    torch.testing.assert_close(own, expected.values, rtol=1e-5, atol=1e-7)
    for row in found.token_ids.tolist():
        assert len(set(row)) == count


def test_rows_of_a_wider_tensor() -> None:
    scores = torch.randn(6, 40)[:, 3:30]
    found = likeliest_tokens(scores, 4)
    assert found.token_ids.equal(scores.topk(4).indices)


@pytest.mark.skipif(product_support().library is None, reason="needs the compiled library")
def test_one_row_in_any_company() -> None:
    scores = torch.randn(40, 3001) * 4
    together = likeliest_tokens(scores, 8)
    for row in (0, 7, 39):
        alone = likeliest_tokens(scores[row : row + 1], 8)
        assert alone.probs[0].equal(together.probs[row])
        assert alone.token_ids[0].equal(together.token_ids[row])


def test_the_reference_is_torchs() -> None:
    scores = torch.randn(3, 50)
    with use_kernels("reference"):
        found = likeliest_tokens(scores, 2)
    assert found.probs.equal(scores.softmax(-1).topk(2).values)
