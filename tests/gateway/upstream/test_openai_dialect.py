import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.gateway.contract.errors.tree import BadRequestError, UpstreamError
from outrider.gateway.contract.schema.kinds import ServerKind
from outrider.gateway.settings.server_traits import (
    TRAITS,
    ContinuationStrategy,
    ServerTraits,
    traits_of,
)
from outrider.gateway.upstream.call import Chunk, UpstreamCall
from outrider.gateway.upstream.dialects import dialect_for
from outrider.gateway.upstream.dialects.base import ReportedError, Resume, is_refusal
from outrider.gateway.upstream.dialects.openai import OpenAIChunkReader, OpenAIDialect
from outrider.gateway.upstream.dialects.openai_request import is_resumable
from outrider.gateway.upstream.dialects.rewriting import cut_content, id_of, splice, with_id

DIALECT = OpenAIDialect("cloud")
MESSAGES = [{"role": "user", "content": "What is a spool?"}]

# One event of each server, as it comes from the wire.
OPENAI = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"gpt",'
    b'"service_tier":"default","choices":[{"index":0,"delta":{"content":" hello"},'
    b'"logprobs":null,"finish_reason":null}],"usage":null,"obfuscation":"ab"}\n\n'
)
OPENAI_ROLE = (
    b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"role":"assistant","content":"",'
    b'"refusal":null},"logprobs":null,"finish_reason":null}]}\n\n'
)
OPENAI_USAGE = (
    b'data: {"id":"chatcmpl-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":12,'
    b'"total_tokens":21,"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":0},'
    b'"completion_tokens_details":{"reasoning_tokens":5,"audio_tokens":0}}}\n\n'
)
VLLM_USAGE = (
    b'data: {"id":"c","choices":null,"usage":{"prompt_tokens":9,"completion_tokens":12,'
    b'"total_tokens":21,"prompt_tokens_details":null}}\n\n'
)
VLLM_REASONING = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"reasoning":"Hm","reasoning_content":"Hm"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
LLAMA_CPP_LAST = (
    b'data: {"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1,"id":"c",'
    b'"usage":{"completion_tokens":247,"prompt_tokens":1085,"total_tokens":1332},'
    b'"timings":{"prompt_ms":203.378}}\n\n'
)
LLAMA_CPP_PYTHON = (
    b'data: {"id": "cmpl-3", "object": "text_completion", "choices": [{"text": "Par", "index": 0,'
    b' "logprobs": null, "finish_reason": null}]}\r\n\r\n'
)
SGLANG_USAGE = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,'
    b'"reasoning_tokens":2,"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
)
MISTRAL = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":[{"type":"thinking","thinking":'
    b'[{"type":"text","text":"Hm"}]},{"type":"text","text":"So"}]},"finish_reason":null}]}\n\n'
)
CALL = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1",'
    b'"type":"function","function":{"name":"f","arguments":""}}]},"finish_reason":null}]}\n\n'
)
FUNCTION_CALL = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"function_call":'
    b'{"name":"f","arguments":""}},"finish_reason":null}]}\n\n'
)
LOGPROBS = (
    b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":'
    b'[{"token":"a","logprob":-0.1,"bytes":[97],"top_logprobs":[]}]},"finish_reason":null}]}\n\n'
)


def chat(**fields: Any) -> UpstreamCall:
    document = {"model": "cloud", "messages": MESSAGES, "stream": True, **fields}
    return UpstreamCall(
        endpoint="chat", document=document, model="real", request_id="r", arrival_s=0.0
    )


def completion(prompt: object, **fields: Any) -> UpstreamCall:
    document = {"model": "cloud", "prompt": prompt, "stream": True, **fields}
    return UpstreamCall(
        endpoint="completion", document=document, model="real", request_id="r", arrival_s=0.0
    )


def read(event: bytes, call: UpstreamCall | None = None) -> Chunk:
    return DIALECT.chunk_reader(call or chat()).read(event)


def body(
    call: UpstreamCall, server: ServerKind = "vllm", resume: Resume | None = None
) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DIALECT.body(call, TRAITS[server], resume))
    return document


def final(text: str, num_tokens: int = 3) -> Resume:
    return Resume(text=text, num_tokens=num_tokens, strategy="final_message")


def failure_of(event: bytes, call: UpstreamCall | None = None) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        read(event, call)
    return caught.value


