"""Requests of /v1/responses as chat requests, and what is refused of them."""

import asyncio
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.http.apis.responses.api import ResponsesApi
from outrider.gateway.http.apis.responses.items import read_messages
from outrider.gateway.http.apis.responses.request import FunctionCallItem

SURFACE = ResponsesApi(has_upstream_tiers=True)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "name": "f",
    "description": "Does it.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": True,
}
OTHER_TOOL = {"type": "function", "name": "g", "parameters": None}


def chat_of(**fields: Any) -> dict[str, Any]:
    """The chat request, which chat's own schema takes."""
    body = json.dumps({"model": "auto", "input": "Hello", **fields}).encode()
    chat = asyncio.run(SURFACE.read(body)).chat_body
    ChatRequest.model_validate_json(chat)
    return dict(json.loads(chat))


def messages_of(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(chat_of(input=list(items), **fields)["messages"])


def refusal_of(**fields: Any) -> BadRequestError:
    body = json.dumps({"model": "auto", "input": "Hello", **fields}).encode()
    with pytest.raises(BadRequestError) as error:
        asyncio.run(SURFACE.read(body))
    return error.value


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, text: Any = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}] if text else []
    return {"type": "reasoning", "id": "rs_1", "summary": summary, **fields}


def answer(*texts: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "content": content, **fields}


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_text_is_one_question() -> None:
    assert chat_of() == {"model": "auto", "messages": HELLO}
    assert chat_of(instructions="Be short.")["messages"] == [
        {"role": "system", "content": "Be short."},
        *HELLO,
    ]


def test_messages_of_every_form() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages_of(
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": parts, "status": "completed", "id": "m"},
        answer("Hi", "there", id="msg_1", status="completed"),
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": None},
        {"role": "assistant", "content": "Well."},
    ) == [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "Hi\nthere"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "Well."},
    ]


def test_items_between_user_messages_are_one_answer() -> None:
    assert messages_of(
        *HELLO,
        thought("hm"),
        answer("I look."),
        call("c1"),
        thought("and"),
        call("c2", "g", '{"x": 1}'),
        answer("More."),
        output("c1"),
        output("c2", [{"type": "input_text", "text": "5"}]),
        thought("so", content=[{"type": "reasoning_text", "text": "So!"}]),
        answer("It is 9."),
        thought("next"),
        answer("Anything else?"),
    ) == [
        *HELLO,
        {
            "role": "assistant",
            "content": "I look.\nMore.",
            "tool_calls": [
                CALL,
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "g", "arguments": '{"x": 1}'},
                },
            ],
            "reasoning_content": "hm\nand",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "tool", "tool_call_id": "c2", "content": "5"},
        {"role": "assistant", "content": "It is 9.", "reasoning_content": "So!"},
        {"role": "assistant", "content": "Anything else?", "reasoning_content": "next"},
    ]


def test_calls_without_text_have_none() -> None:
    assert messages_of(*HELLO, call("c1"), output("c1")) == [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]


def test_encrypted_thoughts_are_passed_over() -> None:
    assert messages_of(*HELLO, thought("", encrypted_content="gAAA"), answer("Hi")) == [
        *HELLO,
        {"role": "assistant", "content": "Hi"},
    ]
    assert refusal_of(input=[thought("", encrypted_content="gAAA")]).param == "input"


def test_an_output_can_be_sent_back_as_it_came() -> None:
    writer = asyncio.run(SURFACE.read(b'{"model": "auto", "input": "x"}')).writer
    message = {
        "content": "Hi",
        "reasoning_content": "hm",
        "tool_calls": [CALL],
        "role": "assistant",
    }
    body = {"id": "chatcmpl-1", "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    items = json.loads(writer.whole(msgspec.json.encode(body)))["output"]
    assert len(items) == 3
    assert messages_of(*HELLO, *items, output("c1"))[1] == message


def test_fields_that_chat_shares() -> None:
    shared = {
        "temperature": 0.5,
        "top_p": 0.9,
        "service_tier": "flex",
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "outrider": {"tier": "small"},
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["###"],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1.0},
        "min_tokens": 1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    chat = chat_of(**shared)
    assert {name: chat[name] for name in shared} == shared


def test_fields_of_other_names() -> None:
    chat = chat_of(
        stream=True,
        max_output_tokens=9.0,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )
    assert chat["stream"] is True
    assert chat["stream_options"] == {"include_usage": True}
    assert chat["max_completion_tokens"] == 9
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 0)
    assert chat_of(top_logprobs=3)["top_logprobs"] == 3
    assert "logprobs" not in chat_of(top_logprobs=0, include=[])


def test_fields_that_change_nothing() -> None:
    assert chat_of(
        store=False,
        background=False,
        truncation="disabled",
        metadata={"a": "b"},
        max_tool_calls=3,
        previous_response_id=None,
        conversation=None,
        prompt=None,
        context_management=[],
        stream=False,
        stream_options={"include_obfuscation": False},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        reasoning={"summary": "auto", "context": "auto", "mode": "standard"},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        input=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "Hello",
                        "prompt_cache_breakpoint": {"mode": "explicit"},
                    }
                ],
            }
        ],
    ) == {"model": "auto", "messages": HELLO}


