"""Requests with tools, and their grammars, for the tests of formats."""

import json
from typing import Any

from outrider.engine.grammar.grammar import TokenGrammar
from outrider.engine.request import GrammarSpec
from outrider.gateway.answering.text.reasoning_formats import PLAIN, ReasoningDialect, Thinking
from outrider.gateway.answering.text.tool_formats import ToolDialect
from outrider.gateway.answering.text.tools import ToolPlan, plan_tools
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.parsing import parse
from tests.engines import shipped_tokenizer
from tests.grammars import shipped_compiler

HELLO = {"role": "user", "content": "Hello"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS: list[Any] = [WEATHER, CLOCK]


def request(**fields: Any) -> ChatRequest:
    body = {"model": "auto", "messages": [HELLO], "tools": TOOLS, **fields}
    return parse(ChatRequest, json.dumps(body).encode())


def plan(**fields: Any) -> ToolPlan:
    found = plan_tools(request(**fields))
    assert found is not None
    return found


def compiled(
    dialect: ToolDialect,
    thinking: Thinking = "none",
    reasoning: ReasoningDialect = PLAIN,
    **fields: Any,
) -> TokenGrammar:
    return grammar_of(plan(**fields).grammar(dialect, reasoning, thinking))


def grammar_of(spec: GrammarSpec) -> TokenGrammar:
    return shipped_compiler().compile(spec).result(120)


def verdict(grammar: TokenGrammar, text: str, special: dict[str, int] | None = None) -> str:
    """whole: may end here; begun: may go on; refused."""
    parts = [text]
    for mark in special or {}:
        parts = [piece for part in parts for piece in part.replace(mark, f"\0{mark}\0").split("\0")]
    ids: list[int] = []
    for part in parts:
        known = (special or {}).get(part)
        encode = shipped_tokenizer().backend_tokenizer.encode
        ids += [known] if known is not None else encode(part, add_special_tokens=False).ids
    matcher = grammar.matcher()
    if not all(matcher.accept(token_id) for token_id in ids):
        return "refused"
    return "whole" if matcher.accept(shipped_tokenizer().eos_token_id) else "begun"


# A call and its result, as messages of a conversation.
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Rain"}
