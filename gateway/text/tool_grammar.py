"""The grammar of an answer with tool calls, made of the texts of a format (tool_formats.py)."""

import re
from collections.abc import Sequence
from typing import Any, Final

from outrider.gateway.schema.tools import FunctionDefinition
from outrider.gateway.text.channels import channel_answer
from outrider.gateway.text.grammar_parts import (
    GrammarPart,
    Literals,
    any_of,
    const,
    optional,
    sequence,
    star,
    tag,
)
from outrider.gateway.text.tool_formats import ToolDialect
from outrider.gateway.text.xml_grammar import xml_arguments_grammar

_COMBINES: Final = frozenset({"$ref", "anyOf", "allOf", "oneOf", "if", "not"})


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
        self._literals = Literals(dialect.special_ids)
        self._is_single = not (may_repeat and dialect.format.has_parallel_calls)

    def answer(self, functions: Sequence[FunctionDefinition], *, must_call: bool) -> GrammarPart:
        """Build an answer of calls only, or of text with calls."""
        if self._form.has_channels:
            calls = [[const(each.name), *self._arguments(each)] for each in functions]
            return channel_answer(calls, self._form, self._literals, must_call=must_call)
        if not self._form.marker:
            call = any_of([self._call(function) for function in functions])
            trigger = self._form.trigger
            return call if must_call else any_of([call, _text_not_starting_with(trigger)])
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
        if not self._literals.is_special(self._form.marker):
            return {
                "type": "triggered_tags",
                "triggers": [self._form.marker],
                "tags": [section],
                "stop_after_first": ends_with_it,
            }
        # No text spells a special token, so text and calls need no trigger to be told apart.
        text = {"type": "any_text"}
        if ends_with_it:
            return sequence([text, optional(section)])
        return sequence([star(sequence([text, section])), text])

    def _section(self, functions: Sequence[FunctionDefinition]) -> GrammarPart:
        """Build a section: calls with the markers around them."""
        form = self._form
        content = [
            *self._literals.parts(form.lead),
            self._calls(functions),
            *self._literals.parts(form.trail),
        ]
        mark = self._literals.mark
        return tag(mark(form.marker), sequence(content), mark(form.end))

    def _calls(self, functions: Sequence[FunctionDefinition]) -> GrammarPart:
        """Build the calls between a marker and its end."""
        calls = [self._call(function) for function in functions]
        if self._form.separator is None:
            return any_of(calls)
        return {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": self._form.separator,
            "at_least_one": True,
            "stop_after_first": self._is_single,
        }

    def _call(self, function: FunctionDefinition) -> GrammarPart:
        """Build one call, as a tag: only tags can be repeated with a separator."""
        form, parts = self._form, self._literals.parts
        begin, *rest = parts(form.call_begin + function.name + form.call_middle)
        content, end = [*rest, *self._arguments(function)], form.call_end
        if self._literals.is_special(end) or len(parts(end)) != 1:
            content, end = [*content, *parts(end)], ""
        return tag(begin.get("value", begin), sequence(content or [const("")]), end)

    def _arguments(self, function: FunctionDefinition) -> list[GrammarPart]:
        schema, xml = arguments_schema(function), self._form.xml
        if xml is not None:
            return xml_arguments_grammar(schema, function.name, xml, self._literals)
        return [{"type": "json_schema", "json_schema": schema}]


def _text_not_starting_with(start: str) -> GrammarPart:
    """Match any text that does not begin with `start`."""
    others = []
    for index, char in enumerate(start):
        before = re.escape(start[:index])
        others += [before, rf"{before}[^{re.escape(char)}][\s\S]*"]
    return {"type": "regex", "pattern": "|".join(others)}
