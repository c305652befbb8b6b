"""Truncation against transformers' own logits processors; the best tokens against the scores."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.kernels.sampling import sample as module
from outrider.kernels.sampling import truncation_floor
from outrider.kernels.sampling.gumbel_noise import gumbel_noise, row_key
from outrider.kernels.sampling.sample import SamplingRows, log_target, perturb, top_tokens
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels

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


# ---- the best tokens --------------------------------------------------------------------------

SIZES = st.sampled_from([1, 2, 7, 255, 257, 700])
CHOICES = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="there is no triton")),
]


@pytest.fixture(scope="module", autouse=True)
def small_chunks(device: torch.device) -> Iterator[None]:
    """The interpreter takes a vocabulary of hundreds for one of many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(module, "_CHUNK", 128)
            patch.setattr(truncation_floor, "_CHUNK", 256)
            patch.setattr(truncation_floor, "_CAPACITY", 256)
        yield


@contextmanager
def kernels(choice: KernelChoice) -> Iterator[None]:
    """Run these; what is allocated without a value is not a number."""
    torch.use_deterministic_algorithms(choice == "triton")
    try:
        with use_kernels(choice):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def rows_of(rows: list[Row], device: torch.device, *, seed: int = 0) -> SamplingRows:
    temperature, top_k, top_p, min_p = torch.tensor(rows).reshape(-1, 4).T.contiguous()
    keys = [row_key(seed, 1, position) for position in range(len(rows))]
    return SamplingRows(
        temperature=temperature.to(device),
        top_k=top_k.to(torch.int32).to(device),
        top_p=top_p.to(device),
        min_p=min_p.to(device),
        noise_keys=torch.tensor(keys, dtype=torch.int32).reshape(-1, 2).to(device),
        has_sampled=any(row[0] > 0 for row in rows),
        has_truncation=any(row[1] > 0 or row[2] < 1 or row[3] > 0 for row in rows if row[0] > 0),
    )


def scores_by_definition(logits: Tensor, rows: SamplingRows, floor: Tensor) -> Tensor:
    """Row by row: the logits, or log target + noise; all on the CPU."""
    scores = logits.clone()
    for index, temperature in enumerate(rows.temperature.tolist()):
        if temperature > 0:
            scores[index] /= temperature
            scores[index, scores[index] < floor[index]] = -torch.inf
            keys = rows.noise_keys[index : index + 1].cpu()
            scores[index] += gumbel_noise(keys, logits.shape[1])[0]
    return scores