def test_fields_for_upstream_servers_are_passed_on() -> None:
    body = {"model": "m", "input": "x", "reasoning": {"effort": "high"}}
    body["text"] = {"verbosity": "low"}
    chat = json.loads(asyncio.run(SURFACE.read(json.dumps(body).encode())).chat_body)
    assert (chat["reasoning_effort"], chat["verbosity"]) == ("high", "low")


def test_structured_text() -> None:
    schema = {"type": "object", "properties": {}, "description": "odd \u2028"}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert chat_of(text={"format": form})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    form = {"type": "json_object"}
    assert chat_of(text={"format": form})["response_format"] == form


def test_tools() -> None:
    chat = chat_of(tools=[TOOL, OTHER_TOOL], tool_choice="required", parallel_tool_calls=False)
    assert chat["tools"] == [
        {"type": "function", "function": {n: v for n, v in TOOL.items() if n != "type"}},
        {"type": "function", "function": {"name": "g"}},
    ]
    assert chat["tool_choice"] == "required"
    assert chat["parallel_tool_calls"] is False
    named = chat_of(tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "f"}}


def test_allowed_tools_are_the_only_ones() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "g"}],
    }
    chat = chat_of(tools=[TOOL, OTHER_TOOL], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["g"]
    assert chat["tool_choice"] == "required"
    assert refusal_of(tools=[TOOL], tool_choice=allowed).param == "tool_choice.tools.0.name"


IMAGE = {"type": "input_image", "image_url": "data:x"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"store": "yes"}, "store", ""),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "kept"),
        ({"background": True}, "background", "not in the background"),
        ({"truncation": "oldest"}, "truncation", ""),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"n": 2}, "n", "unknown"),
        ({"messages": []}, "messages", "unknown"),
        ({"model": None}, "model", ""),
        ({"input": []}, "input", ""),
        ({"input": None}, "input", ""),
        ({"input": [7]}, "input.0", "must be one of message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "Nothing is stored here"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id", "required"),
        ({"input": [{"type": ["message"]}]}, "input.0", "must be one of message"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type", "not supported"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "not supported"),
        ({"input": [{"content": "x"}]}, "input.0.role", "required"),
        (
            {"input": [{"role": "user", "content": [IMAGE]}]},
            "input.0.content.0.type",
            "'input_image' is not supported",
        ),
        ({"input": [*HELLO, output("c9")]}, "input.1.call_id", "no tool call with this id"),
        ({"input": [call("c1", arguments="{")]}, "input.0.arguments", "not valid JSON"),
        ({"input": [call("c1", arguments="[]")]}, "input.0.arguments", "not a JSON object"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'web_search' is not supported"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name", ""),
        ({"tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice.type", ""),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", ""),
        ({"include": ["everything"]}, "include.0", "not supported"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", ""),
        ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"service_tier": "scale"}, "service_tier", "not supported"),
        ({"outrider": {"tier": 7}}, "outrider.tier", ""),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict, param: str, words: str) -> None:
    error = refusal_of(**fields)
    assert error.param == param
    assert words in str(error)


def test_arguments_are_read_over_and_not_built() -> None:
    """Issue 15, second round: no bound counts what a text holds, and 8 MB of it took 0.6 s."""
    big = '{"a":[' + "{}," * 200_000 + "{}]}"
    tracemalloc.start()
    try:
        read_messages(None, [FunctionCallItem(**call("c1", arguments=big))])
        assert tracemalloc.get_traced_memory()[1] < 5 * len(big)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"model": "m", "input": "x", "tools": NaN}',
        b'{"model":"m","input":"x","chat_template_kwargs":{"a":NaN}}',
        b'{"model":"m","input":"x","chat_template_kwargs":{"a":1e999}}',
        b'{"model":"m","input":"x","chat_template_kwargs":{"a":' + b"[" * 500 + b"]" * 500 + b"}}",
        b'{"model":"m","input":' + b"[" * 100_000,
        b'{"model":"m","input":"\\ud800"}',
    ],
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        asyncio.run(SURFACE.read(body))


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("messages", "input"),
        ("messages.3.content", "input"),
        ("max_tokens", "max_output_tokens"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools.2.function.parameters", "tools.2.parameters"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("tool_choice", "tool_choice"),
        ("reasoning_effort", "reasoning.effort"),
        ("verbosity", "text.verbosity"),
        ("outrider.tier", "outrider.tier"),
        ("min_tokens", "min_tokens"),
        ("model", "model"),
    ],
)
def test_chat_s_complaints_name_fields_of_this_api(param: str, own: str) -> None:
    problem = Problem(
        status=400,
        message=f"{param}: not so ({param}s).",
        type="invalid_request_error",
        param=param,
    )
    error = json.loads(SURFACE.problem_body(problem))["error"]
    assert error == {
        "message": f"{own}: not so ({param}s).",
        "type": "invalid_request_error",
        "param": own,
        "code": None,
    }


def test_an_error_body_of_another_server_is_passed_on() -> None:
    problem = Problem(status=400, message="x", type="y", param="messages", raw=b'{"error": 1}')
    assert SURFACE.problem_body(problem) == b'{"error": 1}'