def test_paths_and_headers() -> None:
    assert DIALECT.path("chat") == "/chat/completions"
    assert DIALECT.path("completion") == "/completions"
    assert DIALECT.headers("k")["authorization"] == "Bearer k"
    assert "authorization" not in DIALECT.headers(None)
    assert isinstance(dialect_for("openai", "cloud"), OpenAIDialect)


# Requests


def test_a_request_is_the_clients_own_but_for_model_and_usage() -> None:
    fields = {"temperature": 0.1, "x_new": {"a": [1, 2.5]}, "outrider": {"policy": "cloud_only"}}
    call = chat(**fields)
    assert body(call) == {
        "model": "real",
        "messages": MESSAGES,
        "stream": True,
        "temperature": 0.1,
        "x_new": {"a": [1, 2.5]},
        "stream_options": {"include_usage": True},
    }
    assert call.document["model"] == "cloud"
    assert "stream_options" not in call.document


def test_usage_is_asked_for_only_where_it_is_known_and_the_answer_is_streamed() -> None:
    assert "stream_options" not in body(chat(), "llama_cpp")
    assert "stream_options" not in body(chat(stream=False))
    asked = body(chat(stream_options={"include_usage": False, "continuous_usage_stats": True}))
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body(chat(stream_options="odd"))["stream_options"] == "odd"


def test_a_prediction_goes_to_servers_that_use_it_unless_the_client_has_its_own() -> None:
    call = chat()
    guessing = UpstreamCall(
        endpoint="chat",
        document=call.document,
        model="real",
        request_id="r",
        arrival_s=0.0,
        prediction="A spool",
    )
    assert body(guessing, "outrider")["prediction"] == {"type": "content", "content": "A spool"}
    assert "prediction" not in body(guessing, "vllm")
    own = {"type": "content", "content": "mine"}
    assert body(chat(prediction=own), "outrider")["prediction"] == own


NAMES = ("max_tokens", "max_completion_tokens", "n_predict")


def limits(call: UpstreamCall, traits: ServerTraits) -> dict[str, Any]:
    document = json.loads(DIALECT.body(call, traits))
    return {name: document[name] for name in NAMES if name in document}


@pytest.mark.parametrize("server", ["vllm", "sglang", "tgi", "tensorrt_llm", "llama_cpp"])
@pytest.mark.parametrize("asked", [{"max_tokens": 9}, {"max_completion_tokens": 9}])
def test_the_limit_of_an_answer_has_the_name_that_the_server_knows(
    server: ServerKind, asked: dict[str, int]
) -> None:
    assert limits(chat(**asked), TRAITS[server]) == {"max_tokens": 9}
    assert limits(completion("a", **asked), TRAITS[server]) == {"max_tokens": 9}


@pytest.mark.parametrize("server", ["openai", "outrider"])
@pytest.mark.parametrize("asked", [{"max_tokens": 9}, {"max_completion_tokens": 9}])
def test_a_server_with_unknown_models_gets_the_requested_name(
    server: ServerKind, asked: dict[str, int]
) -> None:
    assert limits(chat(**asked), TRAITS[server]) == asked
    assert limits(completion("a", **asked), TRAITS[server]) == {"max_tokens": 9}


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://api.openai.com/v1", "max_completion_tokens"),
        ("https://me.openai.azure.com/openai/v1", "max_completion_tokens"),
        ("https://api.openai.com.example.org/v1", "max_tokens"),
        ("https://notopenai.com/v1", "max_tokens"),
    ],
)
def test_openai_itself_is_asked_by_the_newer_name(url: str, name: str) -> None:
    """Its reasoning models refuse the older one, which the Messages API sends."""
    assert limits(chat(max_tokens=9), traits_of("openai", (url,))) == {name: 9}
    assert limits(completion("a", max_tokens=9), traits_of("openai", (url,))) == {"max_tokens": 9}


@pytest.mark.parametrize("server", [server for server in TRAITS if server != "anthropic"])
def test_no_second_name_makes_an_answer_longer_than_was_counted(server: ServerKind) -> None:
    """Servers differ in which of several limits wins; this gateway counts with the newer one."""
    greedy = {"max_completion_tokens": 5, "max_tokens": 9000, "n_predict": 9000}
    assert set(limits(chat(**greedy), TRAITS[server]).values()) == {5}
    assert limits(completion("a", **greedy), TRAITS[server]) == {"max_tokens": 5}
    assert limits(chat(n_predict=7), TRAITS[server]) == {"n_predict": 7}  # nothing was counted


