import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BodyTooComplexError,
    UpstreamError,
)
from outrider.gateway.settings.server_traits import TRAITS
from outrider.gateway.upstream.call import Chunk, UpstreamCall
from outrider.gateway.upstream.dialects import dialect_for
from outrider.gateway.upstream.dialects.anthropic import AnthropicDialect
from outrider.gateway.upstream.dialects.base import ReportedError, Resume
from outrider.gateway.upstream.dialects.rewriting import cut_content, splice
from tests.gateway.answers import read_answer

TRAIT = TRAITS["anthropic"]
DIALECT = AnthropicDialect("claude", clock=lambda: 1234.5)
PIXEL = "data:image/png;base64,iVBORw0KGgo="
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def chat(*messages: dict[str, Any], **fields: Any) -> UpstreamCall:
    own = messages or ({"role": "user", "content": "Hello"},)
    document = {"model": "claude", "messages": list(own), **fields}
    return UpstreamCall(
        endpoint="chat", document=document, model="opus", request_id="r", arrival_s=0.0
    )


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DIALECT.body(chat(*messages, **fields), TRAIT))
    return document


def test_the_billing_line_goes_back_where_it_stood() -> None:
    system = {"role": "system", "content": "Be kind."}
    user = {"role": "user", "content": "Hi"}
    line, text = ({"type": "text", "text": text} for text in ("x-billing: 1", "Be kind."))
    assert body(system, user, anthropic_billing="x-billing: 1")["system"] == [line, text]
    assert body(user, anthropic_billing="x-billing: 1")["system"] == [line]


def param_of(*messages: dict[str, Any], **fields: Any) -> str | None:
    with pytest.raises(BadRequestError) as caught:
        DIALECT.body(chat(*messages, **fields), TRAIT)
    assert caught.value.param is not None
    assert str(caught.value).startswith(f"{caught.value.param}: ")
    return caught.value.param


def event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}).encode()
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def delta(index: int, kind: str, **fields: Any) -> bytes:
    return event("content_block_delta", index=index, delta={"type": kind, **fields})


def start(index: int, kind: str, **fields: Any) -> bytes:
    return event("content_block_start", index=index, content_block={"type": kind, **fields})


def stop(index: int) -> bytes:
    return event("content_block_stop", index=index)


START = event(
    "message_start",
    message={
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "claude-opus",
        "stop_reason": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 3,
            "cache_read_input_tokens": 5,
            "output_tokens": 1,
        },
    },
)
END = [
    event(
        "message_delta",
        delta={"stop_reason": "end_turn", "stop_sequence": None},
        usage={"output_tokens": 15},
    ),
    event("message_stop"),
]
HELLO = [
    START,
    start(0, "text", text=""),
    event("ping"),
    delta(0, "text_delta", text="Hel"),
    delta(0, "text_delta", text="lo \u2028"),
    stop(0),
    *END,
]


def read(events: list[bytes], **fields: Any) -> list[Chunk]:
    reader = DIALECT.chunk_reader(chat(stream=True, **fields))
    return [reader.read(one) for one in events]


def parsed(chunks: list[Chunk]) -> list[ChatCompletionChunk]:
    """As OpenAI's own library reads them."""
    found = []
    for chunk in chunks:
        assert chunk.raw.endswith(b"\n\n")
        assert len(chunk.raw.splitlines()) == 2
        if chunk.raw.startswith(b"data: "):
            found.append(read_answer(ChatCompletionChunk, chunk.raw[6:]))
            assert len(chunk.raw.decode().splitlines()) == 2
        else:
            assert chunk == Chunk(raw=b":\n\n")
    return found


