"""The grammar of an answer with tool calls, made of the texts of a format (tool_formats.py).

It is xgrammar's structural tag, written by hand: this process does without xgrammar.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.schema.tools import FunctionDefinition
from gateway.text.tool_formats import ANY_ID, ToolDialect

_COMBINES: Final = frozenset({"$ref", "anyOf", "allOf", "oneOf", "if", "not"})

GrammarPart = dict[str, Any]


def answer_grammar(
    dialect: ToolDialect,
    functions: Sequence[FunctionDefinition],
    *,
    must_call: bool,
    may_repeat: bool,
) -> GrammarPart:
    """Return the part of a structural tag for an answer of calls only, or of text with calls."""
    return _Builder(dialect, may_repeat).answer(functions, must_call=must_call)


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments; they are always an object."""
    schema = function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "type" in schema or _COMBINES & schema.keys():
        return schema
    return {"type": "object", **schema}


class _Builder:
    """Structural tags of one dialect."""

    def __init__(self, dialect: ToolDialect, may_repeat: bool) -> None:
        self._form = dialect.format
        self._special_ids: Mapping[str, int] = dialect.special_ids
        self._literals = re.compile(
            "|".join([f"({re.escape(text)})" for text in dialect.special_ids] + [f"({ANY_ID})"])
        )
        self._is_single = not (may_repeat and dialect.format.has_parallel_calls)

    def answer(self, functions: Sequence[FunctionDefinition], *, must_call: bool) -> GrammarPart:
        """Build an answer of calls only, or of text with calls."""
        if not self._form.marker:
            calls = _any_of([self._call(function) for function in functions])
            trigger = self._form.trigger
            return calls if must_call else _any_of([calls, _text_not_starting_with(trigger)])
        section = self._section(functions)
        ends_with_it = self._is_single or not self._form.repeats
        if must_call:
            return {
                "type": "tags_with_separator",
                "tags": [section],
                "separator": self._form.between,
                "at_least_one": True,
                "stop_after_first": ends_with_it,
            }
        if self._form.marker not in self._special_ids:
            return {
                "type": "triggered_tags",
                "triggers": [self._form.marker],
                "tags": [section],
                "stop_after_first": ends_with_it,
            }
        # No text spells a special token, so text and calls need no trigger to be told apart.
        text = {"type": "any_text"}
        if ends_with_it:
            return _sequence([text, {"type": "optional", "content": section}])
        return _sequence([{"type": "star", "content": _sequence([text, section])}, text])

    def _section(self, functions: Sequence[FunctionDefinition]) -> GrammarPart:
        """Build a section: calls with the markers around them."""
        form = self._form
        content = [*self._texts(form.lead), self._calls(functions), *self._texts(form.trail)]
        return {
            "type": "tag",
            "begin": self._mark(form.marker),
            "content": _sequence(content),
            "end": self._mark(form.end),
        }

    def _calls(self, functions: Sequence[FunctionDefinition]) -> GrammarPart:
        """Build the calls between a marker and its end."""
        calls = [self._call(function) for function in functions]
        if self._form.separator is None:
            return _any_of(calls)
        return {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": self._form.separator,
            "at_least_one": True,
            "stop_after_first": self._is_single,
        }

    def _call(self, function: FunctionDefinition) -> GrammarPart:
        """Build one call, as a tag: only tags can be repeated with a separator."""
        form = self._form
        arguments = {"type": "json_schema", "json_schema": arguments_schema(function)}
        head = form.call_begin + function.name + form.call_middle
        begin, *rest = self._texts(head)
        if begin["type"] == "token":
            return _tag(begin, _sequence([*rest, arguments, *self._texts(form.call_end)]), "")
        end = self._texts(form.call_end)
        if len(end) == 1 and "value" in end[0]:
            return _tag(begin["value"], _sequence([*rest, arguments]), end[0]["value"])
        return _tag(begin["value"], _sequence([*rest, arguments, *end]), "")

    def _texts(self, text: str) -> list[GrammarPart]:
        """Split a text of the format: special tokens go by their ids, an id is any id."""
        return [self._text(part) for part in self._literals.split(text) if part]

    def _text(self, text: str) -> GrammarPart:
        if text == ANY_ID:
            return {"type": "regex", "pattern": "[a-zA-Z0-9]{1,9}"}
        mark = self._mark(text)
        return {"type": "const_string", "value": text} if isinstance(mark, str) else mark

    def _mark(self, text: str) -> str | GrammarPart:
        """Return a marker; a special token goes by its id, as it is no text for a grammar."""
        token_id = self._special_ids.get(text)
        return text if token_id is None else {"type": "token", "token": token_id}


def _text_not_starting_with(start: str) -> GrammarPart:
    """Match any text that does not begin with `start`."""
    others = []
    for index, char in enumerate(start):
        before = re.escape(start[:index])
        others += [before, rf"{before}[^{re.escape(char)}][\s\S]*"]
    return {"type": "regex", "pattern": "|".join(others)}


def _tag(begin: str | GrammarPart, content: GrammarPart, end: str) -> GrammarPart:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(elements: list[GrammarPart]) -> GrammarPart:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _any_of(elements: list[GrammarPart]) -> GrammarPart:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
