"""Longest matches against brute force, and votes that add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.text.suffix_index import (
    BREAK,
    MAX_MATCH,
    Continuation,
    Match,
    SuffixIndex,
    continuation,
    vote,
)
from outrider.draft.trees.guess import Guess

EVERYWHERE = 10_000  # candidates: more than there are places

texts = st.lists(st.integers(0, 3), max_size=60)


def common_end(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[-1 - length] == right[-1 - length]:
        length += 1
    return length


def longest_match(documents: list[list[int]], text: list[int]) -> int:
    """By trying every place that something follows."""
    ends = (document[:end] for document in documents for end in range(1, len(document)))
    return max((common_end(end, text) for end in ends), default=0)


def in_pieces(index: SuffixIndex, text: list[int], sizes: list[int]) -> None:
    """Extend the index by pieces of the given sizes, cycled."""
    at, number = 0, 0
    while at < len(text):
        size = sizes[number % len(sizes)]
        index.extend(text[at : at + size])
        at, number = at + size, number + 1


def check_match(tokens: list[int], text: list[int], match: Match) -> None:
    before = tokens[: match.position + 1]
    if BREAK in before:
        before = before[len(before) - before[::-1].index(BREAK) :]
    assert match.length == min(common_end(before, text), MAX_MATCH)
    assert tokens[match.position + 1] != BREAK


@given(text=texts, sizes=st.lists(st.sampled_from([1, 2, 5, 9, 48, 60]), min_size=1, max_size=4))
def test_the_longest_earlier_occurrence(text: list[int], sizes: list[int]) -> None:
    """However the text came in."""
    index = SuffixIndex(max_candidates=EVERYWHERE)
    in_pieces(index, text, sizes)
    matches = index.find(text, index.end_keys)
    longest = longest_match([text], text) if text else 0
    assert max((match.length for match in matches), default=0) == (longest if longest > 1 else 0)
    for match in matches:
        check_match(text, text, match)
    positions = [match.position for match in matches]
    assert positions == sorted(set(positions), reverse=True)


@given(documents=st.lists(texts, max_size=6), text=texts)
def test_other_texts_and_none_across_their_borders(
    documents: list[list[int]], text: list[int]
) -> None:
    index = SuffixIndex(max_candidates=EVERYWHERE)
    for document in documents:
        index.extend(document)
        index.end_document()
    own = SuffixIndex()
    own.extend(text)
    matches = index.find(text, own.end_keys)
    longest = longest_match(documents, text) if text else 0
    assert max((match.length for match in matches), default=0) == (longest if longest > 1 else 0)
    for match in matches:
        check_match(index.token_ids, text, match)
        follows = continuation(index, match, max_depth=30, repeats=False).token_ids
        assert follows
        assert BREAK not in follows
        end = match.position + 1
        assert index.token_ids[end : end + len(follows)] == follows


def test_few_candidates_are_the_latest_and_the_hint_finds_the_right_one() -> None:
    """A phrase that is everywhere hides where the text is; the last match knows."""
    phrase = [1, 2, 3, 4, 5, 6, 7, 8]
    blocks = [[*phrase, 100 + number] for number in range(50)]
    source = [token for block in blocks for token in block]
    text = [*source, *blocks[10], *phrase]
    index = SuffixIndex(max_candidates=4)
    index.extend(text)
    assert {match.length for match in index.find(text, index.end_keys)} == {8}
    place = 11 * 9 + len(phrase) - 1
    (first, *_) = index.find(text, index.end_keys, place)
    assert first.position == place
    assert first.length == 17  # two phrases and the number between them
    assert continuation(index, first, max_depth=1, repeats=True).token_ids == [111]


@pytest.mark.parametrize("hint", [0, 1, 5, 10**6])
def test_a_hint_that_is_wrong_or_known_changes_nothing(hint: int) -> None:
    text = [1, 2, 3, 9, 1, 2]
    index = SuffixIndex()
    index.extend(text)
    assert index.find(text, index.end_keys, hint) == [Match(2, 1)]


def test_a_match_is_measured_up_to_a_bound() -> None:
    text = [7] * 500
    index = SuffixIndex(max_candidates=3)
    index.extend(text)
    assert [match.length for match in index.find(text, index.end_keys)] == [MAX_MATCH] * 3


def test_a_copy_that_runs_into_itself_goes_on() -> None:
    text = [9, 1, 2, 3, 1, 2, 3]
    index = SuffixIndex()
    index.extend(text)
    (match,) = index.find(text, index.end_keys)
    assert match == Match(3, 3)
    assert continuation(index, match, max_depth=8, repeats=True).token_ids == [
        1,
        2,
        3,
        1,
        2,
        3,
        1,
        2,
    ]


def test_long_matches_go_further() -> None:
    index = SuffixIndex()
    index.extend(list(range(100)))
    assert len(continuation(index, Match(2, 20), max_depth=50, repeats=False).token_ids) == 8
    assert len(continuation(index, Match(12, 20), max_depth=50, repeats=False).token_ids) == 48
    assert len(continuation(index, Match(64, 20), max_depth=50, repeats=False).token_ids) == 50


# ---- votes ----------------------------------------------------------------------------------


@given(
    continuations=st.lists(
        st.builds(
            Continuation,
            st.integers(2, MAX_MATCH),
            st.lists(st.integers(0, 2), min_size=1, max_size=8),
        ),
        min_size=1,
        max_size=8,
    ),
    max_branches=st.integers(1, 6),
)
def test_guesses_are_a_tree_of_probabilities(
    continuations: list[Continuation], max_branches: int
) -> None:
    """Chains are real continuations; a path has one probability; siblings' sum is at most 1."""
    guesses = vote(continuations, max_branches)
    assert 1 <= len(guesses) <= max_branches
    edges: dict[tuple[int, ...], float] = {}
    for guess in guesses:
        assert any(guess.token_ids == one.token_ids for one in continuations)
        for depth, edge_prob in enumerate(guess.edge_probs, 1):
            assert 0.0 < edge_prob < 1.0
            path = tuple(guess.token_ids[:depth])
            assert edges.setdefault(path, edge_prob) == pytest.approx(edge_prob)
        assert len(guess.edge_probs) == len(guess.token_ids)
    for parent in {path[:-1] for path in edges}:
        children = [p for path, p in edges.items() if path[:-1] == parent]
        assert sum(children) <= 1.0 + 1e-9
    chains = [tuple(guess.token_ids) for guess in guesses]
    assert len(set(chains)) == len(chains)