def joined(chunks: list[Chunk]) -> ChatCompletion:
    """As OpenAI's own library puts a stream together."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in parsed(chunks):
        state.handle_chunk(chunk)
    return state.get_final_completion()


# Requests


def test_path_and_headers() -> None:
    assert DIALECT.path("chat") == "/messages"
    with pytest.raises(BadRequestError, match="chat/completions"):
        DIALECT.path("completion")
    headers = DIALECT.headers("k")
    assert headers["x-api-key"] == "k"
    assert headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in headers
    assert "x-api-key" not in DIALECT.headers(None)
    assert isinstance(dialect_for("anthropic", "claude"), AnthropicDialect)


def test_a_plain_chat() -> None:
    assert body() == {
        "model": "opus",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    }


def test_sampling_and_limits() -> None:
    sampled = body(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop="END",
        seed=7,
        user="u",
        logprobs=False,
        n=1,
        presence_penalty=0,
        logit_bias={},
        audio=None,
    )
    del sampled["messages"]
    assert sampled == {
        "model": "opus",
        "max_tokens": 7,
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
    }
    assert body(max_tokens=7, max_completion_tokens=5)["max_tokens"] == 5
    assert body(stop=["a", "b"])["stop_sequences"] == ["a", "b"]
    assert "top_k" not in body(top_k=-1)
    assert "stream" not in body(stream=False)


def test_system_messages_go_to_the_front() -> None:
    translated = body(
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "A"},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "assistant", "content": "B"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "C"},
    )
    assert [block["text"] for block in translated["system"]] == ["Be short.", "Be kind."]
    turns = [(turn["role"], turn["content"][0]["text"]) for turn in translated["messages"]]
    assert turns == [("user", "A"), ("assistant", "B"), ("user", "C")]


def test_parts() -> None:
    parts = [
        {"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": ""},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://a.example/cat.png"}},
        {
            "type": "file",
            "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "f"},
        },
    ]
    content = body({"role": "user", "content": parts})["messages"][0]["content"]
    image = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    document = {"type": "base64", "media_type": "application/pdf", "data": "AA=="}
    assert content == [
        {"type": "text", "text": "Look", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": image},
        {"type": "image", "source": {"type": "url", "url": "https://a.example/cat.png"}},
        {"type": "document", "source": document, "title": "f"},
    ]


def test_calls_and_their_results() -> None:
    def call(call_id: str, arguments: str) -> dict[str, Any]:
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }

    translated = body(
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call("call_1", '{"city": "Ulm"}'), call("f.g:0", "")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Sun"},
        {"role": "tool", "tool_call_id": "f.g:0", "content": [{"type": "text", "text": "Rain"}]},
        {"role": "user", "content": "So?"},
        tools=[TOOL],
        tool_choice="auto",
    )
    calls, results = translated["messages"][1], translated["messages"][2]
    assert calls == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ulm"}},
            {"type": "tool_use", "id": "f_g_0", "name": "weather", "input": {}},
        ],
    }
    assert results["role"] == "user"
    assert [block["type"] for block in results["content"]] == ["tool_result", "tool_result", "text"]
    assert [block["tool_use_id"] for block in results["content"][:2]] == ["call_1", "f_g_0"]
    assert results["content"][0]["content"] == [{"type": "text", "text": "Sun"}]
    assert translated["tools"] == [
        {
            "name": "weather",
            "description": "The weather",
            "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        }
    ]
    assert len(translated["messages"]) == 3


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, None),
        ("auto", None, {"type": "auto"}),
        ("required", None, {"type": "any"}),
        ("none", False, {"type": "none"}),
        ({"type": "function", "function": {"name": "f"}}, None, {"type": "tool", "name": "f"}),
        (None, False, {"type": "auto", "disable_parallel_tool_use": True}),
        ("required", False, {"type": "any", "disable_parallel_tool_use": True}),
        ("required", True, {"type": "any"}),
    ],
)
def test_tool_choice(choice: object, parallel: bool | None, expected: object) -> None:
    translated = body(tools=[TOOL], tool_choice=choice, parallel_tool_calls=parallel)
    assert translated.get("tool_choice") == expected


def test_tools_without_parameters_and_strict_ones() -> None:
    bare = {"type": "function", "function": {"name": "f", "strict": True}}
    assert body(tools=[bare])["tools"] == [
        {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    ]


def test_thinking_effort_and_shape() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert body(thinking=thinking)["thinking"] == thinking
    assert body(reasoning_effort="minimal")["output_config"] == {"effort": "low"}
    assert body(reasoning_effort="none")["thinking"] == {"type": "disabled"}
    schema = {"type": "object"}
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert body(response_format=shape, reasoning_effort="high")["output_config"] == {
        "format": {"type": "json_schema", "schema": schema},
        "effort": "high",
    }
    assert "output_config" not in body(response_format={"type": "text"})


def test_signed_thoughts_are_given_back() -> None:
    thought = {"type": "thinking", "thinking": "Hm", "signature": "s"}
    message = {"role": "assistant", "content": "A", "thinking_blocks": [thought]}
    turns = body({"role": "user", "content": "Q"}, message)["messages"]
    assert turns[1]["content"] == [thought, {"type": "text", "text": "A"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"stop": ["\n"]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"x_new": 1}, "x_new"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages.0"),
    ],
)
def test_fields_that_cannot_be_said(fields: dict[str, Any], param: str) -> None:
    assert param_of(**fields) == param


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "function", "content": "a"}, "role"),
        ({"role": "user", "content": 7}, "content"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "content.0.type"),
        ({"role": "system", "content": [{"type": "image_url"}]}, "content.0.type"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content.0.image_url"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc"}]},
            "content.0.image_url.url",
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/tiff;base64,AA"}}
                ],
            },
            "content.0.image_url.url",
        ),
        (
            {"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]},
            "content.0.file",
        ),
        (
            {
                "role": "user",
                "content": [{"type": "file", "file": {"file_data": "data:text/csv;base64,AA"}}],
            },
            "content.0.file.file_data",
        ),
        ({"role": "tool", "content": "a"}, "tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls.0.function"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}],
            },
            "tool_calls.0.function.arguments",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}],
            },
            "tool_calls.0.function.arguments",
        ),
    ],
)
def test_messages_that_cannot_be_said(message: dict[str, Any], path: str) -> None:
    assert param_of({"role": "user", "content": "Hello"}, message) == f"messages.1.{path}"


def test_arguments_are_bounded_before_they_are_parsed() -> None:
    """Issue 15: lists in eight megabytes of them held the event loop for more than a second."""
    arguments = '{"a":[' + "[]," * 10_000 + "1]}"
    call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
    turns = ({"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]})
    with pytest.raises(BodyTooComplexError, match=r"limits\.max_json_objects"):
        DIALECT.body(chat(*turns), TRAIT)


def test_an_answer_is_not_continued() -> None:
    resume = Resume(text="Once", num_tokens=1, strategy="final_message")
    with pytest.raises(ValueError, match="does not continue"):
        DIALECT.body(chat(), TRAIT, resume)


names = st.sampled_from(
    [
        *("role", "content", "type", "text", "image_url", "url", "tool_calls", "function", "name"),
        *("arguments", "tool_call_id", "id", "parameters", "file", "file_data", "thinking_blocks"),
    ]
)
words = st.sampled_from(
    [
        *("user", "assistant", "tool", "system", "text", "image_url", "file", "function", "{}"),
        *("a", PIXEL, "data:,", "https://a.example", "required", "json_schema"),
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=15,
)
messages = st.lists(st.dictionaries(names, json_values, max_size=5), max_size=3)
fields = st.dictionaries(
    st.sampled_from(
        [
            *("tools", "tool_choice", "stop", "temperature", "top_k", "max_tokens", "user"),
            *("response_format", "reasoning_effort", "output_config", "stream", "n"),
        ]
    ),
    json_values | st.lists(st.just(TOOL), max_size=1),
)


@pytest.mark.slow
@settings(max_examples=100)
@given(messages | json_values, fields)
def test_any_request_is_translated_or_refused(conversation: Any, document: dict[str, Any]) -> None:
    call = UpstreamCall(
        endpoint="chat",
        document={**document, "messages": conversation},
        model="opus",
        request_id="r",
        arrival_s=0.0,
    )
    with suppress(BadRequestError):
        written = json.loads(DIALECT.body(call, TRAIT))
        roles = [turn["role"] for turn in written["messages"]]
        assert all(a != b for a, b in pairwise(roles))
        assert all(turn["content"] for turn in written["messages"])


# Streams


def test_text() -> None:
    chunks = read(HELLO)
    assert "".join(chunk.content for chunk in chunks) == "Hello \u2028"
    first, *_, finish, usage = parsed(chunks)
    assert (first.id, first.model, first.created) == ("msg_1", "claude-opus", 1234)
    assert first.choices[0].delta.role == "assistant"
    assert finish.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (18, 15)
    assert usage.usage.prompt_tokens_details is not None
    assert usage.usage.prompt_tokens_details.cached_tokens == 5
    assert joined(chunks).choices[0].message.content == "Hello \u2028"


def test_a_chunks_fields_match_its_bytes() -> None:
    for chunk in read(HELLO):
        if chunk.raw.startswith(b"data: "):
            told = read_answer(ChatCompletionChunk, chunk.raw[6:])
            choice = told.choices[0] if told.choices else None
            assert chunk.content == ((choice.delta.content or "") if choice else "")
            assert chunk.finish_reason == (choice.finish_reason if choice else None)
            assert chunk.is_usage_only is (choice is None)


def test_the_end() -> None:
    reader = DIALECT.chunk_reader(chat())
    for one in HELLO[:-2]:
        assert not reader.read(one).is_done
        assert not reader.is_complete
    finish = reader.read(HELLO[-2])
    assert reader.is_complete
    assert (finish.finish_reason, finish.usage is not None) == ("stop", True)
    last = reader.read(HELLO[-1])
    assert last.is_usage_only
    assert last.usage == finish.usage
    spliced = splice(last.raw, "outrider", b"{}")
    assert json.loads(spliced[6:])["outrider"] == {}


def test_calls() -> None:
    chunks = read(
        [
            START,
            start(0, "text", text="I look."),
            stop(0),
            start(1, "tool_use", id="toolu_1", name="weather", input={}),
            delta(1, "input_json_delta", partial_json=""),
            delta(1, "input_json_delta", partial_json='{"city": '),
            delta(1, "input_json_delta", partial_json='"Ulm"}'),
            stop(1),
            start(2, "server_tool_use", id="srv", name="web_search", input={}),
            delta(2, "input_json_delta", partial_json='{"query": 1}'),
            stop(2),
            start(3, "tool_use", id="toolu_2", name="now", input={}),
            stop(3),
            event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 9}),
            event("message_stop"),
        ]
    )
    choice = joined(chunks).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = choice.message.tool_calls
    assert calls is not None
    made = [(call.id, call.function.name, call.function.arguments) for call in calls]  # type: ignore[union-attr]
    assert made == [("toolu_1", "weather", '{"city": "Ulm"}'), ("toolu_2", "now", "{}")]
    assert [chunk.has_calls for chunk in chunks].count(True) == 5


THINKING = [
    START,
    start(0, "thinking", thinking="", signature=""),
    delta(0, "thinking_delta", thinking="H"),
    delta(0, "thinking_delta", thinking="m"),
    delta(0, "signature_delta", signature="sig"),
    stop(0),
    start(1, "redacted_thinking", data="xyz"),
    stop(1),
    start(2, "text", text=""),
    delta(2, "text_delta", text="So"),
    stop(2),
    *END,
]


def test_thoughts() -> None:
    chunks = read(THINKING)
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm"
    assert "".join(chunk.content for chunk in chunks) == "So"
    assert b"thinking_blocks" not in b"".join(chunk.raw for chunk in chunks)
    deltas = [
        json.loads(chunk.raw[6:])["choices"][0]["delta"] for chunk in chunks if chunk.reasoning
    ]
    assert deltas == [{"reasoning_content": "H"}, {"reasoning_content": "m"}]
    first = next(chunk for chunk in chunks if chunk.content)
    cut = cut_content(first, 1)
    assert cut is not None
    assert b'"content":"o"' in cut.raw


def test_signed_thoughts_go_to_clients_that_ask_for_thinking() -> None:
    chunks = read(THINKING, thinking={"type": "adaptive"})
    told = [
        block
        for chunk in parsed(chunks)
        for choice in chunk.choices
        for block in (choice.delta.model_extra or {}).get("thinking_blocks", [])
    ]
    assert told == [
        {"type": "thinking", "thinking": "Hm", "signature": "sig"},
        {"type": "redacted_thinking", "data": "xyz"},
    ]


@pytest.mark.parametrize(
    ("stop_reason", "finish_reason"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
        ("something_new", "stop"),
    ],
)
def test_reasons_to_stop(stop_reason: str, finish_reason: str) -> None:
    chunks = read([START, event("message_delta", delta={"stop_reason": stop_reason})])
    assert chunks[-1].finish_reason == finish_reason
    assert parsed(chunks)[-1].choices[0].finish_reason == finish_reason


def test_the_last_figures_count() -> None:
    late = event(
        "message_delta",
        delta={"stop_reason": "end_turn"},
        usage={
            "input_tokens": 20,
            "cache_read_input_tokens": None,
            "output_tokens": 30,
            "output_tokens_details": {"thinking_tokens": 8},
        },
    )
    usage = read([START, late])[-1].usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (28, 5)
    assert (usage.num_completion_tokens, usage.num_reasoning_tokens) == (30, 8)


@pytest.mark.parametrize(
    ("kind", "failure", "status", "is_retryable", "blames_server"),
    [
        ("overloaded_error", "reported", 529, True, True),
        ("api_error", "reported", 500, True, True),
        ("rate_limit_error", "throttled", 429, True, False),
        ("invalid_request_error", "reported", 400, False, False),
        ("new_error", "reported", None, True, True),
    ],
)
def test_errors(
    kind: str, failure: str, status: int | None, is_retryable: bool, blames_server: bool
) -> None:
    detail = {"type": kind, "message": "So it is"}
    with pytest.raises(ReportedError, match="claude tier reported an error: So it is") as caught:
        read([START, event("error", error=detail)])
    error = caught.value
    assert (error.failure, error.status) == (failure, status)
    assert (error.is_retryable, error.blames_server) == (is_retryable, blames_server)
    with pytest.raises(ReportedError, match="So it is"):
        DIALECT.whole(chat(), json.dumps({"type": "error", "error": detail}).encode())


@pytest.mark.parametrize("data", [b"{", b"7", b"[]", b"\xff", b"[" * 99999, b'{"type":4}'])
def test_unreadable_answers_are_garbage(data: bytes) -> None:
    with pytest.raises(UpstreamError) as caught:
        read([b"data: " + data + b"\n\n"])
    assert caught.value.failure == "garbage"
    with pytest.raises(UpstreamError) as caught:
        DIALECT.whole(chat(), data)
    assert caught.value.failure == "garbage"


blocks = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "thinking", "tool_use", "redacted_thinking", "new"]),
        "text": st.text(max_size=3),
        "thinking": st.text(max_size=3),
        "partial_json": st.text(max_size=3),
        "input": json_values,
        "id": st.text(max_size=3),
        "name": st.text(max_size=3),
        "stop_reason": st.sampled_from(["end_turn", None]),
    },
)
events = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                [
                    *("message_start", "content_block_start", "content_block_delta", "ping"),
                    *("content_block_stop", "message_delta", "message_stop", "error", "new"),
                ]
            )
        },
        optional={
            "delta": blocks,
            "content_block": blocks,
            "message": blocks,
            "usage": st.fixed_dictionaries(
                {}, optional=dict.fromkeys(("input_tokens", "output_tokens"), st.integers(-1, 9))
            ),
            "error": json_values,
            "content": st.lists(blocks, max_size=2),
        },
    ).map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=20),
    json_values.map(lambda value: json.dumps(value).encode()),
)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(events, max_size=6))
def test_any_bytes_are_chunks_or_an_upstream_error(stream: list[bytes]) -> None:
    reader = DIALECT.chunk_reader(chat(thinking={"type": "adaptive"}))
    with suppress(UpstreamError):
        for data in stream:
            parsed([reader.read(b"data: " + data + b"\n\n")])
    for data in stream:
        with suppress(UpstreamError):
            read_answer(ChatCompletion, DIALECT.whole(chat(), data).body)


# Whole answers and refusals


def test_a_whole_answer() -> None:
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-opus",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "text", "text": "I "},
            {"type": "text", "text": "look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Ulm"}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 6, "output_tokens": 7},
    }
    raw = json.dumps(message).encode()
    answer = DIALECT.whole(chat(), raw)
    told = read_answer(ChatCompletion, answer.body)
    assert (told.id, told.model, told.created) == ("msg_1", "claude-opus", 1234)
    choice = told.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert choice.message.tool_calls is not None
    function = choice.message.tool_calls[0].function  # type: ignore[union-attr]
    assert json.loads(function.arguments) == {"city": "Ulm"}
    assert choice.message.model_extra == {"reasoning_content": "Hm"}
    assert told.usage is not None
    assert (told.usage.prompt_tokens, told.usage.total_tokens) == (10, 17)
    assert answer.texts == ("I look.",)
    assert answer.reasoning == ("Hm",)
    assert answer.has_calls
    assert answer.usage is not None
    assert answer.usage.num_cached_tokens == 6
    asked = json.loads(DIALECT.whole(chat(reasoning_effort="high"), raw).body)
    assert asked["choices"][0]["message"]["thinking_blocks"][0]["signature"] == "s"


def test_refusals_are_told_in_openais_form() -> None:
    detail = {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}
    raw = json.dumps({"type": "error", "error": detail, "request_id": "q"}).encode()
    refusal = DIALECT.refusal(400, raw)
    assert refusal.message == detail["message"]
    error = json.loads(refusal.body)["error"]
    assert error["message"] == detail["message"]
    assert error["code"] == "context_length_exceeded"
    assert json.loads(DIALECT.refusal(404, b"<html>").body)["error"]["code"] is None


def test_the_stop_string_is_told() -> None:
    end = {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    chunks = read([START, event("message_delta", delta=end)])
    choice = json.loads(chunks[-1].raw.removeprefix(b"data: "))["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    whole = DIALECT.whole(chat(), json.dumps({"content": [], **end}).encode())
    assert json.loads(whole.body)["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize(
    ("variables", "thinking"),
    [
        ({"enable_thinking": False}, {"type": "disabled"}),
        ({"enable_thinking": True}, {"type": "adaptive"}),
        (
            {"enable_thinking": True, "thinking_budget": 2048},
            {"type": "enabled", "budget_tokens": 2048},
        ),
    ],
)
def test_variables_of_templates_that_ask_for_thinking(
    variables: dict[str, Any], thinking: dict[str, Any]
) -> None:
    assert body(chat_template_kwargs=variables)["thinking"] == thinking
    own = {"type": "adaptive"}
    assert body(chat_template_kwargs=variables, thinking=own)["thinking"] == own


@pytest.mark.parametrize(
    "variables",
    [{"date": "today"}, {"enable_thinking": "yes"}, {"thinking_budget": 5}, [1], "x"],
)
def test_other_variables_of_templates_are_refused(variables: Any) -> None:
    assert param_of(chat_template_kwargs=variables) == "chat_template_kwargs"
