"""Texts that repeat in the compiled library against their reference: the same, to the last bit."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft.text import repeats
from outrider.draft.text.compiled_repeats import CompiledIndex, CompiledRepeats
from outrider.draft.text.suffix_index import Repeats, SuffixIndex
from outrider.draft.trees.guess import Guess
from outrider.kernels.cpu.text_library import TextLibrary, text_library

pytestmark = pytest.mark.skipif(text_library() is None, reason="the library was not built")

MOST = 4  # branches
texts = st.lists(st.integers(0, 3), max_size=40)


def library() -> TextLibrary:
    found = text_library()
    assert found is not None
    return found


@dataclass
class Pair:
    """The same text twice, and the same others to look in."""

    reference: Repeats = field(default_factory=Repeats)
    compiled: CompiledRepeats = field(default_factory=lambda: CompiledRepeats.begin(library()))
    others: tuple[SuffixIndex, ...] = ()
    compiled_others: tuple[CompiledIndex, ...] = ()

    def remember(self, documents: list[list[int]]) -> None:
        """Look in one more text, before those that there are."""
        other, compiled = SuffixIndex(), CompiledIndex(library())
        for document in documents:
            for index in (other, compiled):
                index.extend(document)
                index.end_document()
        self.others = (other, *self.others)[:2]
        self.compiled_others = (compiled, *self.compiled_others)[:2]


def check(pairs: list[Pair], new: list[list[int]], depths: list[int]) -> list[list[Guess]]:
    """Look for all at once, in both ways; return what was found."""
    found = repeats.look_all(
        [pair.compiled for pair in pairs],
        new,
        [pair.compiled_others for pair in pairs],
        depths,
        MOST,
    )
    right = repeats.look_all(
        [pair.reference for pair in pairs], new, [pair.others for pair in pairs], depths, MOST
    )
    assert found == right
    are_sure = repeats.is_any_sure(
        [pair.compiled for pair in pairs],
        [[]] * len(pairs),
        [pair.compiled_others for pair in pairs],
    )
    assert are_sure == any(pair.reference.is_sure(pair.others) for pair in pairs)
    return found


@given(
    documents=st.lists(texts, max_size=5),
    older=st.lists(texts, max_size=3),
    pieces=st.lists(texts, min_size=1, max_size=6),
    depth=st.integers(0, 40),
)
@settings(max_examples=200)
def test_random_texts_and_others_to_look_in(
    documents: list[list[int]], older: list[list[int]], pieces: list[list[int]], depth: int
) -> None:
    """A text that grows by pieces, whose last match is remembered from step to step."""
    pair = Pair()
    pair.remember(older)
    pair.remember(documents)
    for piece in pieces:
        check([pair], [piece], [depth])


@pytest.mark.parametrize("num_words", [2, 5, 40, 5000])
def test_many_texts_at_once_for_long(num_words: int) -> None:
    """Texts of phrases, so that there are long matches, votes that split, and copies of copies."""
    rng = random.Random(num_words)
    phrases = [[rng.randrange(num_words) for _ in range(rng.randrange(1, 12))] for _ in range(9)]

    def write(count: int) -> list[int]:
        return [token for _ in range(count) for token in rng.choice(phrases)]

    pairs = [Pair() for _ in range(5)]
    num_branches = 0
    for step in range(120):
        if step % 20 == 7:
            rng.choice(pairs).remember([write(30), write(3)])
        new = [write(rng.randrange(3) if step else 60) for _ in pairs]
        found = check(pairs, new, [rng.choice([1, 7, 32]) for _ in pairs])
        num_branches = max(num_branches, *map(len, found))
    assert num_branches == MOST


def test_an_index_that_goes_is_no_hint_for_one_in_its_place() -> None:
    """It may lie at the same address."""
    pair = Pair()
    for number in range(50):
        pair.remember([[number, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
        check([pair], [[4, 5, 6]], [8])


def test_a_text_takes_some_fifty_bytes_a_token() -> None:
    """A tenant's answers may be many."""
    import resource

    rng, index = random.Random(1), CompiledIndex(library())
    tokens = [rng.randrange(50_000) for _ in range(1_000_000)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index.extend(tokens)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_without_the_library_python_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "text_library", lambda: None)
    text = repeats.new_repeats()
    assert isinstance(text, Repeats)
    assert isinstance(repeats.new_index(), SuffixIndex)
    (found,) = repeats.look_all([text], [[1, 2, 3, 1, 2]], [()], [4], MOST)
    assert found[0].token_ids == [3, 1, 2, 3]
