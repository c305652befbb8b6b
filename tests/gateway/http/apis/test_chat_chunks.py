"""Reading chat answers, our own and other servers'."""

import json

import pytest

from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.http.apis.chat_chunks import (
    CallPiece,
    ChatChunkParser,
    ChatUsage,
    read_completion,
)
from tests.gateway.http.apis.chat_answers import (
    ANSWER_ID,
    DONE,
    REPORT,
    call,
    chunk,
    completion,
    ending,
    event,
    logprobs_of,
)


def test_a_stream_piece_by_piece() -> None:
    parts = [
        chunk(role="assistant", content="Hi", logprobs=logprobs_of("Hi")),
        b": alive\n\n",
        chunk(reasoning_content="hm"),
        chunk(tool_calls=[call(0, "", "call_1", "f")]) + chunk(tool_calls=[call(0, "{}")]),
        chunk(finish="tool_calls"),
        ending(service_tier="flex"),
    ]
    reader = ChatChunkParser()
    pieces = [piece for part in parts for piece in reader.read(part)]
    first, alive, thought, named, arguments, last, usage, done = pieces
    assert (first.content, first.answer_id, first.model) == ("Hi", ANSWER_ID, "test/small-model")
    assert first.created == 1700000000
    assert first.logprobs is not None
    assert first.logprobs[0]["token"] == "Hi"
    assert alive.comment == b": alive\n\n"
    assert (thought.reasoning, thought.content) == ("hm", "")
    assert list(named.calls) == [CallPiece(index=0, call_id="call_1", name="f")]
    assert list(arguments.calls) == [CallPiece(index=0, arguments="{}")]
    assert last.finish_reason == "tool_calls"
    assert usage.usage == ChatUsage(
        num_prompt_tokens=9, num_completion_tokens=5, num_cached_tokens=4, num_reasoning_tokens=2
    )
    assert usage.usage.num_total_tokens == 14
    assert usage.service_tier == "flex"
    assert usage.report is not None
    assert json.loads(bytes(usage.report)) == REPORT
    assert done.is_done


def test_events_may_be_cut_anywhere() -> None:
    stream = chunk(content="Zwölf 漢字") + b": alive\n\n" + ending()
    whole = ChatChunkParser().read(stream)
    for size in (1, 2, 7, 100):
        reader = ChatChunkParser()
        cut = [p for i in range(0, len(stream), size) for p in reader.read(stream[i : i + size])]
        assert [(p.content, p.comment, p.is_done) for p in cut] == [
            (p.content, p.comment, p.is_done) for p in whole
        ]


def test_a_whole_answer() -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    piece = read_completion(
        completion("tool_calls", content=None, reasoning_content="hm", tool_calls=calls)
    )
    assert (piece.content, piece.reasoning, piece.finish_reason) == ("", "hm", "tool_calls")
    assert list(piece.calls) == [CallPiece(index=0, call_id="call_1", name="f", arguments="{}")]
    assert piece.usage is not None


ANSWERS = (("a", None), ("b", "stop"))


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"reasoning": "hm", "content": None}, ("hm", "", "")),
        ({"reasoning_content": None, "reasoning": "hm", "content": "x"}, ("hm", "x", "")),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b"},
                    {"type": "odd", "text": "c"},
                    7,
                ]
            },
            ("hm", "ab", ""),
        ),
        ({"content": None, "refusal": "No."}, ("", "", "No.")),
        ({}, ("", "", "")),
    ],
)
def test_habits_of_other_servers(message: dict, wanted: tuple) -> None:
    for piece in (
        read_completion(completion(**message)),
        *ChatChunkParser().read(chunk(**message)),
    ):
        assert (piece.reasoning, piece.content, piece.refusal) == wanted


def test_calls_of_whole_answers_have_no_index() -> None:
    calls = [{"function": {"name": name, "arguments": '{"x":1}'}} for name in "fg"]
    piece = read_completion(completion(content=None, tool_calls=calls))
    assert [(c.index, c.name, c.arguments) for c in piece.calls] == [
        (0, "f", '{"x":1}'),
        (1, "g", '{"x":1}'),
    ]


def test_indices_of_calls_are_the_server_s() -> None:
    (piece,) = ChatChunkParser().read(chunk(tool_calls=[call(2, "{}"), call(5, "{}")]))
    assert [c.index for c in piece.calls] == [2, 5]


def test_thinking_blocks_and_stops_are_told() -> None:
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "s"}]
    choice = {
        "delta": {"reasoning_content": "hm", "thinking_blocks": blocks},
        "finish_reason": "stop",
        "stop_reason": "###",
    }
    (piece,) = ChatChunkParser().read(event({"choices": [choice]}))
    assert (piece.thoughts, piece.stop) == (blocks, "###")
    choice["stop_reason"] = 17  # a token's id
    assert ChatChunkParser().read(event({"choices": [choice]}))[0].stop is None


def test_several_choices_are_one_text() -> None:
    choices = [{"delta": {"content": text}, "finish_reason": end} for text, end in ANSWERS]
    (piece,) = ChatChunkParser().read(event({"choices": choices}))
    assert (piece.content, piece.finish_reason) == ("ab", "stop")
    usage = event({"choices": None, "usage": {"prompt_tokens": 1.0, "completion_tokens": None}})
    assert ChatChunkParser().read(usage)[0].usage == ChatUsage(num_prompt_tokens=1)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"choices": 1}', b'{"choices":[{"delta":{"tool_calls":[1]}}]}']
)
def test_invalid_answers_are_refused(body: bytes) -> None:
    with pytest.raises(GenerationError) as error:
        read_completion(body)
    assert error.value.code == "unreadable_answer"
    if body:
        with pytest.raises(GenerationError):
            ChatChunkParser().read(b"data: " + body + b"\n\n" + DONE)