def test_a_replay_is_the_same_request_with_what_was_delivered_as_prediction() -> None:
    resume = Resume(text="A spool is", num_tokens=3, strategy="replay")
    again = body(chat(max_tokens=9), "outrider", resume)
    assert again.pop("prediction") == {"type": "content", "content": "A spool is"}
    assert again == body(chat(max_tokens=9), "outrider")
    longer = {"type": "content", "content": "A spool is round."}
    assert body(chat(prediction=longer), "outrider", resume)["prediction"] == longer
    wrong = {"type": "content", "content": "No"}
    right = body(chat(prediction=wrong), "outrider", resume)["prediction"]
    assert right["content"] == "A spool is"


def test_a_chat_goes_on_behind_what_was_delivered() -> None:
    rest = body(
        chat(max_tokens=10, max_completion_tokens=4, min_tokens=2), resume=final("A spool", 3)
    )
    assert rest["messages"] == [*MESSAGES, {"role": "assistant", "content": "A spool"}]
    assert rest["continue_final_message"] is True
    assert rest["add_generation_prompt"] is False
    assert (rest["max_tokens"], rest["min_tokens"]) == (1, 0)
    assert body(chat(max_tokens=10), resume=final("A spool", 3))["max_tokens"] == 7
    assert "continue_final_message" not in body(chat(), resume=final(""))


@pytest.mark.parametrize(
    ("begun", "longer"),
    [
        ("I think", "I think a spool"),
        (None, " a spool"),
        ([{"type": "text", "text": "I"}], [{"type": "text", "text": "I a spool"}]),
    ],
)
def test_a_message_that_the_client_had_begun_goes_on(begun: object, longer: object) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    call = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    rest = body(call, resume=final(" a spool"))
    assert rest["messages"] == [*MESSAGES, {"role": "assistant", "content": longer}]
    assert messages[-1] == {"role": "assistant", "content": begun}


def test_a_completion_goes_on_behind_prompt_and_text() -> None:
    assert body(completion("Once"), resume=final(" upon"))["prompt"] == "Once upon"
    assert body(completion(["Once"]), resume=final(" upon"))["prompt"] == "Once upon"
    assert "continue_final_message" not in body(completion("Once"), resume=final(" upon"))


@pytest.mark.parametrize(
    ("call", "strategy", "expected"),
    [
        (chat(), "final_message", True),
        (chat(), "replay", True),
        (chat(), "none", False),
        (chat(n=2), "replay", False),
        (chat(tools=[{"type": "function"}]), "final_message", False),
        (chat(tools=[{"type": "function"}]), "replay", True),
        (chat(tools=[]), "final_message", True),
        (chat(response_format={"type": "text"}), "final_message", True),
        (chat(response_format={"type": "json_object"}), "final_message", False),
        (chat(logprobs=True), "final_message", False),
        (completion("a"), "final_message", True),
        (completion(["a"]), "final_message", True),
        (completion(["a", "b"]), "replay", False),
        (completion([1, 2]), "final_message", False),
        (completion([1, 2]), "replay", True),
        (completion("a", echo=True), "final_message", False),
        (completion("a", best_of=2), "replay", False),
    ],
)
def test_resumable_requests_are_recognised(
    call: UpstreamCall, strategy: ContinuationStrategy, expected: bool
) -> None:
    assert is_resumable(call, strategy) is expected


def test_answers_nested_too_deeply_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadRequestError, match="nested"):
        DIALECT.body(chat(x=nested), ServerTraits())


