"""Chat answers in the words of Ollama's API, and its requests in those of chat."""

import asyncio
import json
from typing import Any

import pytest

from outrider.gateway.contract.errors.http import Problem
from outrider.gateway.contract.errors.tree import GenerationError
from outrider.gateway.http.apis.ollama.answers import OllamaAnswer, OllamaChatAnswer, OllamaError
from outrider.gateway.http.apis.ollama.api import OllamaChat, OllamaGenerate
from outrider.gateway.http.apis.ollama.writer import OllamaWriter
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
from tests.gateway.http.apis.test_side_doors import ollama_parts


class Clock:
    """A second passes with each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def writer(*, is_chat: bool = True, shows_thinking: bool = True) -> OllamaWriter:
    return OllamaWriter(
        "auto",
        is_chat=is_chat,
        shows_thinking=shows_thinking,
        clock=Clock(),
        wall_clock=lambda: 1_700_000_000.5,
    )


def streamed(*parts: bytes, **options: bool) -> list[dict[str, Any]]:
    """The lines, each held against the description."""
    form = OllamaChatAnswer if options.get("is_chat", True) else OllamaAnswer
    made = writer(**options)
    lines = b"".join(map(made.part, parts)).decode().splitlines()
    for line in lines:
        read_answer(form, line.encode())
    return [json.loads(line) for line in lines]


def test_a_text_comes_line_by_line() -> None:
    first, second, last = streamed(
        chunk(role="assistant", content="Hel"),
        b": keep-alive\n\n",
        chunk(content="lo\u2028"),
        chunk(finish="stop"),
        ending(),
    )
    assert first == {
        "model": "test/small-model",
        "created_at": "2023-11-14T22:13:20.500000Z",
        "message": {"role": "assistant", "content": "Hel"},
        "done": False,
    }
    assert second["message"]["content"] == "lo\u2028"
    assert last == {
        "model": "test/small-model",
        "created_at": "2023-11-14T22:13:20.500000Z",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "stop",
        "total_duration": 2_000_000_000,
        "load_duration": 0,
        "prompt_eval_count": 9,
        "prompt_eval_duration": 100_000_000,
        "eval_count": 5,
        "eval_duration": 1_900_000_000,
        "outrider": REPORT,
    }


def test_no_line_is_cut_by_a_readers_line_ends() -> None:
    """httpx, with which the official client reads, takes these characters for the end of a line."""
    made = writer().part(chunk(content="a\u2028b\u2029c\x85d"))
    assert len(made.decode().splitlines()) == 1


def test_parts_may_be_cut_anywhere() -> None:
    stream = chunk(role="assistant", content="Ça va?") + chunk(finish="stop") + ending()
    made = streamed(*[bytes([byte]) for byte in stream])
    assert "".join(line["message"]["content"] for line in made) == "Ça va?"
    assert made[-1]["done"] is True


def test_calls_are_told_when_they_are_whole() -> None:
    lines = streamed(
        chunk(role="assistant", reasoning_content="Hm."),
        chunk(content="Let me see."),
        chunk(tool_calls=[call(0, "", "call_1", "weather")]),
        chunk(tool_calls=[call(0, '{"city":')]),
        chunk(tool_calls=[call(0, '"Oslo"}')]),
        chunk(tool_calls=[call(1, "", "call_2", "clock")]),
        chunk(finish="tool_calls"),
        ending(),
    )
    assert [line["message"].get("thinking") for line in lines] == ["Hm.", None, None, None, None]
    told = [one for line in lines for one in line["message"].get("tool_calls", ())]
    assert told == [
        {"function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"function": {"name": "clock", "arguments": {}}},
    ]
    assert lines[-1]["done_reason"] == "stop"


def test_a_call_that_was_cut_off_is_not_told() -> None:
    cut = call(0, '{"city": "Os', "call_1", "weather")
    (last,) = streamed(chunk(tool_calls=[cut]), chunk(finish="length"), ending())
    assert last["done_reason"] == "length"
    assert "tool_calls" not in last["message"]
    body = completion("length", content=None, tool_calls=[{**cut, "type": "function"}])
    assert "tool_calls" not in json.loads(writer().whole(body))["message"]


def test_a_whole_answer() -> None:
    called = {**call(0, '{"city":"Oslo"}', "call_1", "weather"), "type": "function"}
    body = completion("tool_calls", content="Wait.", reasoning_content="Hm", tool_calls=[called])
    told = writer().whole(body)
    answer = read_answer(OllamaChatAnswer, told)
    assert answer.done
    assert json.loads(told)["message"] == {
        "role": "assistant",
        "content": "Wait.",
        "thinking": "Hm",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    }
    silent = json.loads(writer(shows_thinking=False).whole(body))
    assert "thinking" not in silent["message"]


def test_a_completions_text() -> None:
    text = {"id": "cmpl-1", "model": "m", "choices": [{"index": 0, "text": "Hi"}]}
    first, last = streamed(event(text), DONE, is_chat=False)
    assert (first["response"], first["done"]) == ("Hi", False)
    assert (last["response"], last["done"]) == ("", True)
    assert json.loads(writer(is_chat=False).whole(json.dumps(text).encode()))["response"] == "Hi"


def test_what_breaks_off_ends_with_an_error() -> None:
    problem = Problem(status=500, message="It broke.", type="server_error")
    line = writer().ending_badly(problem, None)
    assert line.endswith(b"\n")
    assert read_answer(OllamaError, line).error == "It broke."
    with pytest.raises(GenerationError):
        writer().part(b"data: {\n\n")


# ---- requests -----------------------------------------------------------------------------


def chat_of(**fields: Any) -> dict[str, Any]:
    api = OllamaChat(parts=ollama_parts(has_upstream_tiers=True))
    body = json.dumps({"model": "m", **fields}).encode()
    read: dict[str, Any] = json.loads(asyncio.run(api.read(body)).chat_body)
    return read


def test_results_find_their_calls() -> None:
    def called(*names: str) -> dict[str, Any]:
        calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in names]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def result(name: str | None = None) -> dict[str, Any]:
        return {"role": "tool", "content": "x", "tool_name": name}

    chat = chat_of(
        messages=[called("f", "g", "f"), result("g"), result("f"), result(), called("g"), result()]
    )
    ids = [m["tool_call_id"] for m in chat["messages"] if m["role"] == "tool"]
    assert ids == ["call_2", "call_1", "call_3", "call_4"]
    (first, *_) = chat["messages"][0]["tool_calls"]
    assert first == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":1}'},
    }


def test_levels_of_thinking_are_for_servers_that_know_them() -> None:
    hello = [{"role": "user", "content": "Hi"}]
    assert chat_of(messages=hello, think="high")["reasoning_effort"] == "high"
    assert chat_of(messages=hello, think=True)["chat_template_kwargs"] == {"enable_thinking": True}
    assert "chat_template_kwargs" not in chat_of(messages=hello)


@pytest.mark.parametrize("limit", [-2, -1, 0, None])
def test_answers_without_a_limit_have_the_servers(limit: int | None) -> None:
    hello = [{"role": "user", "content": "Hi"}]
    assert "max_tokens" not in chat_of(messages=hello, options={"num_predict": limit})


def test_unknown_options_are_left_out_and_named() -> None:
    api = OllamaGenerate(parts=ollama_parts(ignores_unknown=True))
    body = {
        "model": "m:latest",
        "prompt": "Hi",
        "options": {"mirostat": 1, "numa": True, "seed": 3},
    }
    read = asyncio.run(api.read(json.dumps(body).encode()))
    assert set(read.ignored) == {"options.mirostat", "options.numa"}
    chat = json.loads(read.chat_body)
    assert (chat["model"], chat["seed"]) == ("m", 3)
