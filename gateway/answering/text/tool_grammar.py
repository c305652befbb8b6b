"""The grammar of an answer with tool calls, made of the texts of a format (tool_formats.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.gateway.answering.text.channels import channel_answer
from outrider.gateway.answering.text.grammar_parts import (
    ANY_TEXT,
    GrammarPart,
    Literals,
    any_of,
    const,
    json_schema,
    note,
    separated,
    sequence,
    star,
)
from outrider.gateway.answering.text.tool_formats import ToolDialect
from outrider.gateway.answering.text.xml_grammar import xml_arguments_grammar
from outrider.gateway.contract.schema.tools import FunctionDefinition


def answer_grammar(
    dialect: ToolDialect,
    functions: Sequence[FunctionDefinition],
    *,
    must_call: bool,
    may_repeat: bool,
    places: Mapping[str, str],
) -> GrammarPart:
    """Return the grammar of an answer of calls only, or of text with calls.

    `places`: the field of each function's parameters.
    """
    return _Builder(dialect, may_repeat, places).answer(functions, must_call=must_call)


def arguments_schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments; they are always an object."""
    schema = function.parameters
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return schema if schema.get("type") == "object" else {**schema, "type": "object"}


class _Builder:
    """Grammars of one dialect."""

    def __init__(self, dialect: ToolDialect, may_repeat: bool, places: Mapping[str, str]) -> None:
        self._places = places
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
            text = {**ANY_TEXT, "not_before": self._form.trigger}
            return call if must_call else any_of([call, text])
        section = self._section(functions)
        ends_with_it = self._is_single or not self._form.repeats
        marker = self._literals.parts(self._form.marker)
        if must_call:
            whole = sequence([*marker, *section])
            between = self._literals.parts(self._form.between)
            return whole if ends_with_it else separated(whole, between)
        marked = sequence([*self._literals.until(self._form.marker), *section])
        if ends_with_it:
            return any_of([marked, ANY_TEXT])
        return sequence([star(marked), ANY_TEXT])

    def _section(self, functions: Sequence[FunctionDefinition]) -> list[GrammarPart]:
        """Build a section behind its marker: calls, and the mark of its end."""
        form, parts = self._form, self._literals.parts
        return [*parts(form.lead), self._calls(functions), *parts(form.trail), *parts(form.end)]

    def _calls(self, functions: Sequence[FunctionDefinition]) -> GrammarPart:
        """Build the calls between a marker and its end."""
        call = any_of([self._call(function) for function in functions])
        if self._form.separator is None or self._is_single:
            return call
        return separated(call, self._literals.parts(self._form.separator))

    def _call(self, function: FunctionDefinition) -> GrammarPart:
        """Build one call."""
        form, parts = self._form, self._literals.parts
        begin = parts(form.call_begin + function.name + form.call_middle)
        return sequence([*begin, *self._arguments(function), *parts(form.call_end)])

    def _arguments(self, function: FunctionDefinition) -> list[GrammarPart]:
        schema, xml = arguments_schema(function), self._form.xml
        place, is_lenient = self._places[function.name], not function.strict
        has_other_type = (function.parameters or {}).get("type", "object") != "object"
        noted = note(place, ["/type"] if has_other_type else [])
        if xml is not None:
            return noted + xml_arguments_grammar(
                schema, function.name, xml, self._literals, place, is_lenient=is_lenient
            )
        return [*noted, json_schema(schema, place, is_lenient=is_lenient)]