# Streams


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (OPENAI, {"content": " hello"}),
        (OPENAI_ROLE, {}),
        (OPENAI.replace(b"data: ", b"data:"), {"content": " hello"}),
        (OPENAI.replace(b"\n\n", b"\r\n\r\n"), {"content": " hello"}),
        (b": ping\nid: 7\n" + OPENAI, {"content": " hello"}),
        (VLLM_REASONING, {"reasoning": "Hm"}),
        (LLAMA_CPP_PYTHON, {"content": "Par"}),
        (MISTRAL, {"content": "So", "reasoning": "Hm"}),
        (CALL, {"has_calls": True, "num_other_bytes": 1}),
        (FUNCTION_CALL, {"has_calls": True, "num_other_bytes": 1}),
        (LOGPROBS, {"content": "a", "has_logprobs": True}),
        (b": keep-alive\n\n", {}),
        (b"data: [DONE]\n\n", {"is_done": True}),
        (b"data:[DONE]\r\n\r\n", {"is_done": True}),
        (b'data: {"prompt_filter_results":[],"choices":[]}\n\n', {}),
        (b'data: {"choices":[{"delta":null,"index":1}]}\n\n', {"index": 1}),
        (b'data: {"choices":[{"text":"a","finish_reason":""}],"error":{}}\n\n', {"content": "a"}),
        (b'data: {"choices":[],"usage":{}}\n\n', {}),
    ],
)
def test_events_are_read_and_stay_as_they_are(event: bytes, expected: dict[str, Any]) -> None:
    # A legacy call is an object, where tool calls are a list.
    chunk = read(event)
    assert chunk == Chunk(raw=event, **expected)


@pytest.mark.parametrize("event", [b"data:\n\n", b"data: \r\n\r\n", b"id: 7\nevent: ping\n\n"])
def test_a_sign_of_life_becomes_a_comment(event: bytes) -> None:
    """Clients take any other event for a chunk, and its empty data for broken JSON."""
    assert read(event) == Chunk(raw=b":\n\n")


def test_usage_is_read_wherever_it_stands() -> None:
    usage = read(OPENAI_USAGE).usage
    assert usage is not None
    assert read(OPENAI_USAGE).is_usage_only
    assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (9, 12)
    assert (usage.num_cached_tokens, usage.num_reasoning_tokens) == (4, 5)
    assert (usage.source, usage.is_corrected) == ("reported", False)
    assert read(VLLM_USAGE).is_usage_only
    last = read(LLAMA_CPP_LAST)
    assert last.usage is not None
    assert (last.usage.num_completion_tokens, last.is_usage_only) == (247, False)
    assert last.finish_reason == "stop"
    sglang = read(SGLANG_USAGE).usage
    assert sglang is not None
    assert (sglang.num_reasoning_tokens, sglang.num_cached_tokens) == (2, 1)
    odd = read(b'data: {"choices":[],"usage":{"prompt_tokens":-3,"completion_tokens":2.0}}\n\n')
    assert odd.usage is not None
    assert (odd.usage.num_prompt_tokens, odd.usage.num_completion_tokens) == (0, 2)


def test_several_choices_in_one_event() -> None:
    event = (
        b'data: {"choices":[{"index":1,"delta":{"content":"a"},"finish_reason":null},'
        b'{"index":0,"delta":{"content":"b","tool_calls":[{}]},"finish_reason":"stop"}]}\n\n'
    )
    one = read(event)
    assert (one.content, one.index, one.finish_reason) == ("ab", 1, "stop")
    two = read(event, chat(n=2))
    assert (two.content, two.index, two.has_calls) == ("a", 1, True)


def of_call(index: int, choice: int, text: str, **fields: Any) -> bytes:
    part = {"index": index, **fields, "function": {"arguments": text}}
    written = {"index": choice, "delta": {"tool_calls": [part]}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [written]}).encode() + b"\n\n"


def test_calls_in_order_stay_as_they_are() -> None:
    """Those of several choices, and those that are written in turn."""
    reader = DIALECT.chunk_reader(chat(n=2))
    begins: dict[str, Any] = {"id": "c1", "type": "function"}
    for event in (
        of_call(0, 0, "", **begins),
        of_call(0, 1, "{", **begins),
        of_call(1, 0, "{", **begins | {"id": "c2"}),
        of_call(0, 0, "{}"),
        of_call(1, 0, "}", id=None),
        of_call(0, 1, "}"),
    ):
        assert reader.read(event).raw == event


def finished(index: int) -> bytes:
    choice = {"index": index, "delta": {}, "finish_reason": "stop"}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def test_an_answer_is_complete_at_its_end() -> None:
    reader = DIALECT.chunk_reader(chat(n=2))
    reader.read(OPENAI)
    reader.read(finished(0))
    reader.read(finished(0))
    assert not reader.is_complete
    reader.read(finished(1))
    assert reader.is_complete
    reader = DIALECT.chunk_reader(chat())
    reader.read(b"data: [DONE]\n\n")
    assert reader.is_complete
    reader = DIALECT.chunk_reader(completion(["a", "b"], n=2))
    for index in range(4):
        assert not reader.is_complete
        reader.read(finished(index))
    assert reader.is_complete
    reader = DIALECT.chunk_reader(completion([1, 2, 3]))
    reader.read(finished(0))
    assert reader.is_complete


