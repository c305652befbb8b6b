"""Answers that are a list of messages with headers: the harmony format of gpt-oss.

`<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>ANSWER`; a
call is `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>`.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from outrider.gateway.answering.text.grammar_parts import (
    ANY_TEXT,
    GrammarPart,
    Literals,
    any_of,
    sequence,
    star,
)
from outrider.gateway.answering.text.overlap import overlap
from outrider.gateway.answering.text.reasoning_formats import ReasoningDialect, TextKind, Thinking
from outrider.gateway.answering.text.tool_formats import HARMONY, ToolFormat
from outrider.gateway.contract.schema.tools import FUNCTION_NAME

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_NEXT: Final = f"{_START}assistant"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
_MARKS: Final = (*_ENDS, _START, _CHANNEL)
_STARTS: Final = (_START, _CHANNEL, "to=")
_BODY_END: Final = re.compile("|".join(map(re.escape, _MARKS)))
_NAME: Final = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_MAX_HEADER_CHARS: Final = 256

_Piece = tuple[TextKind, str]


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of a message. `function`: what it calls; None where it calls nothing."""

    channel: str
    function: str | None


def _read_header(text: str) -> _Header:
    channel, recipient = _NAME.search(text), _RECIPIENT.search(text)
    name = recipient[1].removeprefix("functions.") if recipient else ""
    is_function = recipient is not None and recipient[1] != name and FUNCTION_NAME.fullmatch(name)
    return _Header(channel[1] if channel else "final", name if is_function else None)


class ChannelSplitter:
    """Takes an answer's text piece by piece; marks may be cut anywhere.

    Thoughts are the messages of the analysis channel; those of all others are content. Calls come
    out as content in the form of `HARMONY`, whichever way their headers are written. Text without a
    header is content; a header without a message is dropped.
    """

    def __init__(self, *, opens_thinking: bool = False) -> None:
        """`opens_thinking`: the chat template already wrote the header of a thought."""
        self._state: Literal["header", "call", "body"] = "body" if opens_thinking else "header"
        self._kind: TextKind = "reasoning" if opens_thinking else "content"
        self._function = ""
        self._held = ""
        self._written: set[TextKind] = set()
        self._is_next = False  # another message of its kind came before this one
        self._thinks_first = opens_thinking  # no content has begun behind the first thought

    @property
    def is_thinking(self) -> bool:
        """True from the first thought on, up to the first message that is none."""
        return self._thinks_first

    @property
    def is_through(self) -> bool:
        """False: each message has a header of its own."""
        return False

    def push(self, text: str) -> list[_Piece]:
        """Return the pieces that can be released now, in order; no empty ones."""
        pieces: list[_Piece] = []
        # In slices, so that what is held, and copied at each change of state, stays short.
        for start in range(0, len(text), _MAX_HEADER_CHARS):
            self._held += text[start : start + _MAX_HEADER_CHARS]
            while self._held and self._advance(pieces):
                pass
        return pieces

    def flush(self) -> list[_Piece]:
        """Return the text held back for a mark that never came; a begun header is dropped."""
        pieces: list[_Piece] = []
        if self._state == "body":
            self._write(self._held, pieces)
        self._held = ""
        return pieces

    def _advance(self, pieces: list[_Piece]) -> bool:
        """Make one change of state; False when more text is needed."""
        match self._state:
            case "header":
                return self._header()
            case "call":
                return self._call(pieces)
            case "body":
                return self._body(pieces)

    def _header(self) -> bool:
        """Read the header of the next message."""
        begun = self._held.lstrip()
        if not any(begun.startswith(mark) or mark.startswith(begun) for mark in _STARTS):
            return self._begin("content")
        header, mark, rest = self._held[:_MAX_HEADER_CHARS].partition(_MESSAGE)
        if not mark:
            if len(self._held) < _MAX_HEADER_CHARS:
                return False
            # No header: its mark is dropped, as the text behind it would begin one again.
            self._held = _BODY_END.sub("", begun, count=1) if _BODY_END.match(begun) else begun
            return self._begin("content")
        self._held = rest + self._held[_MAX_HEADER_CHARS:]
        read = _read_header(header)
        if read.function is not None:
            self._function, self._state = read.function, "call"
            return True
        return self._begin("reasoning" if read.channel == "analysis" else "content")

    def _begin(self, kind: TextKind) -> bool:
        self._kind, self._state = kind, "body"
        self._is_next = kind in self._written
        self._thinks_first = kind == "reasoning" and "content" not in self._written
        return True

    def _call(self, pieces: list[_Piece]) -> bool:
        """Begin a call, if its body is an object; else it is content."""
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._begin("content")
        if self._held.startswith("{"):
            self._is_next = False
            self._write(f"{HARMONY.marker}{self._function}{HARMONY.call_middle}", pieces)
        return True

    def _body(self, pieces: list[_Piece]) -> bool:
        """Release a message up to the mark that ends it, which may be missing."""
        found = _BODY_END.search(self._held)
        if found is None:
            end = len(self._held) - max(overlap(self._held, mark) for mark in _MARKS)
            self._write(self._held[:end], pieces)
            self._held = self._held[end:]
            return False
        self._write(self._held[: found.start()], pieces)
        behind = found.end() if found[0] in _ENDS else found.start()
        self._held = self._held[behind:]
        self._state = "header"
        return True

    def _write(self, text: str, pieces: list[_Piece]) -> None:
        if not text:
            return
        if self._is_next:
            pieces.append((self._kind, "\n"))
            self._is_next = False
        pieces.append((self._kind, text))
        self._written.add(self._kind)


def behind_channels(
    answer: GrammarPart, thinking: Thinking, dialect: ReasoningDialect, *, is_framed: bool
) -> GrammarPart:
    """Return the grammar of an answer with the messages in front of it.

    `is_framed`: the answer has a header of its own; else it is the text of a final message.
    """
    literals = Literals(dialect.special_ids)
    before = any_of(
        [_message(f"{_CHANNEL}{name}{_MESSAGE}", literals) for name in ("analysis", "commentary")]
    )
    parts = [star(before), answer]
    if not is_framed:
        parts = [star(before), *literals.parts(f"{_CHANNEL}final{_MESSAGE}"), answer]
    if thinking == "open":
        parts = [_message("", literals), *parts]
    return sequence(parts)


def channel_answer(
    calls: list[list[GrammarPart]], form: ToolFormat, literals: Literals, *, must_call: bool
) -> GrammarPart:
    """Return the grammar of the last message: a call, or with `must_call` false the answer.

    `calls`: for each function its name as a literal, and the grammar of its arguments. The mark
    behind a call is a stop token, which no grammar names.
    """
    messages = []
    for name, arguments in calls:
        before = literals.parts(form.marker)
        after = literals.parts(f"<|constrain|>json{_MESSAGE}")
        messages.append(sequence([*before, name, _SPACE, *after, arguments]))
    if not must_call:
        final = literals.parts(f"{_CHANNEL}final{_MESSAGE}")
        messages.append(sequence([*final, ANY_TEXT]))
    return any_of(messages)


_SPACE: Final[GrammarPart] = {"type": "regex", "pattern": " ?"}


def _message(header: str, literals: Literals) -> GrammarPart:
    """Match a message and the beginning of the next one."""
    return sequence([*literals.parts(header), *literals.until("<|end|>"), *literals.parts(_NEXT)])
