"""Finds tool calls in an answer while it is written.

The grammar of the request (gateway/answering/text/tools.py) lets the model write calls in the
format's way only. So the parser reads just that, with any white space between the parts. All else
is content.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from outrider.gateway.answering.text.arguments import (
    ArgumentsReader,
    JsonArguments,
    XmlArgumentsReader,
)
from outrider.gateway.answering.text.overlap import overlap
from outrider.gateway.answering.text.tool_formats import ANY_ID, ToolFormat
from outrider.gateway.answering.text.xml_values import ValueForm

_SLICE_CHARS: Final = 256
"""Text is read in slices, so that what is held, and copied at each change of state, stays short."""
_MAX_HEAD_CHARS: Final = 256
"""Longer text in front of arguments, or behind them, is refused: it would be read again with each
token. The longest name and its marks take about 120 characters."""
_MAX_ID_CHARS: Final = 9
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{0,64}")

PieceKind = Literal["content", "call", "arguments"]
ParserState = Literal["text", "head", "arguments", "close", "tail", "rest"]


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """A piece of an answer."""

    kind: PieceKind
    """`call` begins a call."""
    text: str
    """The function's name where a call begins."""
    end: int
    """The position in the whole text behind the text that the piece was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReading:
    """The rules for reading a job's answers."""

    format: ToolFormat
    only_calls: bool = False
    """There is no content."""
    is_named: bool = False
    """The client chose the function, so the end of the call is a plain stop (as OpenAI has it)."""
    special_texts: Mapping[int, str] = field(default_factory=dict)
    """The texts of special tokens, by id, which are part of the format."""
    value_forms: Mapping[str, Mapping[str, ValueForm]] = field(default_factory=dict)
    """The forms of each function's arguments, where the format leaves their types open."""


