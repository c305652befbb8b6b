"""The largest bodies that the default bounds of a gateway let through, one way of being large each.

Bodies have at most 8 MiB, 1,000,000 characters of text, 200,000 values, 100,000 texts and names,
25,000 fields, 10,000 objects and lists, and 200 of them in one another (`limits.*`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

Document = dict[str, Any]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT: Final = "/v1/messages/count_tokens"
TOKENIZE: Final = "/v1/tokenize"
DETOKENIZE: Final = "/v1/detokenize"

_NUM_OBJECTS: Final = 9_900
_NUM_FIELDS: Final = 24_900
_NUM_STRINGS: Final = 99_000
_NUM_VALUES: Final = 199_000
_NUM_CHARS: Final = 999_000
_SHORT: Final = {"max_output_tokens": 16}
_WORDS: Final = "the quick brown fox, jumps over: a lazy dog; "


def _text(num_chars: int = _NUM_CHARS) -> str:
    return (_WORDS * (num_chars // len(_WORDS) + 1))[:num_chars]


def _chat(content: Any = "hi", **more: Any) -> Document:
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": 1, **more}


def _tool(parameters: Document, name: str = "f") -> Document:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _wide(num_fields: int) -> Document:
    """A schema with as many properties as there may be fields."""
    return {"type": "object", "properties": {f"p{i}": True for i in range(num_fields - 8)}}


def _many_objects(num_objects: int = _NUM_OBJECTS) -> Document:
    """A schema with as many properties as there may be objects."""
    properties = {f"p{i}": {"type": "null"} for i in range(num_objects - 8)}
    return {"type": "object", "properties": properties}


def _nested(depth: int) -> Document:
    inner: Document = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def _calls(num_calls: int, arguments: str) -> list[Document]:
    function = {"name": "f", "arguments": arguments}
    return [{"id": f"c{i}", "type": "function", "function": function} for i in range(num_calls)]


def _after_calls(num_calls: int, arguments: str) -> Document:
    """A conversation whose last answer called tools."""
    calls = _calls(num_calls, arguments)
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls[:1]]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *answers,
    ]
    return {**_chat(), "messages": messages}


def _format(schema: Document) -> Document:
    json_schema = {"name": "s", "schema": schema}
    return _chat(response_format={"type": "json_schema", "json_schema": json_schema})


def _blocks(num_blocks: int) -> list[Document]:
    return [{"type": "text", "text": "x"}] * num_blocks


def _tool_uses(inputs: list[Any]) -> Document:
    """A conversation of the Messages API that ends with the results of calls."""
    uses = [
        {"type": "tool_use", "id": f"t{i}", "name": "f", "input": given}
        for i, given in enumerate(inputs)
    ]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "1"} for use in uses]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
    ]
    return {"max_tokens": 1, "messages": messages}


def _many_arguments() -> str:
    return json.dumps({f"a{i}": i for i in range(_NUM_FIELDS)})


_BODIES: Final[Mapping[str, tuple[str, Callable[[], Document]]]] = {
    "chat: smallest": (CHAT, _chat),
    "chat: text": (CHAT, lambda: _chat(_text())),
    "chat: text without spaces": (CHAT, lambda: _chat("a" * _NUM_CHARS)),
    "chat: text beyond the bound": (CHAT, lambda: _chat(_text(8_380_000))),
    "chat: escaped text": (CHAT, lambda: _chat("é" * _NUM_CHARS)),
    "chat: messages": (
        CHAT,
        lambda: {**_chat(), "messages": [{"role": "user", "content": "x"}] * _NUM_OBJECTS},
    ),
    "chat: parts": (CHAT, lambda: _chat(_blocks(_NUM_OBJECTS))),
    "chat: tools": (
        CHAT,
        lambda: _chat(tools=[_tool(_many_objects(75), f"f{i}") for i in range(128)]),
    ),
    "chat: properties of a tool": (CHAT, lambda: _chat(tools=[_tool(_wide(_NUM_FIELDS))])),
    "chat: schemas in a tool": (CHAT, lambda: _chat(tools=[_tool(_many_objects())])),
    "chat: description of a tool": (
        CHAT,
        lambda: _chat(tools=[_tool({"type": "object", "description": _text()})]),
    ),
    "chat: enum of a tool": (
        CHAT,
        lambda: _chat(tools=[_tool({"enum": [f"e{i}" for i in range(_NUM_STRINGS)]})]),
    ),
    "chat: nested tool": (CHAT, lambda: _chat(tools=[_tool(_nested(190))])),
    "chat: calls": (CHAT, lambda: _after_calls(_NUM_OBJECTS // 2 - 5, "{}")),
    "chat: arguments of a call": (CHAT, lambda: _after_calls(1, _many_arguments())),
    "chat: values in a call": (CHAT, lambda: _after_calls(1, json.dumps({"a": [0] * _NUM_VALUES}))),
    "chat: nested call": (CHAT, lambda: _after_calls(1, json.dumps(_nested(190)))),
    "chat: calls with arguments": (
        CHAT,
        lambda: _after_calls(1000, json.dumps({f"a{i}": i for i in range(24)})),
    ),
    "chat: schema": (CHAT, lambda: _format(_many_objects())),
    "chat: properties of a schema": (CHAT, lambda: _format(_wide(_NUM_FIELDS))),
    "chat: enum of a schema": (
        CHAT,
        lambda: _format({"enum": [f"e{i}" for i in range(_NUM_STRINGS)]}),
    ),
    "chat: logit_bias": (
        CHAT,
        lambda: _chat(logit_bias={str(i): 1 for i in range(_NUM_FIELDS)}),
    ),
    "chat: stop": (CHAT, lambda: _chat(stop=[f"s{i}" for i in range(_NUM_STRINGS)])),
    "chat: metadata": (CHAT, lambda: _chat(metadata={str(i): "x" for i in range(_NUM_FIELDS)})),
    "chat: prediction": (
        CHAT,
        lambda: _chat(prediction={"type": "content", "content": _text()}),
    ),
    "chat: unknown numbers": (CHAT, lambda: _chat(unknown=[1.5] * _NUM_VALUES)),
    "chat: unknown texts": (CHAT, lambda: _chat(unknown=["x"] * _NUM_STRINGS)),
    "chat: unknown fields": (
        CHAT,
        lambda: _chat() | {f"u{i}": 1 for i in range(_NUM_FIELDS)},
    ),
    "completion: prompts": (
        COMPLETIONS,
        lambda: {"prompt": [_text(_NUM_CHARS // 16)] * 16, "max_tokens": 1},
    ),
    "completion: too many prompts": (
        COMPLETIONS,
        lambda: {"prompt": ["x"] * _NUM_STRINGS, "max_tokens": 1},
    ),
    "completion: tokens": (
        COMPLETIONS,
        lambda: {"prompt": [5] * _NUM_VALUES, "max_tokens": 1},
    ),
    "completion: lists of tokens": (
        COMPLETIONS,
        lambda: {"prompt": [[5] * (_NUM_VALUES // 16)] * 16, "max_tokens": 1},
    ),
    "completion: text": (
        COMPLETIONS,
        lambda: {"prompt": _text(), "max_tokens": 1},
    ),
    "responses: text": (RESPONSES, lambda: {"input": _text(), **_SHORT}),
    "responses: items": (
        RESPONSES,
        lambda: {
            **_SHORT,
            "input": [{"type": "message", "role": "user", "content": "x"}] * (_NUM_FIELDS // 3),
        },
    ),
    "responses: parts": (
        RESPONSES,
        lambda: {
            **_SHORT,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}] * _NUM_OBJECTS}
            ],
        },
    ),
    "responses: calls": (
        RESPONSES,
        lambda: {
            **_SHORT,
            "input": [
                {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}
                for i in range(_NUM_FIELDS // 4)
            ],
        },
    ),
    "responses: tools": (
        RESPONSES,
        lambda: {
            "input": "hi",
            **_SHORT,
            "tools": [
                {"type": "function", "name": f"f{i}", "parameters": _many_objects(75)}
                for i in range(128)
            ],
        },
    ),
    "responses: schemas in a tool": (
        RESPONSES,
        lambda: {
            "input": "hi",
            **_SHORT,
            "tools": [{"type": "function", "name": "f", "parameters": _many_objects()}],
        },
    ),
    "messages: blocks": (
        MESSAGES,
        lambda: {**_chat(_blocks(_NUM_OBJECTS)), "max_tokens": 1},
    ),
    "messages: system": (MESSAGES, lambda: _chat(system=_blocks(_NUM_OBJECTS))),
    "messages: uses": (
        MESSAGES,
        lambda: _tool_uses([{}] * 3250),
    ),
    "messages: input of a use": (
        MESSAGES,
        lambda: _tool_uses([{f"a{i}": i for i in range(_NUM_FIELDS - 20)}]),
    ),
    "messages: objects in a use": (
        MESSAGES,
        lambda: _tool_uses([{"a": [{}] * (_NUM_OBJECTS - 10)}]),
    ),
    "messages: values in a use": (
        MESSAGES,
        lambda: _tool_uses([{"a": [1.5] * (_NUM_VALUES - 100)}]),
    ),
    "messages: nested use": (MESSAGES, lambda: _tool_uses([_nested(180)])),
    "messages: schemas in a tool": (
        MESSAGES,
        lambda: _chat(tools=[{"name": "f", "input_schema": _many_objects()}]),
    ),
    "count_tokens: text": (COUNT, lambda: _counted(_text())),
    "count_tokens: blocks": (COUNT, lambda: _counted(_blocks(_NUM_OBJECTS))),
    "count_tokens: messages": (
        COUNT,
        lambda: {
            "messages": [{"role": "user", "content": "x"}] * _NUM_OBJECTS,
        },
    ),
    "count_tokens: schemas in a tool": (
        COUNT,
        lambda: {**_counted("hi"), "tools": [{"name": "f", "input_schema": _many_objects()}]},
    ),
    "count_tokens: input of a use": (
        COUNT,
        lambda: {
            "messages": _tool_uses([{f"a{i}": i for i in range(_NUM_FIELDS - 20)}])["messages"]
        },
    ),
    "tokenize: text": (TOKENIZE, lambda: {"prompt": _text()}),
    "tokenize: messages": (
        TOKENIZE,
        lambda: {
            "messages": [{"role": "user", "content": "x"}] * _NUM_OBJECTS,
        },
    ),
    "detokenize: tokens": (
        DETOKENIZE,
        lambda: {"tokens": [300] * _NUM_VALUES},
    ),
}


def _counted(content: Any) -> Document:
    return {"messages": [{"role": "user", "content": content}]}


def largest_bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """Return path and bytes of each body for a model, by name."""
    return {
        name: (path, json.dumps(make() | {"model": model}, separators=(",", ":")).encode())
        for name, (path, make) in _BODIES.items()
    }
