"""The official anthropic client against a real server on a real socket."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import pytest

from outrider.engine.errors import QueueFullError
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.http.apis.messages.answers import MessageAnswer, MessagesError
from tests.gateway.answers import read_answer
from tests.gateway.conftest import Server, scripted_server, wait_for
from tests.gateway.scripted_client import Script

HELLO: dict[str, Any] = {
    "model": "auto",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Hello"}],
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
OSLO = 'Wait. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


MAX_CONTEXT = 1024


@pytest.fixture(scope="module")
def running_server(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[Server]:
    """With room for tools in a prompt."""
    with scripted_server(tokenizer, encode, max_context=MAX_CONTEXT) as server:
        yield server


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_whole_answer(server: Server, claude: anthropic.Anthropic) -> None:
    server.says("Hello there, how are you?", group=3, num_cached_tokens=4)
    message = claude.messages.create(**HELLO)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "Hello there, how are you?"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    (request,) = server.engine.submitted
    assert message.usage.input_tokens == len(request.prompt_token_ids) - 4
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.output_tokens == len(server.encode("Hello there, how are you?"))
    assert message._request_id
    assert message.outrider["tier"] == "small"


def test_a_stream_begins_with_the_tokens_of_the_prompt(
    server: Server, claude: anthropic.Anthropic
) -> None:
    server.says("Hello there!", num_cached_tokens=4)
    first, *_ = claude.messages.create(**HELLO, stream=True)
    assert first.type == "message_start"
    (request,) = server.engine.submitted
    usage = first.message.usage
    assert usage.cache_read_input_tokens == 4
    assert usage.input_tokens == len(request.prompt_token_ids) - 4


def test_stream(server: Server, claude: anthropic.Anthropic) -> None:
    server.says("Hello there, how are you?", group=2)
    with claude.messages.stream(**HELLO, extra_body={"temperature": 0.0}) as stream:
        assert stream.response.headers["x-outrider-tier"] == "small"
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == "Hello there, how are you?" == message.content[0].text  # type: ignore[union-attr]
    (request,) = server.engine.submitted
    assert request.sampling.temperature == 0
    assert message.usage.input_tokens == len(request.prompt_token_ids)
    assert message.usage.output_tokens == len(server.encode("Hello there, how are you?"))
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_sequences(server: Server, claude: anthropic.Anthropic, is_streamed: bool) -> None:
    server.says("Hello there. STOP here, please.")
    fields = {**HELLO, "stop_sequences": ["never", "STOP"]}
    if is_streamed:
        with claude.messages.stream(**fields) as stream:
            message: Any = stream.get_final_message()
    else:
        message = claude.messages.create(**fields)
    assert message.content[0].text == "Hello there. "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")


def test_max_tokens_is_bounded_by_the_context(server: Server, claude: anthropic.Anthropic) -> None:
    server.says("Hello there!", finish_reason="length")
    message = claude.messages.create(**{**HELLO, "max_tokens": 20_000})
    (request,) = server.engine.submitted
    assert request.sampling.max_tokens == MAX_CONTEXT - len(request.prompt_token_ids)
    assert message.stop_reason == "max_tokens"


def test_a_prompt_is_read_without_an_answer(server: Server, claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**{**HELLO, "max_tokens": 0})
    (request,) = server.engine.submitted
    assert request.sampling.max_tokens == 0
    assert message.usage.input_tokens == len(request.prompt_token_ids)


def test_a_tool_loop(server: Server, claude: anthropic.Anthropic) -> None:
    server.says(OSLO)
    fields: dict[str, Any] = {**HELLO, "tools": [WEATHER]}
    with claude.messages.stream(**fields) as stream:
        asked = stream.get_final_message()
    text, call = asked.content
    assert text.type == "text"
    assert text.text == "Wait."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    assert asked.stop_reason == "tool_use"
    assert claude.messages.create(**fields).content[1].input == {"city": "Oslo"}

    server.says("It is raining.")
    answer = claude.messages.create(
        **{
            **fields,
            "messages": [
                *HELLO["messages"],
                asked.to_param(),
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}],
                },
            ],
        }
    )
    assert answer.content[0].text == "It is raining."
    prompt = server.engine.submitted[-1].prompt_token_ids
    assert len(prompt) > len(server.engine.submitted[0].prompt_token_ids)


def test_thoughts(server: Server, claude: anthropic.Anthropic) -> None:
    server.says("Let me see.</think>\nFine.")
    fields: dict[str, Any] = {**HELLO, "model": "large"}
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(**fields, thinking=thinking) as stream:
        thought, answer = stream.get_final_message().content
    assert thought.type == "thinking"
    assert thought.thinking == "Let me see."
    assert answer.text == "Fine."  # type: ignore[union-attr]
    off = claude.messages.create(**fields, thinking={"type": "disabled"})
    with_tag, without = server.engine.submitted
    assert len(with_tag.prompt_token_ids) > len(without.prompt_token_ids)
    assert [block.type for block in off.content] == ["text"]


def test_a_begun_answer_goes_on(server: Server, claude: anthropic.Anthropic) -> None:
    server.says(" fine.")
    begun = {"role": "assistant", "content": "I am"}
    message = claude.messages.create(**{**HELLO, "messages": [*HELLO["messages"], begun]})
    assert message.content[0].text == " fine."
    (request,) = server.engine.submitted
    assert list(request.prompt_token_ids[-len(server.encode("I am")) :]) == server.encode("I am")


def test_count_tokens_counts_what_the_engine_is_given(
    server: Server, claude: anthropic.Anthropic
) -> None:
    fields: dict[str, Any] = {
        "model": "auto",
        "system": "Be kind.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello 漢字"}]},
            {"role": "assistant", "content": "Hi"},
            {"role": "user", "content": "Bye"},
        ],
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    counted = claude.messages.count_tokens(**fields)
    assert not server.engine.submitted
    claude.messages.create(**fields, max_tokens=8)
    (request,) = server.engine.submitted
    assert counted.input_tokens == len(request.prompt_token_ids) > 0


# ---- failures -----------------------------------------------------------------------------


def test_failures_have_the_shape_that_the_client_knows(
    server: Server, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(**{**HELLO, "model": "claude-x"})
    body: Any = unknown.value.body
    read_answer(MessagesError, body)
    assert body["error"]["type"] == "not_found_error"
    assert unknown.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(**HELLO, extra_body={"temperature": 3})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(**{**HELLO, "messages": [{"role": "user", "content": "x " * 2000}]})
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.count_tokens(model="claude-x", messages=HELLO["messages"])
    server.engine.script = lambda _: Script(
        refusal=QueueFullError(num_waiting=1, retry_after_s=1.0)
    )
    with pytest.raises(anthropic.RateLimitError) as busy:
        claude.messages.create(**HELLO)
    assert busy.value.response.headers["retry-after"] == "1"
    assert busy.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]


def test_invalid_json_is_refused(http: httpx.Client) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = http.post(path, content=b"{", headers={"content-type": "application/json"})
        assert answer.status_code == 400
        read_answer(MessagesError, answer.json())
        wrong = http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert wrong.status_code == 415
        read_answer(MessagesError, wrong.json())


def test_a_stream_that_breaks_off(server: Server, claude: anthropic.Anthropic) -> None:
    server.says("Hello there!", failure=("internal", "the engine fell over"))
    texts: list[str] = []
    with (
        claude.messages.stream(**HELLO) as stream,
        pytest.raises(anthropic.APIStatusError) as broken,
    ):
        texts.extend(text for text in stream.text_stream)
    assert "".join(texts) == "Hello there!"
    body: Any = broken.value.body
    assert body["error"]["type"] == "api_error"
    assert body["outrider"]["completion_tokens"] == len(server.encode("Hello there!"))


def test_a_client_that_leaves(server: Server, claude: anthropic.Anthropic) -> None:
    server.says("Hello there!", hangs=True)
    with claude.messages.stream(**HELLO) as stream:
        next(iter(stream.text_stream))
    wait_for(lambda: bool(server.engine.aborted))


def test_answers_are_as_the_document_has_them(server: Server, http: httpx.Client) -> None:
    server.says(OSLO)
    answer = http.post(
        "/v1/messages",
        json={**HELLO, "tools": [WEATHER]},
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x-2025", "x-api-key": "k"},
    )
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    read_answer(MessageAnswer, answer.content)
    document = http.get("/openapi.json").json()
    operation = document["paths"]["/v1/messages"]["post"]
    assert operation["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/MessageAnswer"
    }
    assert "MessagesError" in json.dumps(operation["responses"]["429"])
    assert {"MessagesRequest", "MessageDelta", "TokenCount"} <= document["components"][
        "schemas"
    ].keys()
