"""Calls that a client shows, against those that the tokens of its answer are read as."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.http.apis.verify.written_calls import ReadAnswer, read_tokens, tool_reading

Encode = Callable[[str], list[int]]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look_up")
]
CALLS = (("add", {"a": 1, "b": [2.5, "x"]}), ("look_up", {}))


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": ""}], **fields})


def written(*, thought: str = "") -> str:
    calls = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in CALLS
    )
    return f"{thought}Let me see. {calls}"


def message(**changes: Any) -> dict[str, Any]:
    calls = [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for name, given in CALLS
    ]
    return {"role": "assistant", "content": "Let me see. ", "tool_calls": calls, **changes}


def readings(tokenizer: ChatTokenizer, encode: Encode, text: str) -> tuple[ReadAnswer, ...]:
    reading = tool_reading(request(tools=TOOLS), tokenizer)
    assert reading is not None
    return read_tokens(encode(text), tokenizer, reading)


def test_calls_are_those_of_the_tokens(tokenizer: ChatTokenizer, encode: Encode) -> None:
    found = readings(tokenizer, encode, written())
    assert any(each.has_calls_of(message()) and "Let me see." in each.content for each in found)
    spaced = message()
    spaced["tool_calls"][0]["function"]["arguments"] = '{"b": [2.5,  "x"],\n "a": 1}'
    assert any(each.has_calls_of(spaced) for each in found)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        None,
        message()["tool_calls"][:1],
        message()["tool_calls"][::-1],
        [message()["tool_calls"][0], {"function": {"name": "look_up", "arguments": '{"a": 1}'}}],
        [message()["tool_calls"][0], {"function": "look_up"}],
        ["add", None],
    ],
)
def test_other_calls_are_not(tokenizer: ChatTokenizer, encode: Encode, calls: object) -> None:
    found = readings(tokenizer, encode, written())
    assert not any(each.has_calls_of(message(tool_calls=calls)) for each in found)


def test_a_call_that_broke_off_is_compared_as_it_stands(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    found = readings(tokenizer, encode, '<tool_call>{"name": "add", "arguments": {"a": 1')
    for arguments, is_same in (('{"a": 1', True), ('{"a": 2', False)):
        call = {"function": {"name": "add", "arguments": arguments}}
        assert any(each.has_calls_of({"tool_calls": [call]}) for each in found) == is_same


def test_without_tools_no_calls_are_read(tokenizer: ChatTokenizer) -> None:
    assert tool_reading(request(), tokenizer) is None
    assert tool_reading(request(tools=TOOLS, tool_choice="none"), tokenizer) is None
