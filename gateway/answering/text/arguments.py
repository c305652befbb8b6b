"""Read a call's arguments while they are written, and give them as growing JSON."""

import json
from collections.abc import Mapping
from typing import Final, Literal, Protocol

from outrider.gateway.answering.text.overlap import overlap
from outrider.gateway.answering.text.tool_formats import XmlArguments
from outrider.gateway.answering.text.xml_values import ANY_VALUE, ValueForm

_MAX_KEY_CHARS: Final = 256


class ArgumentsReader(Protocol):
    """Reads the arguments of one call. `num_held`: characters that were read and not given yet."""

    is_done: bool
    num_held: int

    def read(self, text: str) -> tuple[int, str]:
        """Read on; return the number of characters that were read, and the JSON that they give.

        The rest of `text` comes again, with what follows it, unless the arguments are done.
        """


class JsonArguments:
    """Arguments that are JSON: an object (`is_bare`), or the last value in an object."""

    num_held = 0

    def __init__(self, *, is_bare: bool) -> None:
        self.is_done = False
        self._is_bare = is_bare
        self._is_new = True
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def read(self, text: str) -> tuple[int, str]:
        """Read on up to the value's end."""
        begin = 0
        if self._is_new:
            begin = len(text) - len(text.lstrip())
            self._is_new = begin == len(text)
        end = self._scan(text)
        self.is_done = end is not None
        num_read = len(text) if end is None else end
        return num_read, text[begin:num_read]

    def _scan(self, text: str) -> int | None:
        """Return the position behind the value; None when it goes on behind `text`."""
        for position, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if self._depth == 0:
                    return position
                self._depth -= 1
                if self._depth == 0 and self._is_bare:
                    return position + 1
        return None


class XmlArgumentsReader:
    """Arguments between tags. Of arguments with the same name, the first counts.

    Strings are given as they are written; other values when they are complete, as their type
    depends on all of their text. What is no argument ends the arguments.
    """

    def __init__(self, xml: XmlArguments, forms: Mapping[str, ValueForm]) -> None:
        self.is_done = False
        self._xml = xml
        self._forms = forms
        self._state: Literal["between", "key", "gap", "value"] = "between"
        self._keys: set[str] = set()
        self._form = ANY_VALUE
        self._is_repeated = False
        self._is_new = False  # the value has not begun: a line end may still come in front of it
        self._parts: list[str] = []  # of a value whose type is not known yet
        self.num_held = 0

    def read(self, text: str) -> tuple[int, str]:
        """Read on as far as the text's meaning is certain."""
        position, given = 0, []
        is_moving = True
        while is_moving and not self.is_done:
            num_read, json_text, is_moving = self._advance(text[position:])
            position += num_read
            given.append(json_text)
        return position, "".join(given)

    def _advance(self, text: str) -> tuple[int, str, bool]:
        """Make one step: characters read, JSON given, and if there may be another step."""
        match self._state:
            case "between":
                return self._between(text)
            case "key":
                return self._key(text)
            case "gap":
                return self._gap(text)
            case "value":
                return self._value(text)

    def _between(self, text: str) -> tuple[int, str, bool]:
        num_space = len(text) - len(text.lstrip())
        begun, mark = text[num_space:], self._xml.key_begin
        if begun.startswith(mark):
            self._state = "key"
            return num_space + len(mark), "", True
        if mark.startswith(begun):
            return num_space, "", False
        return num_space, self._end(), False

    def _key(self, text: str) -> tuple[int, str, bool]:
        key, mark, _ = text[:_MAX_KEY_CHARS].partition(self._xml.key_end)
        if not mark:
            return (0, "", False) if len(text) < _MAX_KEY_CHARS else (0, self._end(), False)
        num_read = len(key) + len(mark)
        key = key.strip()
        self._is_repeated = key in self._keys
        self._form = self._forms.get(key, ANY_VALUE)
        self._state = "gap"
        if self._is_repeated:
            return num_read, "", True
        begin = ", " if self._keys else "{"
        self._keys.add(key)
        quote = '"' if self._form.is_string else ""
        return num_read, f"{begin}{json.dumps(key, ensure_ascii=False)}: {quote}", True

    def _gap(self, text: str) -> tuple[int, str, bool]:
        """Read the tag in front of a value, if there is one."""
        mark = self._xml.value_begin.strip()
        num_space = len(text) - len(text.lstrip()) if mark else 0
        begun = text[num_space:]
        if not begun.startswith(mark):
            if mark.startswith(begun):
                return num_space, "", False
            return 0, self._value_end() + self._end(), False
        self._state, self._is_new = "value", bool(self._xml.pad)
        return num_space + len(mark), "", True

    def _value(self, text: str) -> tuple[int, str, bool]:
        begin = 0
        if self._is_new and text:
            begin = len(self._xml.pad) if text.startswith(self._xml.pad) else 0
            self._is_new = False
        mark, pad = self._xml.value_end, self._xml.pad
        end = text.find(mark, begin)
        is_ended = end >= 0
        if not is_ended:
            end = len(text) - overlap(text[begin:], mark)
        num_read = end + len(mark) if is_ended else end
        if pad and text.endswith(pad, begin, end):
            end -= len(pad)
            num_read = num_read if is_ended else end
        json_text = self._add(text[begin:end])
        if not is_ended:
            return num_read, json_text, False
        self._state = "between"
        return num_read, json_text + self._value_end(), True

    def _add(self, text: str) -> str:
        """Return the JSON that a piece of a value gives."""
        if self._is_repeated:
            return ""
        if self._form.is_string:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        self._parts.append(text)
        self.num_held += len(text)
        return ""

    def _value_end(self) -> str:
        """Return the JSON that the end of a value gives."""
        if self._is_repeated:
            return ""
        if self._form.is_string:
            return '"'
        value = "".join(self._parts)
        self._parts.clear()
        self.num_held = 0
        return self._form.read(value)

    def _end(self) -> str:
        self.is_done = True
        return "}" if self._keys else "{}"
