"""Requests of the Messages API in a chat completion's words."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.gateway.contract.errors.http import Problem, problem_of
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.http.apis.messages.api import MessagesApi
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.dialects.anthropic_messages import translate_messages
from outrider.gateway.upstream.dialects.anthropic_request import request_body

HELLO = {"role": "user", "content": "Hello"}
BASE: dict[str, Any] = {"model": "auto", "max_tokens": 64, "messages": [HELLO]}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


def chat(*, elsewhere: bool = False, **fields: Any) -> dict[str, Any]:
    surface = MessagesApi(has_upstream_tiers=elsewhere)
    body: dict[str, Any] = json.loads(asyncio.run(surface.read(encoded(**fields))).chat_body)
    return body


def encoded(**fields: Any) -> bytes:
    body = {name: value for name, value in {**BASE, **fields}.items() if value is not ...}
    return json.dumps(body).encode()


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(messages=list(given), **fields)["messages"]
    return found


def refused(**fields: Any) -> BadRequestError:
    elsewhere = fields.pop("elsewhere", False)
    with pytest.raises(BadRequestError) as caught:
        asyncio.run(MessagesApi(has_upstream_tiers=elsewhere).read(encoded(**fields)))
    return caught.value


def test_a_billing_line_is_kept_apart_for_upstream_tiers() -> None:
    line = "x-anthropic-billing-header: cc_version=1;"
    for system in (line + "\nBe kind.", [{"type": "text", "text": line + "\nBe kind."}]):
        near, far = (chat(system=system, elsewhere=elsewhere) for elsewhere in (False, True))
        assert near["messages"] == far["messages"] == chat(system="Be kind.")["messages"]
        assert "anthropic_billing" not in near
        assert far["anthropic_billing"] == line


def test_a_plain_request() -> None:
    assert chat() == {
        "model": "auto",
        "messages": [HELLO],
        "max_tokens": 64,
        "outrider": {"fit_context": True},
    }


def test_every_field_that_chat_knows() -> None:
    made = chat(
        system="Be kind.",
        stop_sequences=["END"],
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        metadata={"user_id": "u-1"},
        service_tier="standard_only",
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2048},
        outrider={"tier": "small", "privacy": "private"},
    )
    assert made == {
        "model": "auto",
        "messages": [{"role": "system", "content": "Be kind."}, HELLO],
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "user": "u-1",
        "service_tier": "default",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "description": "The weather in a city",
                    "parameters": WEATHER["input_schema"],
                },
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 2048},
        "outrider": {"fit_context": True, "tier": "small", "privacy": "private"},
    }
    parse(ChatRequest, json.dumps(made).encode())  # the local models take all of it


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        (
            {"type": "tool", "name": "get_weather"},
            {"type": "function", "function": {"name": "get_weather"}},
        ),
    ],
)
def test_tool_choices(choice: dict[str, Any], expected: Any) -> None:
    assert chat(tools=[WEATHER], tool_choice=choice)["tool_choice"] == expected


def test_fields_without_effect_are_accepted_and_dropped() -> None:
    marked = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    made = chat(
        messages=[{"role": "user", "content": [marked | {"citations": None}]}],
        system=[marked],
        tools=[
            WEATHER
            | {"cache_control": {"type": "ephemeral"}, "type": "custom", "defer_loading": True}
        ],
        output_config={"effort": "high"},
        cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        inference_geo="eu",
        speed="fast",
        mcp_servers=[],
    )
    assert made["messages"] == [{"role": "system", "content": "Hello"}, HELLO]
    assert made.keys() == {"model", "messages", "max_tokens", "tools", "outrider"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperatur": 1}, "temperatur"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"type": 7, "name": "f"}]}, "tools.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0.content.0.type"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert str(error).startswith(param)


@pytest.mark.parametrize("body", [b"[" * 5000, b'{"model": NaN}', b"\xff", b"null", b""])
def test_invalid_requests_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        asyncio.run(MessagesApi(has_upstream_tiers=False).read(body))


def test_numbers_that_are_none_are_refused_where_anything_may_stand() -> None:
    body = encoded(tools=[WEATHER]).replace(b'"string"', b"NaN")
    with pytest.raises(BadRequestError, match="not valid JSON"):
        asyncio.run(MessagesApi(has_upstream_tiers=False).read(body))


def test_options_that_stand_there_twice_are_refused() -> None:
    body = encoded()[:-1] + b', "outrider": {"privacy": "private"}, "outrider": {}}'
    with pytest.raises(BadRequestError, match="twice"):
        asyncio.run(MessagesApi(has_upstream_tiers=True).read(body))


# ---- conversations ------------------------------------------------------------------------


def test_turns_of_one_role_become_one() -> None:
    made = messages(
        HELLO,
        {
            "role": "user",
            "content": [{"type": "text", "text": "there"}, {"type": "text", "text": ""}],
        },
        {"role": "assistant", "content": "Hi"},
        {"role": "assistant", "content": " you"},
        HELLO,
    )
    assert made == [
        {"role": "user", "content": [text("Hello"), text("there")]},
        {"role": "assistant", "content": "Hi you"},
        HELLO,
    ]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_a_tool_loop() -> None:
    made = messages(
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                text("Let me see."),
                CALL | {"caller": {"type": "direct"}},
            ],
        },
        {"role": "user", "content": [text("And now?"), RESULT]},
        tools=[WEATHER],
    )
    assert made[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]


def test_results_say_that_they_are_errors() -> None:
    failed = RESULT | {"content": [text("no such city")], "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "toolu_2"}
    made = messages(
        HELLO,
        {"role": "assistant", "content": [CALL, CALL | {"id": "toolu_2"}]},
        {"role": "user", "content": [failed, empty]},
    )
    assert made[1]["content"] is None
    assert made[2]["content"] == [text("Error:"), text("no such city")]
    assert made[3] == {"role": "tool", "tool_call_id": "toolu_2", "content": ""}


def test_media_are_sent_to_upstream_tiers_only() -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    notes = {"type": "text", "media_type": "text/plain", "data": "Notes."}
    user = {
        "role": "user",
        "content": [
            IMAGE,
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
            {"type": "document", "source": pdf, "title": "a.pdf"},
            {"type": "document", "source": notes, "title": "notes.txt"},
        ],
    }
    (made,) = messages(user, elsewhere=True)
    assert made["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {
            "type": "file",
            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"},
        },
        text("notes.txt"),
        text("Notes."),
    ]
    inside = {"role": "user", "content": [RESULT | {"content": [text("a"), IMAGE]}]}
    assert refused(messages=[inside]).param == "messages.0.content.0.content.1.type"


def test_signed_thoughts_go_back_within_a_tool_loop_only() -> None:
    signed = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    hidden = {"type": "redacted_thinking", "data": "eHh4"}
    old = {"role": "assistant", "content": [signed, text("Fine.")]}
    loop = {"role": "assistant", "content": [signed, hidden, CALL]}
    conversation = [HELLO, old, HELLO, loop, {"role": "user", "content": [RESULT]}]
    made = messages(*conversation, elsewhere=True)
    assert "thinking_blocks" not in made[1]
    assert made[1]["reasoning_content"] == "Hm."
    assert made[3]["thinking_blocks"] == [signed, hidden]
    assert all("thinking_blocks" not in message for message in messages(*conversation))


def test_a_begun_answer_goes_on() -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    made = chat(messages=[HELLO, begun])
    assert made["continue_final_message"] is True
    assert made["add_generation_prompt"] is False
    assert made["messages"][-1] == begun
    asked = chat(messages=[HELLO, begun], tools=[WEATHER], tool_choice={"type": "none"})
    assert asked["continue_final_message"] is True


@pytest.mark.parametrize(
    ("content", "fields", "param"),
    [
        ("The", {"tools": [WEATHER]}, "messages.1.role"),
        (
            "The",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "messages.1.role",
        ),
        ([CALL], {}, "messages.1.content"),
        ("", {}, "messages.1.content"),
    ],
)
def test_texts_that_cannot_be_continued_are_refused(
    content: Any, fields: dict[str, Any], param: str
) -> None:
    begun = {"role": "assistant", "content": content}
    assert refused(messages=[HELLO, begun], **fields).param == param


def test_an_answer_that_conforms_to_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = chat(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert made["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema},
    }


# ---- there and back -----------------------------------------------------------------------


def test_a_conversation_comes_back_from_openais_words() -> None:
    """Requests to upstream servers of this API equal those of our own clients."""
    signed = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    turns = [
        {"role": "user", "content": [text("Look"), IMAGE]},
        {"role": "assistant", "content": [signed, text("Let me see."), CALL]},
        {"role": "user", "content": [RESULT | {"content": [text("rain")]}, text("And now?")]},
    ]
    fields = {
        "system": [text("Be kind.")],
        "messages": turns,
        "tools": [WEATHER],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "stop_sequences": ["END"],
        "top_k": 5,
        "metadata": {"user_id": "u-1"},
    }
    document = chat(elsewhere=True, **fields)
    document.pop("outrider")
    call = UpstreamCall(
        endpoint="chat", document=document, model="auto", request_id="r", arrival_s=0.0
    )
    back = json.loads(request_body(call))
    assert back == {**BASE, **fields}
    assert translate_messages(document["messages"]).turns == turns


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [({"type": "disabled"}, {"type": "disabled"}), ({"type": "adaptive"}, {"type": "adaptive"})],
)
def test_thinking_comes_back(thinking: dict[str, Any], expected: dict[str, Any]) -> None:
    document = chat(thinking=thinking)
    document.pop("outrider")
    call = UpstreamCall(
        endpoint="chat", document=document, model="auto", request_id="r", arrival_s=0.0
    )
    assert json.loads(request_body(call))["thinking"] == expected


# ---- errors -------------------------------------------------------------------------------


def problem(message: str, **fields: Any) -> dict[str, Any]:
    made = Problem(message=message, **{"status": 400, "type": "invalid_request_error", **fields})
    body: dict[str, Any] = json.loads(MessagesApi(has_upstream_tiers=False).problem_body(made))
    assert body["type"] == "error"
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_types_of_errors(status: int, kind: str) -> None:
    assert problem("No.", status=status) == {"type": kind, "message": "No."}


def test_errors_name_fields_as_they_are_called_here() -> None:
    def message(said: str, param: str) -> str:
        told: str = problem(f"{param}: {said}", param=param)["message"]
        return told

    assert message("x", "stop") == "stop_sequences: x"
    assert message("x", "tools.3.function.parameters") == "tools.3.input_schema: x"
    assert message("x", "tools.3.function.name") == "tools.3.name: x"
    assert message("x", "max_tokens") == "max_tokens: x"
    assert problem("The prompt is too long.", param="stop")["message"] == "The prompt is too long."


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for() -> None:
    told = problem("9000 tokens", code="context_length_exceeded")
    assert told["message"] == "prompt is too long: 9000 tokens"


def test_an_unexpected_exception_reveals_nothing() -> None:
    surface = MessagesApi(has_upstream_tiers=False)
    error = json.loads(surface.problem_body(problem_of(KeyError("secret"))))["error"]
    assert error["type"] == "api_error"
    assert "secret" not in error["message"]


# ---- whatever comes -----------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
BLOCKS = st.sampled_from(
    [
        text("Hello"),
        text(""),
        IMAGE,
        CALL,
        RESULT,
        RESULT | {"content": [text("a"), IMAGE], "is_error": True},
        {"type": "tool_result", "tool_use_id": "x", "content": []},
        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "eHh4"},
        {"type": "document", "source": {"type": "url", "url": "https://example.org"}},
        {"type": "web_search_tool_result"},
        "Hello",
        None,
    ]
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.text(max_size=3) | st.lists(BLOCKS, max_size=4) | JSON,
    }
)
BODIES = st.fixed_dictionaries(
    {
        "model": st.just("auto"),
        "max_tokens": st.just(5) | JSON,
        "messages": st.lists(MESSAGES, max_size=5) | JSON,
    },
    optional={
        "system": st.lists(BLOCKS, max_size=2) | JSON,
        "tools": st.lists(st.sampled_from([WEATHER, WEATHER | {"input_schema": {}}]) | JSON),
        "tool_choice": st.sampled_from([{"type": "any"}, {"type": "none"}]) | JSON,
        "thinking": st.sampled_from([{"type": "adaptive"}, {"type": "disabled"}]) | JSON,
        "output_config": JSON,
        "stop_sequences": st.lists(st.text(max_size=3), max_size=3),
        "outrider": JSON,
    },
)


@settings(max_examples=100, deadline=None)
@given(body=BODIES, elsewhere=st.booleans())
def test_any_body_is_translated_or_refused(body: dict[str, Any], elsewhere: bool) -> None:
    surface = MessagesApi(has_upstream_tiers=elsewhere)
    made: bytes | None = None
    with suppress(BadRequestError):
        made = asyncio.run(surface.read(json.dumps(body).encode())).chat_body
    if made is not None and not elsewhere:  # the local models take what the surface takes
        parse(ChatRequest, made)


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused(body: bytes) -> None:
    for read in (
        MessagesApi(has_upstream_tiers=True).read,
        MessagesApi(has_upstream_tiers=False).read_prompt,
    ):
        with pytest.raises(BadRequestError):
            asyncio.run(read(body))
