"""Tools and `tool_choice` of a request: the grammar of the answer, and the rules for reading it.

Arguments conform to the function's schema always. With `auto` the answer is free until it begins a
call; with `required` or a named function it is calls and nothing else.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from outrider.engine.request import GrammarSpec
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from outrider.gateway.answering.text.grammar_parts import dumps
from outrider.gateway.answering.text.reasoning_formats import ReasoningDialect, Thinking
from outrider.gateway.answering.text.thinking import behind_reasoning
from outrider.gateway.answering.text.tool_formats import ToolDialect
from outrider.gateway.answering.text.tool_grammar import answer_grammar, arguments_schema
from outrider.gateway.answering.text.tool_parser import ToolReading
from outrider.gateway.answering.text.xml_values import value_forms
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.tools import FunctionDefinition, NamedToolChoice, Tool

_MAX_NAMES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """The tools that a request offers, and the calls that it wants."""

    tools: tuple[Tool, ...]
    must_call: bool
    """The answer is calls only."""
    named: str | None
    """The function that must be called."""
    may_repeat: bool

    def grammar(
        self, dialect: ToolDialect, reasoning: ReasoningDialect, thinking: Thinking
    ) -> GrammarSpec:
        """Return the answer's grammar. `thinking`: a block that comes, or may come, before it.

        Raises BadRequestError when the tools are too large for a grammar.
        """
        functions = [
            tool.function for tool in self.tools if self.named in (None, tool.function.name)
        ]
        answer = answer_grammar(
            dialect,
            functions,
            must_call=self.must_call,
            may_repeat=self.may_repeat,
            places=self._places,
        )
        whole = behind_reasoning(
            answer,
            thinking,
            reasoning,
            is_framed=dialect.format.has_channels,
            has_marks=not self.must_call and reasoning.has_special_marks,
        )
        try:
            return GrammarSpec(kind="parts", text=dumps(whole))
        except ValueError as error:
            raise BadRequestError(f"tools: {error}.", param="tools") from error

    def answer_schema(self, dialect: ToolDialect) -> AnswerSchema | None:
        """Return the schemas of the calls' arguments; None where they are no JSON as written."""
        if dialect.format.xml is not None:
            return None
        functions = [tool.function for tool in self.tools]
        schemas = {each.name: arguments_schema(each) for each in functions}
        return AnswerSchema(arguments=schemas, places=self._places)

    @property
    def _places(self) -> dict[str, str]:
        """The field of each function's parameters."""
        return {
            tool.function.name: f"tools.{index}.function.parameters"
            for index, tool in enumerate(self.tools)
        }

    def reading(self, dialect: ToolDialect) -> ToolReading:
        """Return the rules for reading the answer."""
        return ToolReading(
            format=dialect.format,
            only_calls=self.must_call,
            is_named=self.named is not None,
            special_texts={token_id: text for text, token_id in dialect.special_ids.items()},
            value_forms={
                tool.function.name: value_forms(tool.function.parameters) for tool in self.tools
            }
            if dialect.format.xml
            else {},
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
        if kind != "object" and function.strict:
            raise BadRequestError(
                f'{path}.parameters: the schema\'s type must be "object", not {json.dumps(kind)}.',
                param=f"{path}.parameters",
            )
    return names
