"""The official client of OpenAI's Responses API against a running gateway."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from benchmarks.shared.mock_script import MockScript, ToolCall
from benchmarks.shared.toxics import Toxic
from outrider.engine.errors import QueueFullError
from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.gateway.conftest import OpenWorld, Server, scripted_server, wait_for
from tests.gateway.http.apis.response_events import read_events, read_response, rebuilt
from tests.gateway.scripted_client import Script

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def running_server(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[Server]:
    """One with room for tools."""
    with scripted_server(tokenizer, encode, max_context=2048) as server:
        yield server


def drain(stream: Any, into: list) -> None:
    into.extend(stream)


def test_a_whole_response(server: Server, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="auto",
        instructions="Be short.",
        input="Hello",
        max_output_tokens=9,
        temperature=0,
        metadata={"a": "b"},
        service_tier="flex",
    )
    assert response.service_tier == "flex"
    assert response.status == "completed"
    assert response.output_text == "Hello there!"
    assert response.model == "test/small-model"
    assert response.metadata == {"a": "b"}
    (request,) = server.engine.submitted
    assert request.sampling.max_tokens == 9
    prompt = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    wanted = server.encode(prompt + "<|im_start|>assistant\n")
    assert list(request.prompt_token_ids) == wanted
    assert response.usage.input_tokens == len(wanted)
    assert response.usage.output_tokens == len(server.encode("Hello there!"))
    assert response.outrider["tier"] == "small"


def test_the_wire_has_the_types_of_the_client(server: Server, http: httpx.Client) -> None:
    body = {"model": "auto", "input": "Hello", "tools": [ADD], "top_logprobs": 2}
    whole = http.post("/v1/responses", json=body)
    assert whole.headers["x-outrider-tier"] == "small"
    response = read_response(whole.content)
    with http.stream("POST", "/v1/responses", json={**body, "stream": True}) as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = read_events(stream.read())
    last = events[-1]["response"]
    assert rebuilt(events) == last["output"]
    assert last["output"][0]["content"] == response["output"][0]["content"]
    assert last["output"][0]["content"][0]["logprobs"]
    assert last["usage"] == response["usage"]
    assert last["id"] != response["id"]


def test_a_stream(server: Server, client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="auto", input="Hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(deltas) == "Hello there!"
    assert isinstance(events[-1].response, Response)
    assert events[-1].response.output_text == "Hello there!"


def test_the_client_s_stream_helper(server: Server, client: openai.OpenAI) -> None:
    server.says("<think>\nthe fox</think>\n\nHello")
    with client.responses.stream(model="auto", input="Hello") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.reasoning_summary_text.delta" in kinds
    assert final.output_text == "Hello"
    assert final.output[0].summary[0].text == "the fox"
    assert final.usage.output_tokens_details.reasoning_tokens > 3


def test_a_loop_of_tools(server: Server, client: openai.OpenAI, tokenizer: ChatTokenizer) -> None:
    server.says("I add. " + CALL)
    items: list[Any] = [{"role": "user", "content": "What is 1 + 1?"}]
    first = client.responses.create(model="large", input=items, tools=[ADD])
    message, call = first.output
    assert message.content[0].text == "I add."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"x": 1})
    items += first.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    server.says("It is 2.")
    second = client.responses.create(model="large", input=items, tools=[ADD])
    assert second.output_text == "It is 2."
    prompt = tokenizer.decode(server.engine.submitted[-1].prompt_token_ids)
    assert ADD["description"] in prompt
    assert "I add.\n" + CALL in prompt
    assert "<tool_response>\n2\n</tool_response>" in prompt


def test_streamed_calls(server: Server, client: openai.OpenAI) -> None:
    server.says(CALL)
    with client.responses.stream(model="large", input="Hello", tools=[ADD]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"x": 1}
    (call,) = final.output
    assert call.name == "add"
    assert json.loads(call.arguments) == {"x": 1}


def test_output_of_client_helpers_can_be_sent_back(server: Server, client: openai.OpenAI) -> None:
    server.says("<think>\nthe fox</think>\n\nI add. " + CALL)
    items: list[Any] = [{"role": "user", "content": "Hello"}]
    with client.responses.stream(model="large", input=items, tools=[ADD]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": final.output[2].call_id, "output": "2"}
    server.says('{"x": 3}')
    parsed = client.responses.parse(
        model="large", input=[*items, *final.output, result], text_format=Point
    )
    again = client.responses.create(
        model="large", input=[*items, *parsed.output, {"role": "user", "content": "Again"}]
    )
    assert again.status == "completed"


class Point(BaseModel):
    x: int


def test_structured_text(server: Server, client: openai.OpenAI) -> None:
    server.says('{"x": 3}')
    parsed = client.responses.parse(model="large", input="Hello", text_format=Point)
    assert parsed.output_parsed == Point(x=3)
    (request,) = server.engine.submitted
    assert request.grammar is not None
    assert parsed.text.format.type == "json_schema"


def test_a_response_that_is_cut(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello there", finish_reason="length")
    response = client.responses.create(model="auto", input="Hello", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="auto", input="Hello", stream=True))
    assert events[-1].type == "response.incomplete"


def test_errors_have_the_right_class(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-4", input="Hello")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as stored:
        client.responses.create(model="auto", input="Hello", previous_response_id="resp_1")
    assert stored.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as twice:
        client.responses.create(model="auto", input="Hello", tools=[ADD, ADD])
    assert twice.value.param == "tools.1.name"
    with pytest.raises(openai.BadRequestError) as context:
        client.responses.create(model="auto", input="Hello", max_output_tokens=2047)
    assert context.value.code == "context_length_exceeded"
    server.engine.script = lambda _: Script(
        refusal=QueueFullError(num_waiting=512, retry_after_s=3.0)
    )
    with pytest.raises(openai.RateLimitError) as full:
        client.responses.create(model="auto", input="Hello", stream=True)
    assert full.value.response.headers["retry-after"] == "3"


def test_the_engine_dies_midway(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello there", failure=("engine_died", "It stopped."))
    events: list[Any] = []
    drain(client.responses.create(model="auto", input="Hello", stream=True), events)
    failed = events[-1]
    assert failed.type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error.code == "server_error"
    assert failed.response.output_text == "Hello there"
    assert failed.response.outrider["code"] == "engine_died"
    assert failed.response.outrider["completion_tokens"] == len(server.encode("Hello there"))


def test_leaving_a_stream_aborts(server: Server, client: openai.OpenAI) -> None:
    server.says("Hello there", hangs=True)
    stream = client.responses.create(model="auto", input="Hello", stream=True)
    next(stream)
    stream.close()
    wait_for(lambda: len(server.engine.aborted) == 1)
    assert not server.engine.running


def test_bad_bodies(server: Server, http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for body in (b"", b"{", b"[]", b"\xff", b'{"model": "auto", "input": "x", "top_p": NaN}'):
        answer = http.post("/v1/responses", content=body, headers=headers)
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert http.post("/v1/responses", content=b"{}").status_code == 415
    assert http.get("/v1/responses").status_code == 405


def test_the_trace_header(server: Server, http: httpx.Client) -> None:
    server.says("Hello there", group=2)
    body = {"model": "auto", "input": "Hello", "stream": True}
    answer = http.post("/v1/responses", json=body, headers={"x-outrider-trace": "1"})
    events = read_events(answer.content)
    tokens = [
        token for event in events if "delta" in event for token in event["outrider"]["tokens"]
    ]
    assert "".join(text for text, _ in tokens) == "Hello there"
    assert {drafted for _, drafted in tokens} == {True, False}


def test_an_upstream_tier_answers_in_the_responses_format(open_world: OpenWorld) -> None:
    call = ToolCall(name="add", arguments='{"x":1}')
    script = MockScript(pieces=("Well, ", "I add."), reasoning=("hm",), tool_calls=(call,))
    body = {
        "model": "cloud",
        "input": "What is 1 + 1?",
        "tools": [ADD],
        "max_output_tokens": 9,
        "reasoning": {"effort": "high"},
        "metadata": {"a": "b"},
    }
    with open_world(clouds=(script,)) as world:
        whole = read_response(world.http.post("/v1/responses", json=body).content)
        stream = world.http.post("/v1/responses", json={**body, "stream": True})
        events = read_events(stream.content)
        asked = world.cloud.requests[-1].document
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert rebuilt(events) == last["output"]
    for response in (whole, last):
        _, message, called = response["output"]
        assert message["content"][0]["text"] == "Well, I add."
        assert (called["name"], called["arguments"]) == ("add", '{"x":1}')
        assert response["model"] == "mock-model"
        assert response["outrider"]["tier"] == "cloud"
        assert response["metadata"] == {"a": "b"}
        assert response["usage"]["output_tokens"] > 0
    assert asked["reasoning_effort"] == "high"
    assert asked["tools"][0]["function"]["name"] == "add"
    assert "metadata" not in asked


def test_refusals_of_an_upstream_server_keep_their_words(open_world: OpenWorld) -> None:
    toxic = Toxic(kind="status", status=400)
    with open_world(clouds=(MockScript(toxic=toxic),)) as world:
        answer = world.http.post("/v1/responses", json={"model": "cloud", "input": "Hello"})
    assert answer.status_code == 400
    assert answer.headers["x-outrider-tier"] == "cloud"
    assert "message" in answer.json()["error"]