@pytest.mark.parametrize(
    "data",
    [
        *(b"{", b"7", b"[]", b"null", b'"a"', b"<html>", b'{"choices":3}', b"\xff", b"[" * 99_999),
        b'{"x":' + b"[" * 99_999,
        b'{"choices":[{"delta":{"content":' + b"[" * 99_999,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_unreadable_answers_are_garbage(data: bytes) -> None:
    error = failure_of(b"data: " + data + b"\n\n")
    assert error.failure == "garbage"
    assert "cloud tier" in str(error)


@pytest.mark.parametrize(
    ("event", "status", "words"),
    [
        (b'data: {"error":{"message":"Out of memory","code":500}}\n\n', 500, "Out of memory"),
        (b'data: {"error":{"message":"Busy","code":"503"}}\n\n', 503, "Busy"),
        (b'data: {"error":{"message":"Broken","code":null},"choices":4}\n\n', None, "Broken"),
        (b'data:{"error":"Too slow","error_type":"generation"}\n\n', None, "Too slow"),  # TGI
        (b'data: {"object":"error","message":"Old vLLM","code":500}\n\n', 500, "Old vLLM"),
        (b'error: {"code":500,"message":"Old llama.cpp"}\n\n', 500, "Old llama.cpp"),
        (b"error: words\n\n", None, "words"),
        (b'event: error\ndata: {"error":{"message":"Named"}}\n\n', None, "Named"),
        (finished(0).replace(b"stop", b"abort"), None, "given up"),
        (finished(0).replace(b"stop", b"error"), None, "given up"),
    ],
)
def test_errors_in_the_stream(event: bytes, status: int | None, words: str) -> None:
    error = failure_of(event)
    assert isinstance(error, ReportedError)
    assert (error.failure, error.status) == ("reported", status)
    assert words in str(error)
    assert error.is_retryable
    assert error.blames_server
    assert error.refusal is None


def test_an_error_that_blames_the_request_is_not_the_servers() -> None:
    detail = {"message": "Too long", "type": "BadRequestError", "code": 400}
    error = failure_of(b"data: " + json.dumps({"error": detail}).encode() + b"\n\n")
    assert isinstance(error, ReportedError)
    assert not error.is_retryable
    assert not error.blames_server
    assert error.refusal is not None
    assert error.refusal.message == "Too long"
    assert json.loads(error.refusal.body) == {"error": detail}


def test_too_many_requests_in_the_stream_is_throttling() -> None:
    error = failure_of(b'data: {"error":{"message":"Slow down","code":429}}\n\n')
    assert (error.failure, error.is_retryable, error.blames_server) == ("throttled", True, False)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("choices", "delta", "content", "text", "index", "finish_reason", "usage"),
                    *("error", "message", "code", "object", "reasoning", "tool_calls", "logprobs"),
                    *("prompt_tokens", "completion_tokens_details", "type", "thinking"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
choices = st.lists(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("delta", "index", "text", "finish_reason"), json_values)
    ),
    max_size=3,
)
answers = st.fixed_dictionaries(
    {}, optional={"choices": choices | json_values, "usage": json_values, "error": json_values}
)
anything = st.one_of(
    st.binary(max_size=200),
    json_values.map(lambda value: json.dumps(value).encode()),
    answers.map(lambda value: json.dumps(value).encode()),
)
framings = st.sampled_from(
    [
        (b"data: ", b"\n\n"),
        (b"data:", b"\r\n\r\n"),
        (b"", b"\n\n"),
        (b"error: ", b"\n\n"),
        (b": ", b"\r\r"),
        (b"event: error\ndata: ", b"\n\n"),
    ]
)


@pytest.mark.slow
@settings(max_examples=200)
@given(anything, framings, st.integers(1, 2))
def test_any_bytes_are_a_chunk_or_an_upstream_error(
    data: bytes, framing: tuple[bytes, bytes], num_choices: int
) -> None:
    event = framing[0] + data + framing[1]
    reader = OpenAIChunkReader("cloud", num_choices=num_choices)
    with suppress(UpstreamError):
        chunk = reader.read(event)
        assert chunk.raw == event or chunk.has_calls or chunk == Chunk(raw=b":\n\n")
        assert isinstance(chunk.content, str)
        assert isinstance(chunk.index, int)
    with suppress(UpstreamError):
        whole = DIALECT.whole(chat(stream=False), data)
        assert whole.body == data or whole.has_calls
    assert json.loads(DIALECT.refusal(400, data).body)["error"]


# Whole answers and refusals


def test_a_whole_answer() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f"}}],
    }
    document = {
        "id": "c",
        "choices": [
            {"index": 1, "message": message, "finish_reason": "tool_calls"},
            {"index": 0, "message": {"content": "First"}, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    raw = json.dumps(document, indent=1).encode()
    answer = DIALECT.whole(chat(stream=False, n=2), raw)
    assert answer.body == raw
    assert answer.texts == ("First", "")
    assert answer.reasoning == ("", "Hm")
    assert answer.has_calls
    assert answer.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.num_completion_tokens == 2
    message["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    answer = DIALECT.whole(chat(stream=False, n=2), json.dumps(document).encode())
    (call,) = json.loads(answer.body)["choices"][0]["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    text = DIALECT.whole(completion("a", stream=False), b'{"choices":[{"text":"b"}]}')
    assert (text.texts, text.usage) == (("b",), None)


@pytest.mark.parametrize("raw", [b"", b"<html>", b"{}", b'{"choices":[]}', b"[1]", b"\x00"])
def test_a_whole_answer_that_is_none(raw: bytes) -> None:
    with pytest.raises(UpstreamError) as caught:
        DIALECT.whole(chat(stream=False), raw)
    assert caught.value.failure == "garbage"


def test_a_whole_answer_that_tells_of_an_error() -> None:
    given_up = b'{"choices":[{"message":{"content":"Ha"},"finish_reason":"abort"}]}'
    for raw in (b'{"error":{"message":"Bad luck"}}', given_up):
        with pytest.raises(ReportedError):
            DIALECT.whole(chat(stream=False), raw)


@pytest.mark.parametrize(
    ("raw", "message", "is_kept"),
    [
        (b'{"error": {"message": "No such model", "code": "model_not_found"}}', "No such model", 1),
        (b'{"object":"error","message":"Old vLLM","code":400}', "Old vLLM", 0),
        (b'{"error":"TGI","error_type":"validation"}', "TGI", 0),
        (b'{"detail":"Not Found"}', "Not Found", 0),
        (b"<html>404</html>", "The cloud tier refused the request with status 404.", 0),
        (b'{"error":{"message":"%s"}}' % (b"x" * 70_000), "The cloud tier refused", 0),
    ],
)
def test_refusals_are_told_in_openais_form(raw: bytes, message: str, is_kept: bool) -> None:
    refusal = DIALECT.refusal(404, raw)
    assert refusal.message.startswith(message)
    assert json.loads(refusal.body)["error"]["message"] == refusal.message
    assert (refusal.body == raw) is bool(is_kept)


def test_which_statuses_refuse() -> None:
    assert [
        s for s in (200, 400, 401, 403, 404, 408, 409, 413, 422, 425, 429, 500) if is_refusal(s)
    ] == [400, 404, 413, 422]
    assert not is_refusal(None)


# Rewriting


def test_a_field_is_put_in_and_all_other_bytes_stay() -> None:
    spliced = splice(OPENAI, "outrider", b'{"tier":"cloud"}')
    assert spliced == OPENAI.replace(b"}\n\n", b',"outrider":{"tier":"cloud"}}\n\n')
    assert splice(b'{"a": 1.50 }', "b", b"2") == b'{"a": 1.50 ,"b":2}'
    assert splice(b"{ }\n", "b", b"2") == b'{ "b":2}\n'
    assert splice(b"data: {}\r\n\r\n", "b", b"2") == b'data: {"b":2}\r\n\r\n'


def test_a_field_of_that_name_is_replaced() -> None:
    event = b'data: {"outrider":{"a":1},"x": [1, 2.50]}\n\n'
    assert splice(event, "outrider", b"{}") == b'data: {"outrider":{},"x":[1, 2.50]}\n\n'
    word = b'{"model":"outrider"}'
    assert json.loads(splice(word, "outrider", b"1")) == {"model": "outrider", "outrider": 1}


def test_a_field_goes_into_events_of_several_lines_too() -> None:
    event = b': {ping}\nevent: x\ndata: {"a":\ndata: 1}\nid: }\n\n'
    assert splice(event, "b", b"2") == b'data: {"a":1,"b":2}\n\n'


@pytest.mark.parametrize("event", [b": ping\n\n", b"data: [DONE]\n\n", b"data: 7\n\n"])
def test_events_without_an_object_take_no_field(event: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        splice(event, "outrider", b"{}")


documents = st.dictionaries(
    st.sampled_from(["id", "x", "outrider", "\u2028", "a}", '"'])
    | st.text(st.characters(codec="utf-8"), max_size=4),
    st.integers() | st.text(st.characters(codec="utf-8"), max_size=9) | st.just([{"a": "}"}]),
    max_size=5,
)


@given(documents, st.booleans(), st.booleans(), st.sampled_from([None, 1]))
def test_splicing_is_adding_a_field(
    document: dict[str, Any], is_event: bool, is_ascii: bool, indent: int | None
) -> None:
    raw = json.dumps(document, ensure_ascii=is_ascii, indent=None if is_event else indent).encode()
    event = b"data: " + raw + b"\n\n" if is_event else raw
    spliced = splice(event, "outrider", b'{"a":"}"}')
    assert json.loads(spliced.removeprefix(b"data: ")) == {**document, "outrider": {"a": "}"}}
    if is_event:
        assert spliced.endswith(b"}\n\n")
        assert len(spliced.splitlines()) == 2
        changed = with_id(event, "new")
        assert json.loads(changed.removeprefix(b"data: ")) == {**document, "id": "new"}
        assert id_of(changed) == "new"


def test_ids() -> None:
    assert id_of(OPENAI) == "chatcmpl-1"
    assert id_of(b'{"id":"whole"}') == "whole"
    assert id_of(b": ping\n\n") is None
    assert id_of(b'data: {"id":7}\n\n') is None
    assert with_id(b"data: [DONE]\n\n", "x") == b"data: [DONE]\n\n"
    assert with_id(b": ping\n\n", "x") == b": ping\n\n"
    assert with_id(OPENAI, "new") == OPENAI.replace(b"chatcmpl-1", b"new")


def test_the_first_characters_are_cut_off() -> None:
    chunk = read(OPENAI)
    assert cut_content(chunk, 0) is chunk
    cut = cut_content(chunk, 3)
    assert cut is not None
    assert cut.content == "llo"
    assert cut.raw == OPENAI.replace(b" hello", b"llo")
    assert cut_content(chunk, 6) is None
    assert cut_content(chunk, 99) is None
    assert cut_content(read(OPENAI_ROLE), 1) is None
    text = cut_content(read(LLAMA_CPP_PYTHON), 1)
    assert text is not None
    assert read(text.raw).content == "ar"


def test_fields_beside_the_text_stay_when_the_text_is_cut() -> None:
    last = OPENAI.replace(b'"finish_reason":null', b'"finish_reason":"stop"')
    cut = cut_content(read(last), 6)
    assert cut is not None
    assert (cut.content, cut.finish_reason) == ("", "stop")
    assert read(cut.raw) == cut
    usage = read(OPENAI_USAGE)
    assert cut_content(usage, 5) is usage
    done = read(b"data: [DONE]\n\n")
    assert cut_content(done, 5) is done


texts = st.text(st.characters(codec="utf-8"), max_size=5)


@given(st.lists(st.tuples(texts, texts), max_size=4), st.integers(0, 20))
def test_cutting_a_stream_leaves_exactly_the_rest(
    pieces: list[tuple[str, str]], num_chars: int
) -> None:
    rest = ""
    left = num_chars
    for reasoning, content in pieces:
        delta = {"role": "assistant", "reasoning_content": reasoning, "content": content}
        event = b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"
        chunk = cut_content(read(event), left)
        left = max(left - len(reasoning + content), 0)
        if chunk is not None:
            again = read(chunk.raw)
            assert (again.reasoning, again.content) == (chunk.reasoning, chunk.content)
            rest += chunk.reasoning + chunk.content
    assert rest == "".join(reasoning + content for reasoning, content in pieces)[num_chars:]
