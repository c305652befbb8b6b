"""Splits a reasoning model's text into thinking and answer."""

from typing import Any, Final, Literal

from gateway.errors.tree import BadRequestError

OPEN_TAG: Final = "<think>"
CLOSE_TAG: Final = "</think>"

TextKind = Literal["reasoning", "content"]
# The block before the answer: the prompt opened it, the model may open it, or there is none.
Thinking = Literal["open", "possible", "none"]

# White space that models write between their thinking and the answer; it is dropped.
_GAP: Final = r"\s{0,4}"


def behind_thinking(answer: dict[str, Any], thinking: Thinking) -> dict[str, Any]:
    """A structural tag's format: free text up to the closing tag, then the answer's format."""
    if thinking == "none":
        return answer
    begin = "" if thinking == "open" else OPEN_TAG
    thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": CLOSE_TAG}
    block: dict[str, Any] = {
        "type": "sequence",
        "elements": [thought, {"type": "regex", "pattern": _GAP}],
    }
    if thinking == "possible":
        block = {"type": "optional", "content": block}
    return {"type": "sequence", "elements": [block, answer]}


def check_thinking_ended(text: str, param: str) -> None:
    """Raise BadRequestError for an answer to continue that breaks off inside its thinking."""
    text = text.strip()
    if text.startswith(OPEN_TAG) and text != OPEN_TAG and CLOSE_TAG not in text:
        raise BadRequestError(
            f"{param}: it ends inside a thinking block, which cannot be continued; end with "
            f"{OPEN_TAG} to begin one, or close it with {CLOSE_TAG}.",
            param=param,
        )


class ThinkingSplitter:
    """Takes the text piece by piece; tags may be cut anywhere.

    A thinking block counts only at the start of an answer, or when the prompt opened it: an answer
    that merely mentions the tag is left alone. Tags and the white space after them are dropped.
    """

    def __init__(self, *, opens_thinking: bool = False) -> None:
        """`opens_thinking`: the chat template already wrote the opening tag."""
        self._state: Literal["start", "thinking", "answer"] = (
            "thinking" if opens_thinking else "start"
        )
        self._held = ""
        self._space: list[str] = []  # at the start, where a tag may follow
        self._skips_space = opens_thinking

    @property
    def is_thinking(self) -> bool:
        """True if the next text, unless it is a tag, is thinking."""
        return self._state == "thinking"

    def push(self, text: str) -> list[tuple[TextKind, str]]:
        """Return the pieces that can be released now, in order; no empty ones."""
        if self._state == "answer" and not self._skips_space:
            return [("content", text)] if text else []
        pieces: list[tuple[TextKind, str]] = []
        self._held += text
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[tuple[TextKind, str]]:
        """Return the text held back for a tag that never came."""
        held, self._held = self._with_space(), ""
        if not held:
            return []
        return [("reasoning" if self.is_thinking else "content", held)]

    def _advance(self, pieces: list[tuple[TextKind, str]]) -> bool:
        """Make one change of state; False when more text is needed."""
        if self._skips_space:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._skips_space = False
        if self._state == "start":
            return self._start(pieces)
        if self._state == "thinking":
            return self._think(pieces)
        if self._held:
            pieces.append(("content", self._held))
            self._held = ""
        return False

    def _start(self, pieces: list[tuple[TextKind, str]]) -> bool:
        begun = self._held.lstrip()
        self._space.append(self._held[: len(self._held) - len(begun)])
        self._held = begun
        if begun.startswith(OPEN_TAG):
            self._held = begun.removeprefix(OPEN_TAG)
            self._space.clear()
            self._state, self._skips_space = "thinking", True
        elif OPEN_TAG.startswith(begun):
            return False  # also white space only: a tag may follow
        else:
            self._held = self._with_space()
            self._state = "answer"
        return True

    def _with_space(self) -> str:
        """Take the held text, with the white space in front of it."""
        self._space.append(self._held)
        held = "".join(self._space)
        self._space.clear()
        return held

    def _think(self, pieces: list[tuple[TextKind, str]]) -> bool:
        thought, tag, rest = self._held.partition(CLOSE_TAG)
        if tag:
            self._held = rest
            self._state, self._skips_space = "answer", True
        else:
            num_held = overlap(self._held, CLOSE_TAG)
            thought = self._held[: len(self._held) - num_held]
            self._held = self._held[len(thought) :]
        if thought:
            pieces.append(("reasoning", thought))
        return bool(tag)


def overlap(text: str, word: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `word`."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
