"""Rules: against dense counts, incremental against from scratch, rows alone against together."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.logit_rules import build_rules
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import SamplingParams, ThinkingBudget
from outrider.verifier.sampling import RowGroup, process_logits
from tests.laws.options import changed_logits

VOCAB_SIZE = 23

# Few of them, so that marks of thinking are written by chance.
ids = st.lists(st.integers(0, 2) | st.integers(0, VOCAB_SIZE - 1), max_size=12)
marks = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3)
budgets = st.builds(
    ThinkingBudget,
    max_tokens=st.integers(0, 8),
    opens=marks.map(tuple),
    closes=marks.filter(len).map(tuple),
)
penalties = st.sampled_from([0.0, 0.0, -2.0, 0.3, 0.8, 1.5])
samplings = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.3]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB_SIZE + 5), st.sampled_from([-100.0, -1.5, 0.0, 4.0]), max_size=4
    ).map(lambda bias: tuple(bias.items())),
    min_tokens=st.integers(0, 20),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=3).map(tuple),
    thinking=st.none() | budgets,
)


def random_logits(num_rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def slowly(
    logits: Tensor, sampling: SamplingParams, token_ids: list[int], num_prompt: int,
    paths: list[list[int]],
) -> Tensor:  # fmt: skip
    prompt, answer = token_ids[:num_prompt], token_ids[num_prompt:]
    return torch.stack(
        [
            changed_logits(row.clone(), prompt, [*answer, *path], sampling)
            for row, path in zip(logits, paths, strict=True)
        ]
    )


def through(
    rules: list[object], logits: Tensor, token_ids: list[int], paths: list[list[int]]
) -> Tensor:
    rows = logits.clone()
    for rule in rules:
        rule.apply(rows, token_ids, paths)  # type: ignore[attr-defined]
    return rows


@given(
    sampling=samplings,
    prompt=ids.filter(len),
    pieces=st.lists(ids, min_size=1, max_size=4),
    paths=st.lists(ids, min_size=1, max_size=5),
    vocab_size=st.sampled_from([VOCAB_SIZE, 11, 40]),
    seed=st.integers(0, 2**32),
)
def test_equals_dense_counts_as_the_text_grows(
    sampling: SamplingParams,
    prompt: list[int],
    pieces: list[list[int]],
    paths: list[list[int]],
    vocab_size: int,
    seed: int,
) -> None:
    """Also in a narrower and in a wider vocabulary than that of the text, and after a new start."""
    rules = build_rules(sampling, num_prompt_tokens=len(prompt))
    token_ids = list(prompt)
    for number, piece in enumerate([*pieces, None, *pieces[::-1]]):
        if piece is None:
            del token_ids[len(prompt) :]
        else:
            token_ids += piece
        logits = random_logits(len(paths), seed + number, vocab_size)
        expected = slowly(logits, sampling, token_ids, len(prompt), paths)
        torch.testing.assert_close(through(rules, logits, token_ids, paths), expected)


@given(
    sampling=samplings,
    token_ids=ids.filter(lambda tokens: len(tokens) > 2),
    paths=st.lists(ids, min_size=2, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_a_row_gets_the_same_bits_in_any_company(
    sampling: SamplingParams, token_ids: list[int], paths: list[list[int]], seed: int
) -> None:
    """Alone, among other rows, and as the last row of plain decoding: path moved into the text."""
    logits = random_logits(len(paths), seed)
    together = through(build_rules(sampling, num_prompt_tokens=2), logits, token_ids, paths)
    for row, path in enumerate(paths):
        single = logits[row : row + 1]
        alone = build_rules(sampling, num_prompt_tokens=2)
        assert torch.equal(through(alone, single, token_ids, [path])[0], together[row])
        assert torch.equal(through(alone, single, [*token_ids, *path], [[]])[0], together[row])


def test_defaults_need_no_rule() -> None:
    assert build_rules(SamplingParams(max_tokens=5), num_prompt_tokens=3) == []
    stops = SamplingParams(max_tokens=5, stop_token_ids=(1, 2))
    assert build_rules(stops, num_prompt_tokens=3) == []
    without_stops = SamplingParams(max_tokens=5, min_tokens=3)
    assert build_rules(without_stops, num_prompt_tokens=3) == []


@pytest.mark.parametrize(("num_output", "num_banned_rows"), [(0, 3), (3, 2), (4, 1), (5, 0)])
def test_min_tokens_counts_the_path(num_output: int, num_banned_rows: int) -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=5, stop_token_ids=(4, 6))
    rules = build_rules(sampling, num_prompt_tokens=2)
    logits = random_logits(3, 0)
    rows = through(rules, logits, [4, 6, *range(num_output)], [[], [7], [7, 4]])
    banned = (rows == float("-inf")).nonzero().tolist()
    assert banned == [[row, token] for row in range(num_banned_rows) for token in (4, 6)]
    kept = rows.isfinite()
    assert torch.equal(rows[kept], logits[kept])


def test_many_tokens_outgrow_the_first_columns() -> None:
    sampling = SamplingParams(max_tokens=500, repetition_penalty=1.3, frequency_penalty=0.5)
    rng = random.Random(0)
    prompt = [rng.randrange(2000) for _ in range(300)]
    rules = build_rules(sampling, num_prompt_tokens=len(prompt))
    token_ids = list(prompt)
    for number in range(6):
        token_ids += [rng.randrange(2000) for _ in range(1 + 40 * number)]
        paths = [[], [5], [5, token_ids[-1]], [1999, 1999, 1999]]
        logits = random_logits(4, number, 2000)
        expected = slowly(logits, sampling, token_ids, len(prompt), paths)
        torch.testing.assert_close(through(rules, logits, token_ids, paths), expected)


# ---- many sequences at once ------------------------------------------------------------------


def sequence_of(number: int, token_ids: list[int], sampling: SamplingParams) -> Sequence:
    request = EngineRequest(
        request_id=str(number), prompt_token_ids=(1, 2, 3), tier="large", sampling=sampling
    )
    return Sequence(
        request=request,
        tier="large",
        view=None,  # type: ignore[arg-type] - no cache is read here
        noise=SequenceNoise(sampling, "large", vocab_size=VOCAB_SIZE),
        submitted_s=0.0,
        token_ids=[1, 2, 3, *token_ids],
        rules=build_rules(sampling, num_prompt_tokens=3),
    )


class _BanFive:
    """A rule of another kind."""

    def apply(self, logits: Tensor, token_ids: list[int], paths: list[list[int]]) -> None:
        logits[:, 5] = float("-inf")


def test_sequences_keep_to_their_own_rows() -> None:
    samplings = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, presence_penalty=1.0),
        SamplingParams(max_tokens=9, repetition_penalty=1.5, logit_bias=((4, 2.0), (99, 1.0))),
        SamplingParams(max_tokens=9, min_tokens=8, stop_token_ids=(7,)),
        SamplingParams(max_tokens=9, frequency_penalty=1.0),
    ]
    paths = [[[], [9]], [[], [9], [9, 9]], [[8]], [[], [7]], []]
    texts = [[5, 5], [4, 5, 4], [4, 6], [7, 7], [3]]
    sequences = [
        sequence_of(number, text, sampling)
        for number, (text, sampling) in enumerate(zip(texts, samplings, strict=True))
    ]
    sequences[1].rules.append(_BanFive())
    groups = [
        RowGroup(sequence=sequence, depths=[len(path) for path in own], paths=lambda own=own: own)
        for sequence, own in zip(sequences, paths, strict=True)
    ]
    logits = random_logits(sum(map(len, paths)), 1)
    before = logits.clone()
    processed = process_logits(logits, groups)
    assert torch.equal(logits, before)  # log-probabilities are read from them
    start = 0
    for sequence, own in zip(sequences, paths, strict=True):
        end = start + len(own)
        if own:
            expected = slowly(
                before[start:end], sequence.request.sampling, sequence.token_ids, 3, own
            )
            if sequence is sequences[1]:
                expected[:, 5] = float("-inf")
            torch.testing.assert_close(processed[start:end], expected)
        start = end


def test_without_rules_nothing_is_copied() -> None:
    sequence = sequence_of(0, [5], SamplingParams(max_tokens=9))
    late = sequence_of(1, [5] * 4, SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=(7,)))
    logits = random_logits(3, 1)
    groups = [
        RowGroup(sequence=sequence, depths=[0, 1], paths=lambda: [[], [3]]),
        RowGroup(sequence=late, depths=[0], paths=lambda: [[]]),
    ]
    assert process_logits(logits, groups) is logits


def test_a_mark_lies_behind_the_one_that_begins_the_thinking() -> None:
    budget = ThinkingBudget(max_tokens=2, opens=((1,),), closes=((1, 2), (7, 8)))
    rules = build_rules(SamplingParams(max_tokens=9, thinking=budget), num_prompt_tokens=1)
    paths = [[], [1], [1, 2], [1, 2, 5], [1, 2, 7], [1, 1, 2], [1, 5, 6, 1, 2], [3, 1, 5, 6]]
    rows = through(rules, random_logits(len(paths), seed=0), [1], paths)
    allowed = [row.isfinite().nonzero()[:, 0].tolist() for row in rows]
    everything = [*range(VOCAB_SIZE)]
    assert allowed == [everything] * 3 + [[1], [8]] + [everything] * 3
