"""Tools of agents in /v1/responses: namespaces, free text, and hosted tools, which are left out."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.http.apis.api import TranslatedRequest
from outrider.gateway.http.apis.responses.api import ResponsesApi
from outrider.gateway.http.apis.responses.tools import text_arguments, text_of
from tests.gateway.conftest import OpenWorld
from tests.gateway.http.apis.chat_answers import call, chunk, completion, ending
from tests.gateway.http.apis.response_events import read_events, read_response, rebuilt

PARAMETERS = {"type": "object", "properties": {"id": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "close", "strict": False, "parameters": PARAMETERS}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION]}
CUSTOM = {"type": "custom", "name": "patch", "description": "Free text."}
HOSTED = {"type": "web_search", "external_web_access": False}
AGENT: dict[str, Any] = {
    "model": "large",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    ],
    "tools": [FUNCTION, NAMESPACE, HOSTED, CUSTOM],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session-1",
    "client_metadata": {"installation": "x"},
}


SURFACE = ResponsesApi(has_upstream_tiers=True, ignores_unknown=True)
NAMES = ["close", "agents__close", "patch"]


def read(**fields: Any) -> TranslatedRequest:
    body = json.dumps({**AGENT, **fields}).encode()
    return asyncio.run(SURFACE.read(body))


def chat_of(**fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(read(**fields).chat_body)
    ChatRequest.model_validate({**document, "reasoning_effort": None})
    return document


def test_an_agents_request_is_a_chat() -> None:
    translated = read()
    chat = json.loads(translated.chat_body)
    functions = [tool["function"] for tool in chat["tools"]]
    assert [function["name"] for function in functions] == NAMES
    assert functions[0] == {"name": "close", "strict": False, "parameters": PARAMETERS}
    assert functions[1]["parameters"] == PARAMETERS
    assert functions[2]["parameters"]["required"] == ["input"]
    assert translated.ignored == ("tools.2.type",)


def test_an_agents_request_is_answered(open_world: OpenWorld) -> None:
    with open_world(clouds=(), tiers={}) as world:
        world.says("Hi there.")
        document = {**AGENT, "tools": [FUNCTION, HOSTED], "tool_choice": "none"}
        answer = world.http.post("/v1/responses", json=document)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-outrider-ignored-fields"] == "tools.1.type"
    assert answer.json()["output"][0]["content"][0]["text"] == "Hi there."


def test_a_grammar_of_free_text_is_named() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
    assert read(tools=[CUSTOM | {"format": lark}]).ignored == ("tools.0.format",)
    assert read(tools=[CUSTOM | {"format": {"type": "text"}}]).ignored == ()


def test_the_strict_refuse_by_name() -> None:
    strict = ResponsesApi(has_upstream_tiers=True)
    with pytest.raises(BadRequestError, match=r"tools\.2\.type: 'web_search' is not supported"):
        asyncio.run(strict.read(json.dumps(AGENT).encode()))
    asyncio.run(strict.read(json.dumps({**AGENT, "tools": [NAMESPACE, CUSTOM]}).encode()))


@pytest.mark.parametrize("tool", [{}, {"type": 3}, 3, {"type": "custom"}, {"type": "namespace"}])
def test_what_is_no_tool_is_refused(tool: object) -> None:
    with pytest.raises(BadRequestError):
        read(tools=[tool])


def test_calls_come_back_as_the_tools_were_offered() -> None:
    patch = '*** Begin\n+"é"\n'
    parts = [
        chunk(tool_calls=[call(0, "{}", "c1", "close")]),
        chunk(tool_calls=[call(1, '{"id":', "c2", "agents__close")]),
        chunk(tool_calls=[call(1, '"7"}')]),
        chunk(tool_calls=[call(2, text_arguments(patch)[:9], "c3", "patch")]),
        chunk(tool_calls=[call(2, text_arguments(patch)[9:])]),
        chunk(finish="tool_calls"),
        ending(),
    ]
    writer = read(stream=True).writer
    events = read_events(b"".join(writer.part(part) for part in parts))
    output = events[-1]["response"]["output"]
    assert rebuilt(events) == output
    plain, named, free = ({**item, "id": "", "status": ""} for item in output)
    head = {"id": "", "status": ""}
    close = head | {"type": "function_call", "name": "close"}
    assert plain == close | {"call_id": "c1", "arguments": "{}"}
    assert named == close | {"call_id": "c2", "namespace": "agents", "arguments": '{"id":"7"}'}
    kind = {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": patch}
    assert free == head | kind

    calls = [
        call(i, arguments, f"c{i}", name)
        for i, (name, arguments) in enumerate(
            [("close", "{}"), ("agents__close", '{"id":"7"}'), ("patch", text_arguments(patch))]
        )
    ]
    whole = read_response(read().writer.whole(completion(content=None, tool_calls=calls)))
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in output]
    assert whole["tools"][1:] == [NAMESPACE, HOSTED, CUSTOM]

    # As items of the next request they are the calls that the model made.
    results = [
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "3"},
    ]
    chat = chat_of(input=[*AGENT["input"], *output, *results])
    assert [c["function"]["name"] for c in chat["messages"][2]["tool_calls"]] == NAMES
    assert text_of(chat["messages"][2]["tool_calls"][2]["function"]["arguments"]) == patch


def test_a_custom_tool_can_be_chosen() -> None:
    chosen = chat_of(tool_choice={"type": "custom", "name": "patch"})["tool_choice"]
    assert chosen == {"type": "function", "function": {"name": "patch"}}


@given(text=st.text(max_size=20), cut=st.integers(0, 40))
def test_text_of_cut_arguments_is_a_beginning(text: str, cut: int) -> None:
    arguments = text_arguments(text)
    assert text_of(arguments) == text
    assert text.startswith(text_of(arguments[:cut]))
