"""Stop strings and thinking tags, cut anywhere, against implementations that see the whole text."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.answering.text.stopping import StopMatcher
from outrider.gateway.answering.text.thinking import ThinkingSplitter

letters = st.text(alphabet="ab.", max_size=8)
stops = st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), min_size=1, max_size=4)


def stream(pieces: list[str], words: list[str]) -> tuple[str, list[str], bool]:
    """Return the whole text, the text after each piece, and whether it was cut."""
    matcher = StopMatcher(words)
    text, sent, states = "", "", []
    for piece in pieces:
        text += piece
        cut = matcher.push(piece)
        if cut is not None:
            return text[:cut], [*states, text[:cut]], True
        sent = text[: len(text) - matcher.num_held]
        states.append(sent)
    return text, states, False


@given(pieces=st.lists(letters, max_size=12), words=stops)
def test_against_a_search_in_the_whole_text(pieces: list[str], words: list[str]) -> None:
    text, states, was_cut = stream(pieces, words)
    seen = ""
    for piece in pieces:
        seen += piece
        starts = [seen.find(word) for word in words if word in seen]
        if starts:
            assert was_cut
            assert text == seen[: min(starts)]
            break
    else:
        assert not was_cut
        assert text == seen
    # What was sent is never taken back, and never reaches into a stop string.
    assert all(text.startswith(state) for state in states)


@given(pieces=st.lists(letters, max_size=12), words=stops)
def test_nothing_is_held_back_without_need(pieces: list[str], words: list[str]) -> None:
    matcher = StopMatcher(words)
    text = ""
    for piece in pieces:
        text += piece
        if matcher.push(piece) is not None:
            return
        ends = [n for word in words for n in range(1, len(word)) if text.endswith(word[:n])]
        assert matcher.num_held == max(ends, default=0)


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def run_splitter(pieces: list[str], opens_thinking: bool) -> tuple[str, str]:
    splitter = ThinkingSplitter(opens_thinking=opens_thinking)
    out = [item for piece in pieces for item in splitter.push(piece)] + splitter.flush()
    assert all(text for _, text in out)
    joined = {"reasoning": "", "content": ""}
    for kind, text in out:
        joined[kind] += text
    return joined["reasoning"], joined["content"]


def whole_split(text: str, opens_thinking: bool) -> tuple[str, str]:
    """The specification, on the whole text."""
    if not opens_thinking:
        begun = re.match(r"\s*<think>", text)
        if not begun:
            return "", text
        text = text[begun.end() :]
    thought, tag, answer = text.lstrip().partition("</think>")
    return thought, answer.lstrip() if tag else ""


texts = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "<", "fox"]),
    max_size=10,
).map("".join)


@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=8), opens=st.booleans())
def test_thinking_wherever_the_text_is_cut(text: str, cuts: list[int], opens: bool) -> None:
    assert run_splitter(split(text, cuts), opens) == whole_split(text, opens)


def test_thinking_is_released_as_it_comes() -> None:
    splitter = ThinkingSplitter()
    assert splitter.push("<th") == []
    assert splitter.push("ink>\nWell, ") == [("reasoning", "Well, ")]
    assert splitter.push("a </") == [("reasoning", "a ")]
    assert splitter.push("b></think") == [("reasoning", "</b>")]
    assert splitter.push(">\n\nYes") == [("content", "Yes")]
    assert splitter.push(" <think>") == [("content", " <think>")]