def first_edge(*continuations: Continuation) -> Guess:
    return vote(list(continuations), 4)[0]


def test_longer_matches_are_trusted_more() -> None:
    probs = [first_edge(Continuation(length, [5])).edge_probs[0] for length in (2, 3, 6, 12, 30)]
    assert probs == sorted(probs)
    assert probs[0] < 0.4
    assert probs[3] > 0.9


def test_agreement_counts_and_dissent_is_a_branch() -> None:
    alone = first_edge(Continuation(4, [5, 6]))
    split = vote([Continuation(4, [5, 6]), Continuation(4, [5, 7]), Continuation(4, [5, 6])], 4)
    assert [guess.token_ids for guess in split] == [[5, 6], [5, 7]]
    assert split[0].edge_probs[0] == pytest.approx(alone.edge_probs[0])
    assert split[1].edge_probs[1] < split[0].edge_probs[1] < alone.edge_probs[1]


def test_the_latest_wins_a_tie_and_the_longest_wins() -> None:
    assert first_edge(Continuation(4, [5]), Continuation(4, [6])).token_ids == [5]
    outvoted = vote([Continuation(20, [5]), *[Continuation(3, [6])] * 5], 4)
    assert outvoted[0].token_ids == [5]
    assert outvoted[0].edge_probs[0] > 0.8
