"""The border found without a sort, against the sorted one and against its definition."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.cpu.product_library import product_support
from outrider.kernels.sampling import truncation_floor as module
from outrider.kernels.sampling.sampling_rows import SamplingRows
from outrider.kernels.sampling.truncation_floor import truncation_floor
from outrider.kernels.triton_support import KernelChoice, triton, use_kernels

needs_triton = pytest.mark.skipif(triton is None, reason="there is no triton for this system")
needs_library = pytest.mark.skipif(
    product_support().library is None, reason="needs the compiled library"
)
IMPLEMENTATIONS = pytest.mark.parametrize(
    "choice",
    [
        pytest.param("triton", marks=[needs_triton, pytest.mark.slow]),
        pytest.param("auto", marks=needs_library),
    ],
)

Row = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p

ROWS = st.tuples(
    st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.3, 3.0]),
    st.sampled_from([0, 1, 2, 5, 40, 300, 10_000]),
    st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0]),
)


@pytest.fixture(scope="module", autouse=True)
def small_blocks(device: torch.device) -> Iterator[None]:
    """The interpreter takes a vocabulary of hundreds for one of many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(module, "_CHUNK", 256)
            patch.setattr(module, "_CAPACITY", 256)
        yield


def rows_of(rows: list[Row], device: torch.device) -> SamplingRows:
    temperature, top_k, top_p, min_p = torch.tensor(rows, device=device).T.contiguous()
    return SamplingRows(
        temperature=temperature,
        top_k=top_k.to(torch.int32),
        top_p=top_p,
        min_p=min_p,
        noise_keys=torch.zeros(len(rows), 2, dtype=torch.int32, device=device),
        has_sampled=True,
        has_truncation=True,
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is allocated here without a value with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def floor_by(choice: KernelChoice, logits: Tensor, rows: SamplingRows) -> Tensor:
    with use_kernels(choice), poisoned():
        return truncation_floor(logits, rows)


def kept(logits: Tensor, rows: SamplingRows, floor: Tensor) -> Tensor:
    scores = logits / rows.temperature.where(rows.temperature > 0, 1.0)[:, None]
    return scores >= floor[:, None]


def kept_by_definition(logits: Tensor, row: Row) -> tuple[set[int], float]:
    """Token ids that stay, in double precision, and how near the nearest decision was."""
    temperature, top_k, top_p, min_p = row
    if temperature == 0.0:
        return set(range(len(logits))), 1.0
    scores = (logits / temperature).double()
    probs = scores.softmax(-1)
    margin = 1.0
    stay = torch.ones_like(scores, dtype=torch.bool)
    if 0 < top_k < len(scores):
        stay = scores >= scores.sort(descending=True).values[top_k - 1]
    if top_p < 1.0:
        total = scores.sort(descending=True).values[: top_k or None].sub(scores.max()).exp().sum()
        share = (scores - scores.max()).exp() / total
        before = (share[None, :] * (scores[None, :] > scores[:, None])).sum(-1)
        margin = min([margin, *(before - top_p)[before > 0].abs().tolist()])
        stay &= (before < top_p) | (scores == scores.max())
    if min_p > 0:
        lead = probs / probs.max() / min_p
        margin = min([margin, *(lead - 1.0)[lead < 1.0].abs().tolist()])
        stay &= lead >= 1.0 - 1e-6
    return set(stay.nonzero().flatten().tolist()), margin


@IMPLEMENTATIONS
@settings(max_examples=15)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    vocab_size=st.sampled_from([1, 2, 7, 255, 257, 700]),
    spread=st.sampled_from([0.01, 1.0, 6.0, 40.0]),
    has_ties=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_keeps_what_the_sorted_one_keeps(
    device: torch.device,
    choice: KernelChoice,
    rows: list[Row],
    vocab_size: int,
    spread: float,
    has_ties: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(len(rows), vocab_size, generator=generator)
    if has_ties:
        logits = logits.round(decimals=0 if spread > 0.1 else 2)
    logits[:, 1::5] = -torch.inf  # forbidden
    logits = logits.to(device)
    own = rows_of(rows, device)
    floor = floor_by(choice, logits, own)
    with use_kernels("reference"):
        right = truncation_floor(logits, own)
    found, expected = kept(logits, own, floor), kept(logits, own, right)
    for index, row in enumerate(rows):
        if has_ties and row[2] < 1.0:  # a tie at the border is one decision about many tokens
            continue
        # Whether a token on the very border of top-p or min-p stays depends on the last bit.
        differing = int((found[index] != expected[index]).sum())
        assert differing <= int(row[2] < 1.0) + int(row[3] > 0.0)
        assert found[index, logits[index].argmax()]


CASES: list[tuple[Row, float]] = [
    ((1.0, 50, 1.0, 0.0), 3.0),
    ((1.0, 50, 0.9, 0.0), 3.0),
    ((0.7, 0, 0.9, 0.0), 3.0),
    ((1.0, 0, 0.5, 0.0), 0.01),  # half of all tokens
    ((1.0, 400, 1.0, 0.0), 0.01),
    ((1.0, 400, 0.5, 0.0), 1.0),
    ((1.3, 500, 0.97, 0.01), 40.0),
    ((1.0, 500, 1.0, 0.0), 40.0),  # far below the lowest level
    ((1.0, 3, 0.999, 0.0), 0.001),  # above the highest one
    ((1.0, 0, 1e-6, 0.0), 1.0),
    ((1.0, 0, 1.0, 0.05), 1.0),
    ((1.0, 1, 0.9, 0.5), 1.0),
    ((0.0, 3, 0.5, 0.5), 1.0),  # greedy
    ((1.0, 0, 1.0, 0.0), 1.0),
]


@IMPLEMENTATIONS
@pytest.mark.parametrize("capacity", [1024, 256], ids=["collected", "all logits"])
def test_keeps_what_the_definition_keeps(
    device: torch.device, choice: KernelChoice, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 256)  # several chunks, the last one not full
    monkeypatch.setattr(module, "_CAPACITY", capacity)
    torch.manual_seed(1)
    num_tokens = 611
    logits = torch.stack([spread * torch.randn(num_tokens) for _, spread in CASES])
    rows = rows_of([row for row, _ in CASES], device)
    floor = floor_by(choice, logits.to(device), rows)
    found = kept(logits.to(device), rows, floor).cpu()
    for index, (row, _) in enumerate(CASES):
        expected, margin = kept_by_definition(logits[index], row)
        assert margin > 1e-5  # no decision hangs on rounding
        assert set(found[index].nonzero().flatten().tolist()) == expected, row


@needs_library
@pytest.mark.parametrize("spread", [0.01, 1.0, 40.0])
def test_a_border_among_thousands_of_candidates(spread: float) -> None:
    """The compiled search, which sorts 512 scores at most, narrows the range down before."""
    torch.manual_seed(2)
    logits = spread * torch.randn(1, 4001)
    for row in ((1.0, 2500, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 3000, 0.9, 0.0)):
        rows = rows_of([row], torch.device("cpu"))
        expected, margin = kept_by_definition(logits[0], row)
        found = kept(logits, rows, truncation_floor(logits, rows))[0].nonzero().flatten().tolist()
        assert len(expected ^ set(found)) <= (margin < 1e-6)


@IMPLEMENTATIONS
def test_equal_scores_at_the_border_all_stay(device: torch.device, choice: KernelChoice) -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]], device=device).repeat(3, 1)
    rows = rows_of([(1.0, 2, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 3, 0.9, 0.0)], device)
    found = kept(logits, rows, floor_by(choice, logits, rows))
    assert found.tolist() == [[True, True, True, True, False]] * 3


