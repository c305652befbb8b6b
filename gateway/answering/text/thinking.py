"""Tells thinking from answers: readers of a model's text, and the grammar in front of answers."""

from typing import Final, Literal, Protocol

from outrider.gateway.answering.text.channels import ChannelSplitter, behind_channels
from outrider.gateway.answering.text.grammar_parts import (
    GrammarPart,
    Literals,
    any_of,
    not_beginning_with,
    optional,
    sequence,
)
from outrider.gateway.answering.text.overlap import overlap
from outrider.gateway.answering.text.reasoning_formats import (
    THINK,
    ReasoningDialect,
    ReasoningFormat,
    TextKind,
    Thinking,
)
from outrider.gateway.contract.errors.tree import BadRequestError

# White space that models write between their thinking and the answer; it is dropped.
_GAP: Final[GrammarPart] = {"type": "regex", "pattern": r"\s{0,4}"}


class TextSplitter(Protocol):
    """Takes an answer's text piece by piece and tells thinking from content."""

    @property
    def is_thinking(self) -> bool:
        """True if the next text, unless it is a mark, is thinking."""

    @property
    def is_through(self) -> bool:
        """True if all text from here on is content, as it is."""

    def push(self, text: str) -> list[tuple[TextKind, str]]:
        """Return the pieces that can be released now, in order; no empty ones."""

    def flush(self) -> list[tuple[TextKind, str]]:
        """Return the text held back for a mark that never came."""


def behind_thinking(
    answer: GrammarPart,
    thinking: Thinking,
    dialect: ReasoningDialect,
    *,
    has_marks: bool = True,
) -> GrammarPart:
    """Return the grammar of an answer with the thinking in front of it.

    `has_marks`: the marks around answers may stand around this one. Where they are text and the
    answer is free, it may hold them anyhow.
    """
    form = dialect.format
    if thinking == "none":
        return answer
    literals = Literals(dialect.special_ids)
    before = [] if thinking == "open" else literals.parts(form.open)
    block = [*before, *literals.until(form.close), _GAP]
    if has_marks and form.answer_open:
        opening = optional(sequence([*literals.parts(form.answer_open), _GAP]))
        closing = optional(sequence([_GAP, *literals.parts(form.answer_close)]))
        answer = sequence([opening, answer, closing])
    if thinking != "possible":
        return sequence([*block, answer])
    if literals.is_special(form.open):
        return sequence([optional(sequence(block)), answer])
    return any_of([sequence([*block, answer]), not_beginning_with(form.open, answer)])


def check_thinking_ended(text: str, param: str, form: ReasoningFormat = THINK) -> None:
    """Raise BadRequestError for an answer to continue that breaks off inside its thinking."""
    text = text.strip()
    if text.startswith(form.open) and text != form.open and form.close not in text:
        raise BadRequestError(
            f"{param}: it ends inside a thinking block, which cannot be continued; end with "
            f"{form.open} to begin one, or close it with {form.close}.",
            param=param,
        )


class ThinkingSplitter:
    """Takes the text piece by piece; marks may be cut anywhere.

    A thinking block counts only at the start of an answer, or when the prompt opened it: an answer
    that merely mentions the mark is left alone. Marks and the white space after them are dropped.
    """

    def __init__(self, form: ReasoningFormat = THINK, *, opens_thinking: bool = False) -> None:
        """`opens_thinking`: the chat template already wrote the opening mark."""
        self._format = form
        self._state: Literal["start", "thinking", "mark", "answer"] = (
            "thinking" if opens_thinking else "start"
        )
        self._held = ""
        self._space: list[str] = []  # at the start, where a mark may follow
        self._skips_space = opens_thinking
        self._closing = form.answer_close if form.are_tokens else ""

    @property
    def is_thinking(self) -> bool:
        """True if the next text, unless it is a mark, is thinking."""
        return self._state == "thinking"

    @property
    def is_through(self) -> bool:
        """True if all text from here on is content, as it is."""
        return self._state == "answer" and not (self._skips_space or self._closing or self._held)

    def push(self, text: str) -> list[tuple[TextKind, str]]:
        """Return the pieces that can be released now, in order; no empty ones."""
        if self.is_through:
            return [("content", text)] if text else []
        pieces: list[tuple[TextKind, str]] = []
        self._held += text
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[tuple[TextKind, str]]:
        """Return the text held back for a mark that never came."""
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
        match self._state:
            case "start":
                return self._start()
            case "thinking":
                return self._think(pieces)
            case "mark":
                return self._mark()
            case "answer":
                return self._answer(pieces)

    def _start(self) -> bool:
        begun = self._held.lstrip()
        self._space.append(self._held[: len(self._held) - len(begun)])
        self._held = begun
        form = self._format
        mark = next((mark for mark in form.opens if begun.startswith(mark)), None)
        if mark is not None:
            self._held = begun.removeprefix(mark)
            self._space.clear()
            self._state, self._skips_space = "thinking", True
        elif form.answer_open and begun.startswith(form.answer_open):
            self._space.clear()
            self._state = "mark"
        elif any(mark.startswith(begun) for mark in (*form.opens, form.answer_open)):
            return False  # also white space only: a mark may follow
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
        closes = self._format.closes
        found = [(self._held.find(mark), mark) for mark in closes if mark in self._held]
        if found:
            end, mark = min(found)
            thought, self._held = self._held[:end], self._held[end + len(mark) :]
            self._state, self._skips_space = "mark", True
        else:
            end = len(self._held) - max(overlap(self._held, mark) for mark in closes)
            thought, self._held = self._held[:end], self._held[end:]
        if thought:
            pieces.append(("reasoning", thought))
        return bool(found)

    def _mark(self) -> bool:
        """Drop the mark in front of the answer, if there is one."""
        mark = self._format.answer_open
        if mark and self._held.startswith(mark):
            self._held = self._held.removeprefix(mark)
            self._skips_space = True
            self._closing = self._format.answer_close
        elif mark.startswith(self._held) and mark:
            return False
        self._state = "answer"
        return True

    def _answer(self, pieces: list[tuple[TextKind, str]]) -> bool:
        """Release the answer, without the mark behind it."""
        text, mark, rest = self._held, "", ""
        if self._closing:
            text, mark, rest = self._held.partition(self._closing)
            if mark:
                self._closing = ""
            else:
                num_held = overlap(text, self._closing)
                text, rest = text[: len(text) - num_held], text[len(text) - num_held :]
        if text:
            pieces.append(("content", text))
        self._held = rest
        return bool(mark and rest)


def make_splitter(dialect: ReasoningDialect, *, opens_thinking: bool = False) -> TextSplitter:
    """Return a reader of one answer. `opens_thinking`: the prompt ends inside a thought."""
    if dialect.format.has_channels:
        return ChannelSplitter(opens_thinking=opens_thinking)
    return ThinkingSplitter(dialect.format, opens_thinking=opens_thinking)


def behind_reasoning(
    answer: GrammarPart,
    thinking: Thinking,
    dialect: ReasoningDialect,
    *,
    is_framed: bool = False,
    has_marks: bool = True,
) -> GrammarPart:
    """Return the grammar of an answer with the reasoning in front of it.

    `is_framed`: the answer has headers of its own. `has_marks`: the marks around answers may stand
    around this one.
    """
    if dialect.format.has_channels:
        return behind_channels(answer, thinking, dialect, is_framed=is_framed)
    return behind_thinking(answer, thinking, dialect, has_marks=has_marks)