MIXED_ROWS = st.lists(st.just((0.0, 5, 0.5, 0.5)) | ROWS, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
@settings(max_examples=15)
@given(
    rows=MIXED_ROWS,
    vocab_size=SIZES,
    num_tokens=st.integers(1, 8),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    seed=st.integers(0, 2**32),
)
def test_the_best_tokens_are_those_of_the_definition(
    device: torch.device,
    choice: str,
    rows: list[Row],
    vocab_size: int,
    num_tokens: int,
    spread: float,
    seed: int,
) -> None:
    num_tokens = min(num_tokens, vocab_size)
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(len(rows), vocab_size, generator=generator)
    logits[:, 3::7] = -torch.inf
    own = rows_of(rows, device, seed=seed)
    with_probs = seed % 2 == 0
    with kernels(choice):
        top = top_tokens(logits.to(device), own, num_tokens, with_probs=with_probs)
        # Tested by itself: whether a token on the very border stays depends on the last bit.
        floor = truncation_floor.truncation_floor(logits.to(device), own).cpu()
    scores = scores_by_definition(logits, own, floor)
    best = scores.sort(descending=True, stable=True).values[:, :num_tokens]
    torch.testing.assert_close(top.scores.cpu(), best, rtol=1e-5, atol=1e-5)
    # Rounding may change places, but not what a token's score is.
    torch.testing.assert_close(scores.gather(1, top.token_ids.cpu()), top.scores.cpu())
    assert all(len(set(ids)) == num_tokens for ids in top.token_ids.tolist())
    assert (top.probs is not None) == with_probs
    if top.probs is not None:
        expected = (top.scores.cpu() - scores.logsumexp(-1, keepdim=True)).exp()
        torch.testing.assert_close(top.probs.cpu(), expected)


@pytest.mark.parametrize("choice", CHOICES)
def test_of_equal_scores_the_lowest_token_is_the_best(device: torch.device, choice: str) -> None:
    logits = torch.zeros(3, 400, device=device)
    logits[0, [7, 130, 131, 390]] = 2.0
    logits[1, 5] = -0.0
    logits[1, 3:] *= -1.0
    logits[2] = -torch.inf
    logits[2, 399] = 1.0
    own = rows_of([(0.0, 0, 1.0, 0.0)] * 3, device)
    with kernels(choice):
        top = top_tokens(logits, own, 5)
        first = top_tokens(logits, own, 1)
    assert top.token_ids.tolist() == [[7, 130, 131, 390, 0], [0, 1, 2, 3, 4], [399, 0, 1, 2, 3]]
    assert first.token_ids.tolist() == [[7], [0], [399]]
    assert first.scores.tolist() == [[2.0], [0.0], [1.0]]


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_some_tokens_of_a_larger_vocabulary_are_ranked_as_among_all(
    device: torch.device, choice: str
) -> None:
    """In any order; of equal scores the lowest token of the larger vocabulary is the best."""
    rows: list[Row] = [(0.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(3))[:300].to(device)
    logits = torch.randn(3, len(ids), device=device)
    logits[2] = 0.0
    wide = torch.full((3, 400), -torch.inf, device=device).index_copy_(1, ids, logits)
    own = rows_of(rows, device)
    with kernels(choice):
        found = top_tokens(logits, own, 4, with_probs=True, ids=ids)
        expected = top_tokens(wide, own, 4, with_probs=True)
        assert torch.equal(top_tokens(logits, own, 1, ids=ids).token_ids, found.token_ids[:, :1])
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.scores, expected.scores)
    torch.testing.assert_close(found.probs, expected.probs)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
def test_a_row_is_the_same_in_any_company(device: torch.device, choice: str) -> None:
    rows: list[Row] = [(0.0, 0, 1.0, 0.0), (0.7, 5, 0.9, 0.0), (1.0, 0, 1.0, 0.0)]
    logits = torch.randn(3, 300, device=device)
    own = rows_of(rows, device)
    with kernels(choice):
        together = top_tokens(logits, own, 3, with_probs=True)
        wide = torch.cat((logits, logits), dim=1)[:, :300]  # strided rows
        strided = top_tokens(wide, own, 3, with_probs=True)
        for index in range(3):
            part = slice(index, index + 1)
            alone = SamplingRows(
                temperature=own.temperature[part],
                top_k=own.top_k[part],
                top_p=own.top_p[part],
                min_p=own.min_p[part],
                noise_keys=own.noise_keys[part],
                has_sampled=True,
                has_truncation=True,
            )
            top = top_tokens(logits[part], alone, 3, with_probs=True)
            for name in ("token_ids", "scores", "probs"):
                assert torch.equal(getattr(top, name)[0], getattr(together, name)[index])
                assert torch.equal(getattr(strided, name), getattr(together, name))


@pytest.mark.slow_cases
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("with_noise", [False, True])
def test_whole_rows_are_those_of_the_definition(
    device: torch.device, choice: str, with_noise: bool
) -> None:
    rows: list[Row] = [(0.0, 3, 0.5, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.3, 0, 1, 0)]
    logits = torch.randn(4, 300)
    own = rows_of(rows, device)
    with kernels(choice):
        scores = perturb(logits.to(device), own, with_noise=with_noise).cpu()
    expected = torch.cat((logits[:1], ours(logits[1:], rows[1:])))
    if with_noise:
        expected[1:] += gumbel_noise(own.noise_keys[1:].cpu(), 300)
    torch.testing.assert_close(scores, expected)
    assert torch.equal(scores[0], logits[0])
    assert int(scores[1].isfinite().sum()) == 5


@pytest.mark.parametrize("choice", CHOICES)
def test_greedy_rows_alone_need_no_scores(device: torch.device, choice: str) -> None:
    logits = torch.randn(2, 50, device=device)
    own = rows_of([(0.0, 3, 0.5, 0.0)] * 2, device)
    with kernels(choice):
        assert perturb(logits, own) is logits
        assert torch.equal(top_tokens(logits, own, 1).token_ids[:, 0], logits.argmax(-1))


def test_too_many_tokens_are_refused(device: torch.device) -> None:
    own = rows_of([(0.0, 0, 1.0, 0.0)], device)
    for num_tokens, vocab_size in ((0, 9), (9, 100), (4, 3)):
        with pytest.raises(ValueError, match=f"num_tokens={num_tokens}"):
            top_tokens(torch.randn(1, vocab_size, device=device), own, num_tokens)
