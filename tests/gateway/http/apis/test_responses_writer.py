"""Chat answers as responses: every event of the types that OpenAI's client has."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.http.apis.api import AnswerWriter
from outrider.gateway.http.apis.responses.api import ResponsesApi
from tests.gateway.http.apis.chat_answers import (
    DONE,
    REPORT,
    call,
    chunk,
    completion,
    ending,
    logprobs_of,
)
from tests.gateway.http.apis.response_events import read_events, read_response, rebuilt

NOW_S = 1700000007.5
FAILURE = Problem(status=503, message="It died.", type="server_error", code="engine_died")


def new_writer(**fields: Any) -> AnswerWriter:
    surface = ResponsesApi(has_upstream_tiers=True, clock=lambda: NOW_S, new_id=lambda: "new1")
    request = {"model": "auto", "input": "Hello", **fields}
    return asyncio.run(surface.read(json.dumps(request).encode())).writer


def streamed(*parts: bytes, **fields: Any) -> list[dict[str, Any]]:
    writer = new_writer(stream=True, **fields)
    return read_events(b"".join(map(writer.part, parts)))


def types_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_text() -> None:
    events = streamed(
        chunk(role="assistant", content=""),
        chunk(content="Hello"),
        chunk(content=" there!"),
        chunk(finish="stop"),
        ending(),
    )
    assert types_of(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    created, completed = events[0]["response"], events[-1]["response"]
    assert created["id"] == completed["id"] == "resp_ab12"
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert "outrider" not in created
    assert completed["status"] == "completed"
    assert completed["created_at"] == 1700000000
    assert completed["completed_at"] == 1700000007
    assert completed["model"] == "test/small-model"
    assert completed["outrider"] == REPORT
    assert completed["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }
    (message,) = completed["output"]
    assert message["content"][0]["text"] == "Hello there!"
    assert events[6]["text"] == "Hello there!"
    assert rebuilt(events) == completed["output"]


def test_thinking_text_and_calls() -> None:
    parts = [
        chunk(role="assistant", reasoning_content="the "),
        chunk(reasoning_content="fox"),
        chunk(content="I look."),
        chunk(tool_calls=[call(0, "", "call_1", "f")]),
        chunk(tool_calls=[call(0, '{"x":')]),
        chunk(tool_calls=[call(0, "1}")]),
        chunk(tool_calls=[call(1, "", "call_2", "g")]),
        chunk(tool_calls=[call(1, "{}")], finish="tool_calls"),
        ending(),
    ]
    events = streamed(*parts)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert output[0]["summary"] == [{"type": "summary_text", "text": "the fox"}]
    assert [(c["name"], c["call_id"], c["arguments"]) for c in output[2:]] == [
        ("f", "call_1", '{"x":1}'),
        ("g", "call_2", "{}"),
    ]
    assert {item["status"] for item in output} == {"completed"}
    assert len({item["id"] for item in output}) == 4
    assert rebuilt(events) == output
    # A call is complete when the next one begins, not only at the end.
    kinds = types_of(events)
    second = [i for i, kind in enumerate(kinds) if kind == "output_item.added"][3]
    assert kinds.index("function_call_arguments.done") < second


def test_calls_that_are_written_in_turn() -> None:
    events = streamed(
        chunk(tool_calls=[call(0, '{"x":', "call_1", "f"), call(1, '{"y":', "call_2", "g")]),
        chunk(tool_calls=[call(0, "1}"), call(1, "2}")], finish="tool_calls"),
        ending(),
    )
    output = events[-1]["response"]["output"]
    assert [item["arguments"] for item in output] == ['{"x":1}', '{"y":2}']
    assert rebuilt(events) == output


def test_a_call_that_cannot_be() -> None:
    writer = new_writer(stream=True)
    with pytest.raises(GenerationError):
        writer.part(chunk(tool_calls=[call(0, "{}")]))
    writer = new_writer(stream=True)
    writer.part(chunk(tool_calls=[call(0, "{}", "call_1", "f"), call(1, "{}", "call_2", "f")]))
    writer.part(chunk(tool_calls=[call(0, " \n")]))
    with pytest.raises(GenerationError):
        writer.part(chunk(tool_calls=[call(0, "{}")]))


def test_text_behind_a_call_is_another_message() -> None:
    events = streamed(
        chunk(content="One."),
        chunk(tool_calls=[call(0, "{}", "call_1", "f")]),
        chunk(content="Two.", finish="stop"),
        ending(),
    )
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert rebuilt(events) == output


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter")],
)
def test_an_answer_that_is_cut(finish: str, reason: str) -> None:
    parts = [chunk(reasoning_content="hm"), chunk(content="Hel"), chunk(finish=finish), ending()]
    events = streamed(*parts)
    assert events[-1]["type"] == "response.incomplete"
    whole = read_response(
        new_writer().whole(completion(finish, content="Hel", reasoning_content="hm"))
    )
    for response in (events[-1]["response"], whole):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": reason}
        assert response["completed_at"] is None
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_an_empty_answer_is_an_empty_message() -> None:
    events = streamed(chunk(role="assistant", content=""), chunk(finish="stop"), ending())
    (message,) = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == ""
    assert read_response(new_writer().whole(completion(content="")))["output"] == [message]


def test_a_refusal() -> None:
    events = streamed(chunk(refusal="I "), chunk(refusal="won't."), chunk(finish="stop"), ending())
    output = events[-1]["response"]["output"]
    assert output[0]["content"] == [{"type": "refusal", "refusal": "I won't."}]
    assert rebuilt(events) == output
    whole = read_response(new_writer().whole(completion(content=None, refusal="I won't.")))
    assert whole["output"] == output


def test_logprobs() -> None:
    events = streamed(
        chunk(content="Hel", logprobs=logprobs_of("Hel")),
        chunk(logprobs=logprobs_of("\ufffd")),
        chunk(content="漢", logprobs=logprobs_of("\ufffd")),
        chunk(content="!", logprobs=logprobs_of("!")),
        chunk(finish="stop"),
        ending(),
        include=["message.output_text.logprobs"],
    )
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [[entry["token"] for entry in delta] for delta in deltas] == [
        ["Hel"],
        ["\ufffd", "\ufffd"],
        ["!"],
    ]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["logprobs"] == deltas[0] + deltas[1] + deltas[2]
    assert rebuilt(events) == events[-1]["response"]["output"]


def test_comments_pass_and_do_not_begin_the_response() -> None:
    writer = new_writer(stream=True)
    assert writer.part(b": alive\n\n") == b": alive\n\n"
    stream = writer.part(chunk(content="x") + b":\n\n" + chunk(finish="stop") + ending())
    assert types_of(read_events(stream))[0] == "created"
    assert stream.count(b"\n:\n\n") == 1


def test_no_line_reader_can_cut_an_event() -> None:
    text = "a\u2028b\u2029c\x85d\ne\rf"
    writer = new_writer(stream=True, instructions=text)
    stream = writer.part(chunk(content=text) + chunk(finish="stop") + ending())
    assert len(stream.decode().splitlines()) == stream.count(b"\n")
    events = read_events(stream)
    assert rebuilt(events)[0]["content"][0]["text"] == text
    assert events[0]["response"]["instructions"] == text


def test_the_trace_goes_with_the_deltas() -> None:
    trace = {"tokens": [["Hi", True]]}
    events = streamed(
        chunk(content="Hi", fields={"outrider": trace}), chunk(finish="stop"), ending()
    )
    assert [event["outrider"] for event in events if "delta" in event] == [trace]
    assert events[-1]["response"]["outrider"] == REPORT


def test_a_stream_that_breaks_off() -> None:
    writer = new_writer(stream=True)
    stream = writer.part(chunk(reasoning_content="hm") + chunk(content="Hel"))
    delivered = DeliveredReport(
        tier="small", reason="router: short", hand_off=None, degraded=False, completion_tokens=2
    )
    stream += writer.ending_badly(FAILURE, delivered)
    events = read_events(stream)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {
        "code": "server_error",
        "message": "It died.",
        "type": "server_error",
        "param": None,
    }
    assert response["outrider"] == {**asdict(delivered), "code": "engine_died"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["content"][0]["text"] == "Hel"


def test_a_stream_that_breaks_off_before_it_says_anything() -> None:
    events = read_events(new_writer(stream=True).ending_badly(FAILURE, None))
    assert types_of(events) == ["created", "in_progress", "failed"]
    assert events[0]["response"]["id"] == "resp_new1"


def test_a_failure_behind_the_end_is_not_told() -> None:
    writer = new_writer(stream=True)
    writer.part(chunk(content="x", finish="stop") + ending())
    assert writer.ending_badly(FAILURE, None) == b""
    assert writer.part(DONE) == b""


def test_limits_that_end_a_stream() -> None:
    problem = Problem(status=429, message="Too much.", type="rate_limit_error", code="x")
    events = read_events(new_writer(stream=True).ending_badly(problem, None))
    assert events[-1]["response"]["error"]["code"] == "rate_limit_exceeded"


def test_the_response_repeats_its_request() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    response = read_response(
        new_writer(
            instructions="Be short.",
            metadata={"a": "b"},
            temperature=0,
            top_p=0.5,
            max_output_tokens=7,
            tools=[tool],
            tool_choice={"type": "function", "name": "f"},
            parallel_tool_calls=False,
            text={"format": form},
            reasoning={"summary": "auto"},
            user="u",
            safety_identifier="s",
            prompt_cache_key="k",
            top_logprobs=3,
            max_tool_calls=2,
        ).whole(completion(content="x"))
    )
    assert response["instructions"] == "Be short."
    assert response["metadata"] == {"a": "b"}
    assert (response["temperature"], response["top_p"]) == (0, 0.5)
    assert (response["max_output_tokens"], response["max_tool_calls"]) == (7, 2)
    assert response["tools"] == [{**tool, "description": None}]
    assert response["tool_choice"] == {"type": "function", "name": "f"}
    assert response["parallel_tool_calls"] is False
    assert response["text"] == {"format": form, "verbosity": "medium"}
    assert response["reasoning"] == {"effort": None, "summary": "auto"}
    assert (response["user"], response["safety_identifier"]) == ("u", "s")
    assert (response["prompt_cache_key"], response["top_logprobs"]) == ("k", 3)
    assert (response["store"], response["background"]) == (False, False)
    plain = read_response(new_writer().whole(completion(content="x")))
    assert (plain["temperature"], plain["top_p"], plain["tool_choice"]) == (1.0, 1.0, "auto")
    assert (plain["metadata"], plain["tools"]) == ({}, [])


def test_ids_of_other_servers_are_made_fit() -> None:
    body = completion(content="x").replace(b"chatcmpl-ab12", b"odd id/\xc3\xa4")
    assert read_response(new_writer().whole(body))["id"] == "resp_new1"
    body = completion(content="x").replace(b'"created": 1700000000', b'"created": null')
    assert read_response(new_writer().whole(body))["created_at"] == int(NOW_S)


TEXTS = st.text(st.sampled_from('ab \n\u2028漢🙂"\\'), max_size=6)
ARGUMENTS = st.dictionaries(TEXTS, TEXTS, max_size=2).map(json.dumps)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    thought=st.lists(TEXTS, max_size=3),
    texts=st.lists(TEXTS, max_size=3),
    calls=st.lists(ARGUMENTS, max_size=3),
    cut=st.booleans(),
    size=st.integers(1, 5),
)
def test_a_stream_has_the_content_of_the_whole_answer(
    thought: list[str], texts: list[str], calls: list[str], cut: bool, size: int
) -> None:
    finish = "length" if cut else "tool_calls" if calls else "stop"
    parts = [chunk(role="assistant", content="")]
    parts += [chunk(reasoning_content=text) for text in thought]
    parts += [chunk(content=text) for text in texts]
    for index, arguments in enumerate(calls):
        parts.append(chunk(tool_calls=[call(index, "", f"call_{index}", "f")]))
        pieces = [arguments[i : i + size] for i in range(0, len(arguments), size)]
        parts += [chunk(tool_calls=[call(index, piece)]) for piece in pieces]
    events = streamed(*parts, chunk(finish=finish), ending())
    whole_calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for i, arguments in enumerate(calls)
    ]
    body = completion(
        finish,
        content="".join(texts) or None,
        reasoning_content="".join(thought),
        tool_calls=whole_calls,
    )
    last = events[-1]["response"]
    assert last == read_response(new_writer(stream=True).whole(body))
    assert rebuilt(events) == last["output"]