@IMPLEMENTATIONS
def test_a_row_is_the_same_alone_and_between_others(
    device: torch.device, choice: KernelChoice
) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 300, device=device)
    parameters: list[Row] = [
        (1.0, 0, 0.9, 0.0), (0.8, 40, 0.95, 0.01), (0.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0),
    ]  # fmt: skip
    together = floor_by(choice, logits, rows_of(parameters, device))
    wide = torch.cat((logits, torch.randn(4, 7, device=device)), dim=1)[:, :300]  # strided rows
    assert torch.equal(floor_by(choice, wide, rows_of(parameters, device)), together)
    for index, row in enumerate(parameters):
        alone = floor_by(choice, logits[index : index + 1], rows_of([row], device))
        assert torch.equal(alone[0], together[index])
    assert together.isfinite().tolist() == [True, True, False, True]


@pytest.mark.parametrize("choice", ["reference", pytest.param("triton", marks=needs_triton)])
def test_nothing_is_cut_where_the_host_says_so(device: torch.device, choice: KernelChoice) -> None:
    rows = rows_of([(1.0, 0, 1.0, 0.0)] * 2, device)
    plain = SamplingRows.of_words(
        torch.zeros(24, dtype=torch.int32, device=device),
        2,
        has_sampled=True,
        has_truncation=False,
    )
    logits = torch.randn(2, 9, device=device)
    with use_kernels(choice):
        assert truncation_floor(logits, plain).tolist() == [-torch.inf] * 2
        assert truncation_floor(logits, rows).tolist() == [-torch.inf] * 2
        assert truncation_floor(logits[:0], rows_of([(1.0, 2, 1.0, 0.0)], device)).shape == (0,)


@IMPLEMENTATIONS
def test_a_row_without_a_possible_token_keeps_all(
    device: torch.device, choice: KernelChoice
) -> None:
    logits = torch.full((3, 40), -torch.inf, device=device)
    rows = rows_of([(1.0, 2, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 2, 0.5, 0.1)], device)
    assert kept(logits, rows, floor_by(choice, logits, rows)).all()
