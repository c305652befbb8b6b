"""The deprecated functions of chat, with the official client."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import openai
import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.responses import ChatCompletion
from tests.gateway.answers import read_answer
from tests.gateway.conftest import Server, scripted_server

HELLO: Final[list[Any]] = [{"role": "user", "content": "Hello"}]
WEATHER: Final[Any] = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
OSLO: Final = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def running_server(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[Server]:
    """With room for tools in a prompt."""
    with scripted_server(tokenizer, encode, max_context=2048) as server:
        yield server


@pytest.fixture(autouse=True)
def _is_deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def prompts(server: Server) -> list[tuple[int, ...]]:
    return [tuple(request.prompt_token_ids) for request in server.engine.submitted]


def test_a_call_comes_back_in_the_old_shape(server: Server, client: openai.OpenAI) -> None:
    server.says(OSLO)
    answer = client.chat.completions.create(model="large", messages=HELLO, functions=[WEATHER])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("function_call", None)
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "get_weather"
    assert choice.message.function_call.arguments == '{"city": "Oslo"}'
    assert choice.message.tool_calls is None
    client.chat.completions.create(
        model="large",
        messages=HELLO,
        tools=[{"type": "function", "function": WEATHER}],
        parallel_tool_calls=False,
    )
    old, new = server.engine.submitted
    assert old.prompt_token_ids == new.prompt_token_ids
    assert old.grammar == new.grammar


def test_a_streamed_call(server: Server, client: openai.OpenAI) -> None:
    server.says(OSLO, group=3)
    chunks = list(
        client.chat.completions.create(
            model="large", messages=HELLO, functions=[WEATHER], stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [delta.function_call for delta in deltas if delta.function_call is not None]
    assert [call.name for call in calls if call.name] == ["get_weather"]
    assert "".join(call.arguments or "" for call in calls) == '{"city": "Oslo"}'
    assert chunks[-1].choices[0].finish_reason == "function_call"
    assert all(delta.tool_calls is None for delta in deltas)


def test_a_text_and_a_second_turn(server: Server, http: httpx.Client) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    told = {"role": "function", "name": "get_weather", "content": "rain"}
    turns = [*HELLO, {"role": "assistant", "content": None, "function_call": call}, told]
    body = {"model": "large", "messages": turns, "functions": [WEATHER]}
    answer = http.post("/v1/chat/completions", json=body)
    choice = read_answer(ChatCompletion, answer.content).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there!", "stop")
    made = {"id": "call_function_1", "type": "function", "function": call}
    newer = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {**told, "role": "tool", "tool_call_id": made["id"]},
    ]
    tool = {"type": "function", "function": WEATHER}
    http.post(
        "/v1/chat/completions", json={**body, "messages": newer, "functions": None, "tools": [tool]}
    )
    first, second = prompts(server)
    assert first == second


def test_a_named_function_must_be_called_and_none_may_not(
    server: Server, http: httpx.Client
) -> None:
    server.says(OSLO)
    for choice in ({"name": "get_weather"}, "none", "auto"):
        body = {"messages": HELLO, "functions": [WEATHER], "function_call": choice}
        assert http.post("/v1/chat/completions", json={"model": "large", **body}).status_code == 200
    named, none, auto = (request.grammar for request in server.engine.submitted)
    assert none is None
    assert None not in (named, auto)
    assert named != auto


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [WEATHER], "function_call": {"name": "f"}}, "function_call.name"),
        ({"functions": [WEATHER], "tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"),
        ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]}, "tools"),
    ],
)
def test_wrong_fields_are_named(
    server: Server, http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
