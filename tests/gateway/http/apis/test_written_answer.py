"""Calls and thinking that a client shows, against what the tokens of its answer are read as."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.http.apis.verify.given import GivenAnswer, read_answer
from outrider.gateway.http.apis.verify.written_answer import ReadAnswer, read_tokens, tool_reading

Encode = Callable[[str], list[int]]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look_up")
]
CALLS = (("add", {"a": 1, "b": [2.5, "x"]}), ("look_up", {}))


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": ""}], **fields})


def written(*, thought: str = "") -> str:
    calls = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in CALLS
    )
    return f"{thought}Let me see. {calls}"


def message(**changes: Any) -> dict[str, Any]:
    calls = [
        {"id": "c", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for name, given in CALLS
    ]
    return {"role": "assistant", "content": "Let me see. ", "tool_calls": calls, **changes}


def given(**message: Any) -> GivenAnswer:
    return read_answer({"choices": [{"message": message}]}, 0)


def readings(tokenizer: ChatTokenizer, encode: Encode, text: str) -> tuple[ReadAnswer, ...]:
    reading = tool_reading(request(tools=TOOLS), tokenizer)
    assert reading is not None
    return read_tokens(encode(text), tokenizer, reading)


def test_calls_are_those_of_the_tokens(tokenizer: ChatTokenizer, encode: Encode) -> None:
    found = readings(tokenizer, encode, written())
    assert any(each.agrees_with(given(**message())) for each in found)
    spaced = message()
    spaced["tool_calls"][0]["function"]["arguments"] = '{"b": [2.5,  "x"],\n "a": 1}'
    assert any(each.agrees_with(given(**spaced)) for each in found)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        None,
        message()["tool_calls"][:1],
        message()["tool_calls"][::-1],
        [message()["tool_calls"][0], {"function": {"name": "look_up", "arguments": '{"a": 1}'}}],
        [message()["tool_calls"][0], {"function": "look_up"}],
        ["add", None],
    ],
)
def test_other_calls_are_not(tokenizer: ChatTokenizer, encode: Encode, calls: object) -> None:
    found = readings(tokenizer, encode, written())
    assert not any(each.agrees_with(given(**message(tool_calls=calls))) for each in found)


def test_a_call_that_broke_off_is_compared_as_it_stands(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    found = readings(tokenizer, encode, '<tool_call>{"name": "add", "arguments": {"a": 1')
    for arguments, is_same in (('{"a": 1', True), ('{"a": 2', False)):
        call = {"function": {"name": "add", "arguments": arguments}}
        assert any(each.agrees_with(given(tool_calls=[call])) for each in found) == is_same


THOUGHT = "<think>\nTwo, or three?\n</think>\n\nThree."


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("shown", "is_same"),
    [
        ("Two, or three?\n", True),
        (" Two, or\nthree?", True),
        (None, True),
        ("Two, or four?", False),
        ("Two, or", False),
        ("Two, or three? Three.", False),
        (["Two, or three?"], False),
    ],
)
def test_thinking_is_that_of_the_tokens(
    tokenizer: ChatTokenizer, encode: Encode, name: str, shown: object, *, is_same: bool
) -> None:
    found = read_tokens(encode(THOUGHT), tokenizer, None)
    assert any(each.agrees_with(given(**{name: shown})) for each in found) == is_same
    assert all(each.content == "Three." and not each.calls for each in found)


def test_thinking_under_both_names_is_compared_twice(
    tokenizer: ChatTokenizer, encode: Encode
) -> None:
    for text, is_same in (("Two, or three?", True), ("Two.", False)):
        answer = given(reasoning_content="Two, or three?", reasoning=text)
        found = read_tokens(encode(THOUGHT), tokenizer, None)
        assert any(each.agrees_with(answer) for each in found) == is_same


@pytest.fixture
def thinker(tokenizer_folder: Path, tmp_path: Path) -> ChatTokenizer:
    """A model whose template may open thinking."""
    folder = tmp_path / "thinker"
    shutil.copytree(tokenizer_folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}<think>"
    )
    return ChatTokenizer.load(folder)


@pytest.mark.parametrize(
    ("text", "shown", "is_same"),
    [
        ("Two? </think>Three.", "Two?", True),
        ("Two? </think>Three.", "Three?", False),
        ("Two? Or three", "Two? Or three", True),
        ("Two? Or three", "Two?", False),
        ("Two? Or three", None, False),
    ],
)
def test_thinking_that_the_prompt_opened_is_compared(
    thinker: ChatTokenizer, encode: Encode, text: str, shown: str | None, *, is_same: bool
) -> None:
    """What never ends is known to be thinking only where it is shown as such."""
    _, opened = read_tokens(encode(text), thinker, None)
    assert opened.agrees_with(given(reasoning_content=shown)) == is_same


def test_the_prompt_tells_whether_it_opened_thinking(
    thinker: ChatTokenizer, encode: Encode
) -> None:
    written = encode("Two? </think>Three.")
    moved = given(content="Two?")
    for prompt, contents in (("Hi <think>\n", ["Three."]), ("Hi", ["Two? </think>Three."])):
        found = read_tokens(written, thinker, None, encode(prompt))
        assert [each.content for each in found] == contents
        assert any(each.agrees_with(moved) for each in found) == (prompt == "Hi")


def test_without_tools_no_calls_are_read(tokenizer: ChatTokenizer) -> None:
    assert tool_reading(request(), tokenizer) is None
    assert tool_reading(request(tools=TOOLS, tool_choice="none"), tokenizer) is None
