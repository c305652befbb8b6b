"""Finds tool calls in an answer while it is written.

The grammar of the request (gateway/text/tools.py) lets the model write calls in the format's way
only, so the parser reads just that, with any white space between the parts. All else is content.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from gateway.schema.tools import FUNCTION_NAME
from gateway.text.thinking import overlap
from gateway.text.tool_formats import ToolFormat

_NAME_BEGINS: Final = '{"name":"'
_SLICE_CHARS: Final = 256
"""Text is read in slices, so that what is held, and copied at each change of state, stays short."""
_MAX_HEAD_CHARS: Final = 256
"""Longer text in front of arguments, or behind them, is refused: it would be read again with each
token. The longest name and its marks take about 120 characters."""

PieceKind = Literal["content", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """A piece of an answer. `call` begins a call; its text is the function's name.

    `end`: the position in the whole text behind the text that the piece was made of.
    """

    kind: PieceKind
    text: str
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReading:
    """The rules for reading a job's answers.

    `only_calls`: there is no content. `is_named`: the client chose the function, so that the end of
    the call is a plain stop (as OpenAI has it). `special_texts`: the texts of special tokens, by
    id, which are part of the format.
    """

    format: ToolFormat
    only_calls: bool = False
    is_named: bool = False
    special_texts: Mapping[int, str] = field(default_factory=dict)


class ToolParser:
    """Takes the answer piece by piece, cut anywhere; gives content, calls and their arguments.

    Arguments come as they are written. White space around calls belongs to nothing; so does a call
    that breaks off before its name is complete.
    """

    def __init__(self, reading: ToolReading) -> None:
        self._format = reading.format
        self._only_calls = reading.only_calls
        self._state: Literal["text", "head", "arguments", "tail", "rest"] = "text"
        self._is_next = False  # behind a separator: the head has no marker
        self._held = ""
        self._space: list[str] = []  # in front of the held text; dropped if a call follows
        self._num_space = 0
        self._num_seen = 0
        self._pieces: list[ToolPiece] = []
        self._json = _JsonScanner()
        self.num_calls = 0

    @property
    def num_decided(self) -> int:
        """Characters of the text that are decided."""
        return self._num_seen - len(self._held) - self._num_space

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
        begins = _NAME_BEGINS if self._is_next else form.marker + form.lead + _NAME_BEGINS
        name_at = _match(head, 0, begins)
        if name_at is None:
            return False
        name, quote, _ = head[name_at:].partition('"')
        is_name = FUNCTION_NAME.fullmatch(name) or not (name or quote)
        if name_at == 0 or not is_name:
            return self._refuse_head()
        behind = _match(head, name_at + len(name), f'","{form.arguments_key}":')
        if behind is None:
            return False
        if behind == 0:
            return self._refuse_head()
        self._held = self._held[behind:]
        self._pieces.append(ToolPiece("call", name, self.num_decided))
        self.num_calls += 1
        self._json = _JsonScanner()
        self._state = "arguments"
        return True

    def _refuse_head(self) -> bool:
        """Turn text that looked like a call into content."""
        self._emit_content(len(self._format.trigger) if not self._is_next else 1)
        self._state = "text" if self._format.repeats else "rest"
        return True

    def _arguments(self) -> bool:
        """Read arguments up to the brace that closes the call."""
        if self._json.is_new:
            self._held = self._held.lstrip()
        end = self._json.scan(self._held)
        self._emit("arguments", len(self._held) if end is None else end)
        if end is None:
            return False
        self._held = self._held[1:]
        self._state = "tail" if self._format.end else "rest"
        return True

    def _tail(self) -> bool:
        """Read on behind a call: the next one of a list, or the end."""
        form = self._format
        tail = self._held[:_MAX_HEAD_CHARS]
        begun = tail.lstrip()
        if form.separator is not None and begun.startswith(form.separator.strip()):
            num_space = len(tail) - len(begun)
            self._held = self._held[num_space + len(form.separator.strip()) :]
            self._is_next = True
            self._state = "head"
            return True
        behind = _match(tail, 0, form.end)
        if behind is None and len(tail) < _MAX_HEAD_CHARS:
            return False
        self._held = self._held[behind or 0 :]
        self._state = "text" if form.repeats else "rest"
        return True

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


class _JsonScanner:
    """Finds where a JSON value ends that stands last in an object: at that object's brace."""

    __slots__ = ("depth", "in_string", "is_escaped", "is_new")

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.is_escaped = False
        self.is_new = True

    def scan(self, text: str) -> int | None:
        """Return the position of the brace; None when the value goes on behind `text`."""
        for position, char in enumerate(text):
            self.is_new = False
            if self.is_escaped:
                self.is_escaped = False
            elif self.in_string:
                self.is_escaped = char == "\\"
                self.in_string = char != '"'
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                if self.depth == 0:
                    return position
                self.depth -= 1
        return None


def _match(text: str, start: int, pattern: str) -> int | None:
    """Match `pattern` in `text` from `start` on, white space in either left out.

    Returns the position behind it; 0 where it does not match; None where the text ends too soon.
    """
    position = start
    for char in pattern:
        if char.isspace():
            continue
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return None
        if text[position] != char:
            return 0
        position += 1
    return position
