"""Tools and `tool_choice` of a request: the grammar of the answer, and the rules for reading it.

The grammar is xgrammar's structural tag, written by hand: this process does without xgrammar.
Arguments conform to the function's schema always. With `auto` the answer is free until it begins a
call; with `required` or a named function it is calls and nothing else.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.request import GrammarSpec
from gateway.errors.tree import BadRequestError
from gateway.schema.chat import ChatRequest
from gateway.schema.tools import FunctionDefinition, NamedToolChoice, Tool
from gateway.text.thinking import Thinking, behind_thinking
from gateway.text.tool_formats import ToolDialect, ToolFormat
from gateway.text.tool_parser import ToolReading

_MAX_NAMES: Final = 32
_COMBINES: Final = frozenset({"$ref", "anyOf", "allOf", "oneOf", "if", "not"})

_Tag = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """The tools that a request offers, and the calls that it wants.

    `must_call`: the answer is calls only. `named`: the function that must be called.
    """

    tools: tuple[Tool, ...]
    must_call: bool
    named: str | None
    may_repeat: bool

    def grammar(self, dialect: ToolDialect, thinking: Thinking) -> GrammarSpec:
        """Return the answer's grammar. `thinking`: a block that comes, or may come, before it.

        Raises BadRequestError when the tools are too large for a grammar.
        """
        builder = _Builder(dialect, self.may_repeat)
        functions = [
            tool.function for tool in self.tools if self.named in (None, tool.function.name)
        ]
        answer = builder.answer(functions, must_call=self.must_call)
        tag = {"type": "structural_tag", "format": behind_thinking(answer, thinking)}
        try:
            return GrammarSpec(kind="structural_tag", text=json.dumps(tag, ensure_ascii=False))
        except ValueError as error:
            raise BadRequestError(f"tools: {error}.", param="tools") from error

    def reading(self, dialect: ToolDialect) -> ToolReading:
        """Return the rules for reading the answer."""
        return ToolReading(
            format=dialect.format,
            only_calls=self.must_call,
            is_named=self.named is not None,
            special_texts={token_id: text for text, token_id in dialect.special_ids.items()},
        )


def plan_tools(request: ChatRequest) -> ToolPlan | None:
    """Plan the request's tools; None where no calls are possible. Raises BadRequestError."""
    tools = request.tools or []
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if not tools:
        if choice == "required" or named is not None:
            raise BadRequestError(
                "tool_choice: the request has no tools; add tools or leave tool_choice out.",
                param="tool_choice",
            )
        return None
    names = _check_functions([tool.function for tool in tools])
    if named is not None and named not in names:
        available = ", ".join(sorted(names)[:_MAX_NAMES])
        raise BadRequestError(
            f"tool_choice: unknown tool {named!r}; available: {available}.",
            param="tool_choice.function.name",
        )
    if choice == "none":
        return None
    return ToolPlan(
        tools=tuple(tools),
        must_call=choice == "required" or named is not None,
        named=named,
        may_repeat=named is None and request.parallel_tool_calls is not False,
    )


def _check_functions(functions: Sequence[FunctionDefinition]) -> set[str]:
    """Return the names. Raises BadRequestError for duplicates, or arguments that are no object."""
    names: set[str] = set()
    for index, function in enumerate(functions):
        path = f"tools.{index}.function"
        if function.name in names:
            raise BadRequestError(
                f"{path}.name: two tools are named {function.name!r}; give each its own name.",
                param=f"{path}.name",
            )
        names.add(function.name)
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object":
            raise BadRequestError(
                f'{path}.parameters: the schema\'s type must be "object", not {json.dumps(kind)}.',
                param=f"{path}.parameters",
            )
    return names


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
        self._form: ToolFormat = dialect.format
        self._special_ids: Mapping[str, int] = dialect.special_ids
        self._is_single = not (may_repeat and dialect.format.has_parallel_calls)

    def answer(self, functions: Sequence[FunctionDefinition], *, must_call: bool) -> _Tag:
        """Build an answer of calls only, or of text with calls."""
        if not self._form.marker:
            calls = self._calls(functions)
            trigger = self._form.trigger
            return calls if must_call else _any_of([calls, _text_not_starting_with(trigger)])
        section = self._section(self._calls(functions))
        ends_with_it = self._is_single or not self._form.repeats
        if must_call:
            return {
                "type": "tags_with_separator",
                "tags": [section],
                "separator": "\n",
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

    def _section(self, calls: _Tag) -> _Tag:
        """Build a section: calls with the markers around them."""
        form = self._form
        content = [_const(form.lead), calls, _const(form.trail)]
        return {
            "type": "tag",
            "begin": self._mark(form.marker),
            "content": _sequence([part for part in content if part.get("value") != ""]),
            "end": self._mark(form.end),
        }

    def _calls(self, functions: Sequence[FunctionDefinition]) -> _Tag:
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

    def _call(self, function: FunctionDefinition) -> _Tag:
        name, key = json.dumps(function.name), self._form.arguments_key
        arguments = {"type": "json_schema", "json_schema": arguments_schema(function)}
        begin = f'{{"name": {name}, "{key}": '
        return {"type": "tag", "begin": begin, "content": arguments, "end": "}"}

    def _mark(self, text: str) -> str | _Tag:
        """Return a marker; a special token goes by its id, as it is no text for a grammar."""
        token_id = self._special_ids.get(text)
        return text if token_id is None else {"type": "token", "token": token_id}


def _text_not_starting_with(start: str) -> _Tag:
    """Match any text that does not begin with `start`."""
    others = []
    for index, char in enumerate(start):
        before = re.escape(start[:index])
        others += [before, rf"{before}[^{re.escape(char)}][\s\S]*"]
    return {"type": "regex", "pattern": "|".join(others)}


def _const(text: str) -> _Tag:
    return {"type": "const_string", "value": text}


def _sequence(elements: list[_Tag]) -> _Tag:
    return {"type": "sequence", "elements": elements}


def _any_of(elements: list[_Tag]) -> _Tag:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
