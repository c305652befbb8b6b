"""Chat answers in the words of the Messages API."""

import json
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import RawMessageStreamEvent
from msgspec.structs import asdict
from pydantic import TypeAdapter

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.http.apis.messages.answers import (
    MESSAGE_EVENTS,
    MessageAnswer,
    MessagesErrorEvent,
    PingEvent,
)
from outrider.gateway.http.apis.messages.writer import MessageWriter
from outrider.gateway.upstream.dialects.anthropic_stream import AnthropicChunkReader
from tests.gateway.answers import read_answer
from tests.gateway.http.apis.chat_answers import (
    DONE,
    REPORT,
    call,
    chunk,
    completion,
    ending,
    event,
)

USAGE = {
    "input_tokens": 5,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 5,
    "output_tokens_details": {"thinking_tokens": 2},
}
_THEIRS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events, held against our own models and, but for pings and errors, the client's."""
    found = []
    assert raw == b"" or raw.endswith(b"\n\n")
    for lines in raw.split(b"\n\n")[:-1]:
        name, data = lines.split(b"\n")
        document = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + document["type"].encode()
        shape = next(m for m in MESSAGE_EVENTS if _type_of(m) == document["type"])
        read_answer(shape, document)
        if shape not in (PingEvent, MessagesErrorEvent):
            _THEIRS.validate_python(document)
        found.append(document)
    return found


def _type_of(model: Any) -> str:
    (kind,) = get_args(get_type_hints(model)["type"])
    return str(kind)


def streamed(*parts: bytes, shows_thinking: bool = True) -> list[dict[str, Any]]:
    writer = MessageWriter(shows_thinking=shows_thinking)
    return [e for part in parts for e in events(writer.part(part)) if e["type"] != "ping"]