class ToolParser:
    """Takes the answer piece by piece, cut anywhere; gives content, calls and their arguments.

    Arguments come as they are written. White space around calls belongs to nothing; so does a call
    that breaks off before its name is complete.
    """

    def __init__(self, reading: ToolReading) -> None:
        self._format = reading.format
        self._only_calls = reading.only_calls
        self._value_forms = reading.value_forms
        self._state: ParserState = "text"
        self._is_next = False  # behind another call: the head has a separator, no marker
        self._held = ""
        self._space: list[str] = []  # in front of the held text; dropped if a call follows
        self._num_space = 0
        self._num_seen = 0
        self._pieces: list[ToolPiece] = []
        self._reader: ArgumentsReader = JsonArguments(is_bare=False)
        self.num_calls = 0

    @property
    def num_decided(self) -> int:
        """Characters of the text that are decided."""
        return self._num_seen - len(self._held) - self._num_space - self._reader.num_held

    def push(self, text: str) -> list[ToolPiece]:
        """Return the pieces that can be released now, in order; no empty ones."""
        for start in range(0, len(text), _SLICE_CHARS):
            piece = text[start : start + _SLICE_CHARS]
            self._held += piece
            self._num_seen += len(piece)
            while self._held and self._advance():
                pass
        return self._take()

    def flush(self) -> list[ToolPiece]:
        """End the answer: return the text held for a call that never came."""
        held_for_text = self._state in ("text", "rest") and not self._only_calls
        if held_for_text and (self._held.strip() or not self.num_calls):
            self._held = "".join(self._space) + self._held
            self._drop_space()
            self._emit("content", len(self._held))
        self._held = ""
        self._reader.num_held = 0
        self._drop_space()
        return self._take()

    def _take(self) -> list[ToolPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _advance(self) -> bool:
        """Make one change of state; False when more text is needed."""
        match self._state:
            case "text":
                return self._text() if self._format.marker else self._start()
            case "head":
                return self._head()
            case "arguments":
                return self._arguments()
            case "close":
                return self._close()
            case "tail":
                return self._tail()
            case "rest":
                return self._release(len(self._held))

    def _text(self) -> bool:
        """Read content up to the next marker."""
        marker = self._format.marker
        position = self._held.find(marker)
        if position < 0:
            return self._release(len(self._held) - overlap(self._held, marker))
        self._release(position)
        self._drop_space()
        self._is_next = False
        self._state = "head"
        return True

    def _start(self) -> bool:
        """Begin: without a marker the answer is a call from its first character, or never."""
        trigger = self._format.trigger
        if self._held.startswith(trigger):
            self._drop_space()
            self._state = "head"
        elif trigger.startswith(self._held):
            return False
        else:
            self._state = "rest"
        return True

    def _head(self) -> bool:
        """Read from the marker to the arguments."""
        head = self._held[:_MAX_HEAD_CHARS]
        if self._read_head(head):
            return True
        return len(head) == _MAX_HEAD_CHARS and self._refuse_head()

    def _read_head(self, head: str) -> bool:
        """Read a call's head; False when more text is needed."""
        form = self._format
        before = form.separator or "" if self._is_next else form.marker + form.lead
        name_at = _match(head, 0, before + form.call_begin)
        if name_at is None:
            return False
        name = _NAME.match(head, max(name_at, 0))
        assert name is not None, "the pattern matches the empty text"
        if name_at < 0 or (not name[0] and name.end() < len(head)):
            return self._refuse_head()
        behind = _match(head, name.end(), form.call_middle + form.first_char)
        if behind is None:
            return False
        if behind < 0 or not name[0]:
            return self._refuse_head()
        self._held = self._held[behind - len(form.first_char) :]
        self._pieces.append(ToolPiece("call", name[0], self.num_decided))
        self.num_calls += 1
        self._reader = self._arguments_reader(name[0])
        self._state = "arguments"
        return True

    def _arguments_reader(self, name: str) -> ArgumentsReader:
        xml = self._format.xml
        if xml is None:
            return JsonArguments(is_bare=bool(self._format.first_char))
        return XmlArgumentsReader(xml, self._value_forms.get(name, {}))

    def _refuse_head(self) -> bool:
        """Turn text that looked like a call into content."""
        self._emit_content(len(self._format.trigger) if not self._is_next else 1)
        self._is_next = False
        self._state = "text" if self._format.repeats else "rest"
        return True

    def _arguments(self) -> bool:
        """Read arguments up to their end."""
        num_read, text = self._reader.read(self._held)
        self._held = self._held[num_read:]
        if text:
            self._pieces.append(ToolPiece("arguments", text, self.num_decided))
        if self._reader.is_done:
            self._state = "close"
        return self._reader.is_done

    def _close(self) -> bool:
        """Read the end of one call."""
        return self._skip(self._format.call_end, "tail")

    def _tail(self) -> bool:
        """Read on behind a call: the next one of a list, or the end."""
        form = self._format
        if form.separator is not None:
            tail = self._held[:_MAX_HEAD_CHARS]
            # What separates calls may be nothing but the beginning of the next one.
            behind = _match(tail, 0, form.separator.strip() or form.call_begin)
            if behind is None and len(tail) < _MAX_HEAD_CHARS:
                return False
            if behind is not None and behind > 0:
                self._is_next = True
                self._state = "head"
                return True
        return self._skip(form.trail + form.end, "text" if form.repeats else "rest")

    def _skip(self, pattern: str, state: ParserState) -> bool:
        """Go on to `state` behind this text, or where it does not stand here."""
        head = self._held[:_MAX_HEAD_CHARS]
        behind = _match(head, 0, pattern)
        if behind is None and len(head) < _MAX_HEAD_CHARS:
            return False
        self._held = self._held[max(behind or 0, 0) :]
        self._state = state
        return bool(self._held)

    def _release(self, length: int) -> bool:
        """Release content of this length, but for white space at its end: a call may follow."""
        num_shown = 0 if self._only_calls else len(self._held[:length].rstrip())
        self._emit_content(num_shown)
        num_space = length - num_shown
        self._space.append(self._held[:num_space])
        self._num_space += num_space
        self._held = self._held[num_space:]
        return False

    def _emit_content(self, length: int) -> None:
        """Emit content of this length, if any, with the space in front of it."""
        if length:
            self._held = "".join(self._space) + self._held
            length += self._num_space
            self._drop_space()
            self._emit("content", length)

    def _drop_space(self) -> None:
        self._space.clear()
        self._num_space = 0

    def _emit(self, kind: PieceKind, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._pieces.append(ToolPiece(kind, text, self.num_decided))


def _match(text: str, start: int, pattern: str) -> int | None:
    """Match `pattern` in `text` from `start` on, white space in either left out.

    Returns the position behind it; -1 where it does not match; None where the text ends too soon.
    """
    position = start
    for char in pattern:
        if char.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return None
        if char == ANY_ID:
            behind = _behind_id(text, position)
            if behind is None or behind < 0:
                return behind
            position = behind
            continue
        if text[position] != char:
            return -1
        position += 1
    return position


def _behind_id(text: str, start: int) -> int | None:
    """Return the position behind an id; -1 and None as `_match` does."""
    position = start
    while position < len(text) and text[position].isalnum() and text[position].isascii():
        position += 1
    if position - start > _MAX_ID_CHARS:
        return -1
    if position == len(text):
        return None
    return position if position > start else -1
