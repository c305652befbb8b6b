"""Truncation against transformers' own logits processors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sample import log_target

Row = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p

ROWS = st.tuples(
    st.sampled_from([0.05, 0.5, 0.8, 1.0, 1.3, 3.0]),
    st.sampled_from([0, 1, 2, 5, 40, 300, 10_000]),
    st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0]),
)


def ours(logits: Tensor, rows: list[Row]) -> Tensor:
    temperature, top_k, top_p, min_p = torch.tensor(rows, dtype=torch.float32).T.contiguous()
    return log_target(logits, temperature, top_k.to(torch.int64), top_p, min_p)


def theirs(logits: Tensor, row: Row) -> Tensor:
    temperature, top_k, top_p, min_p = row
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k > 0:
        steps.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        steps.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        steps.append(MinPLogitsWarper(min_p))
    return steps(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0]


@given(
    rows=st.lists(ROWS, min_size=1, max_size=6),
    vocab_size=st.sampled_from([1, 2, 7, 255, 256, 257, 700]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    seed=st.integers(0, 2**32),
)
def test_equals_transformers_in_every_row(
    rows: list[Row], vocab_size: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(len(rows), vocab_size, generator=generator)
    scores = ours(logits, rows)
    for index, row in enumerate(rows):
        expected = theirs(logits[index], row).log_softmax(-1).exp()
        probs = scores[index].log_softmax(-1).exp()
        # Whether a token on the very border of top-p or min-p stays depends on the last bit.
        differing = (probs > 0) != (expected > 0)
        assert int(differing.sum()) <= int(row[2] < 1.0) + int(row[3] > 0.0)
        if not differing.any():
            torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-7)


def test_a_nucleus_wider_than_the_sorted_part_is_whole() -> None:
    logits = torch.linspace(0.0, 0.5, 4000)[torch.randperm(4000)]
    for row in ((1.0, 0, 0.9, 0.0), (0.7, 0, 0.5, 0.0), (1.0, 3500, 0.9, 0.0)):
        kept = ours(logits[None], [row])[0].isfinite()
        expected = theirs(logits, row).isfinite()
        assert kept.sum() > 1000
        assert abs(int(kept.sum()) - int(expected.sum())) <= 1
        assert logits[kept].min() >= logits[~kept].max()


def test_a_top_p_of_one_cuts_nothing_beside_top_k() -> None:
    logits = torch.tensor([[0.0, -3.0, -18.0, -40.0, -80.0]])  # sums reach 1 at the third token
    for rows in ([(1.0, 4, 1.0, 0.0)], [(1.0, 4, 1.0, 1e-38)]):
        assert int(ours(logits, rows)[0].isfinite().sum()) == 4


def test_rows_do_not_see_each_other() -> None:
    logits = torch.randn(4, 600)
    rows: list[Row] = [
        (1.0, 0, 1.0, 0.0), (0.8, 400, 0.95, 0.01), (1.5, 0, 0.99, 0.0), (1.0, 3, 1.0, 0.0),
    ]  # fmt: skip
    together = ours(logits, rows)
    for index, row in enumerate(rows):
        alone = ours(logits[index : index + 1], [row])[0]
        torch.testing.assert_close(together[index], alone)
    assert together[0].isfinite().all()  # a plain row stays plain beside truncated ones
    assert int(together[3].isfinite().sum()) == 3


def test_equal_logits_at_the_border_all_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for row in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.8, 0.0)):
        assert ours(logits, [row])[0].isfinite().tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("row", [(1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 1.0)])
def test_the_likeliest_token_always_stays(row: Row) -> None:
    logits = torch.randn(1, 500)
    kept = ours(logits, [row])[0].isfinite()
    assert kept.nonzero().flatten().tolist() == [int(logits.argmax())]


@pytest.mark.parametrize("row", [(0.7, 0, 1.0, 0.0), (1.0, 2, 0.9, 0.1), (1.0, 0, 0.99, 0.0)])
def test_forbidden_tokens_stay_forbidden(row: Row) -> None:
    logits = torch.tensor([[0.5, float("-inf"), 1.0, float("-inf")]])
    scores = ours(logits, [row])[0]
    assert not scores.isnan().any()
    assert scores[[1, 3]].tolist() == [float("-inf")] * 2


@pytest.mark.parametrize("temperature", [1e-3, 1e-6])
@pytest.mark.parametrize("truncation", [(0, 1.0, 0.0), (5, 0.9, 0.1)])
def test_a_low_temperature_is_greedy(
    temperature: float, truncation: tuple[int, float, float]
) -> None:
    logits = 8 * torch.randn(3, 300)
    scores = ours(logits, [(temperature, *truncation)] * 3)
    assert not scores.isnan().any()
    assert torch.equal(scores.argmax(-1), logits.argmax(-1))