def blocks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a reader puts together; they come one behind the other."""
    made: list[dict[str, Any]] = []
    is_open = False
    for told in found:
        match told["type"]:
            case "content_block_start":
                assert not is_open
                assert told["index"] == len(made)
                made.append(dict(told["content_block"]))
                is_open = True
            case "content_block_stop":
                assert is_open
                assert told["index"] == len(made) - 1
                is_open = False
            case "content_block_delta":
                assert is_open
                assert told["index"] == len(made) - 1
                delta = dict(told["delta"])
                delta.pop("type")
                for name, value in delta.items():
                    made[-1][name] = made[-1].get(name, "") + value
    assert not is_open
    return made


def whole(body: bytes, *, shows_thinking: bool = True) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(MessageWriter(shows_thinking=shows_thinking).whole(body))
    read_answer(MessageAnswer, document)
    return document


def test_a_text_comes_event_by_event() -> None:
    writer = MessageWriter(shows_thinking=False)
    first = events(writer.part(chunk(role="assistant", content="Hel")))
    assert [e["type"] for e in first] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
    ]
    assert first[0]["message"] == {
        "id": "msg_ab12",
        "type": "message",
        "role": "assistant",
        "model": "test/small-model",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }
    (second,) = events(writer.part(chunk(content="lo")))
    assert second["delta"] == {"type": "text_delta", "text": "lo"}
    assert writer.part(chunk(finish="stop")) == b""
    last = events(writer.part(ending()))
    assert [e["type"] for e in last] == ["content_block_stop", "message_delta", "message_stop"]
    assert last[1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last[1]["usage"] == USAGE
    assert last[1]["outrider"] == REPORT


def test_parts_may_be_cut_anywhere() -> None:
    stream = chunk(role="assistant", content="Ça va? \u2028") + chunk(finish="stop") + ending()
    writer, byte_by_byte = MessageWriter(shows_thinking=True), MessageWriter(shows_thinking=True)
    at_once = writer.part(stream)
    assert b"".join(byte_by_byte.part(bytes([byte])) for byte in stream) == at_once
    assert "\u2028".encode() not in at_once
    assert blocks(events(at_once)) == [{"type": "text", "text": "Ça va? \u2028"}]


def test_thoughts_text_and_calls_are_blocks_of_their_own() -> None:
    found = streamed(
        chunk(role="assistant", reasoning_content="Hm"),
        chunk(reasoning_content="m."),
        chunk(content="Let "),
        chunk(content="me see."),
        chunk(tool_calls=[call(0, "", "call_1", "weather")]),
        chunk(tool_calls=[call(0, '{"city":')]),
        chunk(tool_calls=[call(0, '"Oslo"}')]),
        chunk(tool_calls=[call(1, "{}", "call_2", "clock")]),
        chunk(content="Bye."),
        chunk(finish="tool_calls"),
        ending(),
    )
    assert blocks(found) == [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {
            "type": "tool_use",
            "id": "call_1",
            "name": "weather",
            "input": {},
            "partial_json": '{"city":"Oslo"}',
        },
        {"type": "tool_use", "id": "call_2", "name": "clock", "input": {}, "partial_json": "{}"},
        {"type": "text", "text": "Bye."},
    ]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_goes_on_out_of_turn_is_an_error() -> None:
    """A block that is over takes no more input; a block without a name could not be run."""
    first = chunk(tool_calls=[call(0, "", "call_1", "f"), call(1, "", "call_2", "g")])
    for parts in ([first, chunk(tool_calls=[call(0, "{}")])], [chunk(tool_calls=[call(0, "{}")])]):
        with pytest.raises(GenerationError):
            streamed(*parts)


def test_thoughts_are_sent_only_if_requested() -> None:
    parts = [chunk(role="assistant", reasoning_content="Hm")] * 100
    writer = MessageWriter(shows_thinking=False)
    first, *others = [writer.part(part) for part in parts]
    assert events(first)[0]["type"] == "message_start"
    pings = [told for other in others for told in events(other)]
    assert pings
    assert {told["type"] for told in pings} == {"ping"}
    assert len(pings) < 10
    found = streamed(
        *parts, chunk(content="Yes"), chunk(finish="stop"), ending(), shows_thinking=False
    )
    assert blocks(found) == [{"type": "text", "text": "Yes"}]
    body = completion(content="Yes", reasoning_content="Hm")
    assert whole(body, shows_thinking=False)["content"] == [{"type": "text", "text": "Yes"}]
    assert whole(body)["content"][0]["thinking"] == "Hm"


def test_signatures_of_upstream_tiers_are_passed_on() -> None:
    signed = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    hidden = {"type": "redacted_thinking", "data": "eHh4"}
    parts = [
        chunk(role="assistant", reasoning_content="Hm."),
        chunk(thinking_blocks=[signed]),
        chunk(thinking_blocks=[hidden]),
        chunk(content="Yes"),
        chunk(finish="stop"),
        ending(),
    ]
    answer = {"type": "text", "text": "Yes"}
    assert blocks(streamed(*parts)) == [signed, hidden, answer]
    unread = signed | {"thinking": ""}
    assert blocks(streamed(*parts, shows_thinking=False)) == [unread, hidden, answer]
    body = completion(content="Yes", reasoning_content="Hm.", thinking_blocks=[signed, hidden])
    assert whole(body)["content"] == [signed, hidden, answer]
    assert whole(body, shows_thinking=False)["content"] == [unread, hidden, answer]


def test_comments_are_pings() -> None:
    assert events(MessageWriter(shows_thinking=False).part(b": still here\n\n")) == [
        {"type": "ping"}
    ]


def test_an_answer_without_text_has_an_empty_one() -> None:
    found = streamed(chunk(role="assistant", content=""), chunk(finish="stop"), ending())
    assert blocks(found) == [{"type": "text", "text": ""}]
    assert blocks(streamed(DONE)) == [{"type": "text", "text": ""}]
    assert whole(completion(content=""))["content"] == [{"type": "text", "text": ""}]


def stop_reasons(finish: str, **choice: Any) -> tuple[Any, Any]:
    """Return the stop reasons of a stream and of a whole answer, which are the same."""
    last = json.loads(chunk(finish=finish).removeprefix(b"data: "))
    last["choices"][0] |= choice
    (*_, delta, _) = streamed(chunk(content="Yes"), event(last), ending())
    body = json.loads(completion(finish=finish, content="Yes"))
    body["choices"][0] |= choice
    message = whole(json.dumps(body).encode())
    told = (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"])
    assert told == (message["stop_reason"], message["stop_sequence"])
    return told


@pytest.mark.parametrize(
    ("finish", "choice", "expected"),
    [
        ("stop", {}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": 151643}, ("end_turn", None)),
        ("something new", {}, ("end_turn", None)),
    ],
)
def test_why_an_answer_ended(finish: str, choice: dict[str, Any], expected: Any) -> None:
    assert stop_reasons(finish, **choice) == expected


def test_a_call_of_a_named_tool_is_a_call() -> None:
    tool_calls = [call(0, "{}", "call_1", "clock")]
    found = streamed(chunk(tool_calls=tool_calls), chunk(finish="stop"), ending())
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    message = whole(completion(content=None, tool_calls=tool_calls))
    assert message["stop_reason"] == "tool_use"


def test_a_whole_answer() -> None:
    calls = [call(0, '{"city":"Oslo"}', "call_1", "weather"), call(1, '{"ci', "call_2", "weather")]
    message = whole(completion(finish="length", content="Let me see.", tool_calls=calls))
    assert message == {
        "id": "msg_ab12",
        "type": "message",
        "role": "assistant",
        "model": "test/small-model",
        "content": [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}},
        ],  # the call that was cut off nobody could run
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {**USAGE, "service_tier": "standard"},
        "outrider": REPORT,
    }


def test_the_service_tier_is_told() -> None:
    first = chunk(content="Yes", fields={"service_tier": "priority"})
    (started, *_) = streamed(first)
    assert started["message"]["usage"]["service_tier"] == "priority"


def test_a_stream_that_breaks_off() -> None:
    problem = Problem(status=503, message="It is gone.", type="server_error")
    delivered = DeliveredReport(
        tier="small", reason="requested", hand_off=None, degraded=False, completion_tokens=2
    )
    writer = MessageWriter(shows_thinking=False)
    writer.part(chunk(content="Yes"))
    (told,) = events(writer.ending_badly(problem, delivered))
    assert told == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "It is gone."},
        "outrider": asdict(delivered),
    }
    (bare,) = events(writer.ending_badly(problem, None))
    assert "outrider" not in bare


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices": 1}'])
def test_garbage_is_said_to_be_garbage(body: bytes) -> None:
    with pytest.raises(GenerationError):
        MessageWriter(shows_thinking=False).whole(body)


def test_our_own_reader_of_this_api_reads_the_same_answer() -> None:
    writer = MessageWriter(shows_thinking=True)
    raw = writer.part(
        chunk(role="assistant", reasoning_content="Hm.")
        + chunk(content="Let me see.")
        + chunk(tool_calls=[call(0, '{"city":"Oslo"}', "call_1", "weather")])
        + chunk(finish="tool_calls")
        + ending()
    )
    reader = AnthropicChunkReader("cloud", created=0, shows_thinking=False)
    chunks = [reader.read(told + b"\n\n") for told in raw.split(b"\n\n")[:-1]]
    assert "".join(c.reasoning for c in chunks) == "Hm."
    assert "".join(c.content for c in chunks) == "Let me see."
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]
    assert reader.is_complete
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.num_prompt_tokens, usage.num_cached_tokens) == (9, 4)
    assert (usage.num_completion_tokens, usage.num_reasoning_tokens) == (5, 2)
