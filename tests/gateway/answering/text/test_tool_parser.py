"""Tool calls in a text: however it is cut, the same calls, arguments and content come out."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.answering.text.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    find_dialect,
)
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from outrider.gateway.answering.text.tool_prompt import write_calls

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parse(
    text: str, form: ToolFormat, cuts: list[int] | None = None, *, only_calls: bool = False
) -> tuple[str, list[list[str]]]:
    """The content, and (name, arguments) of each call; the text is cut at these positions."""
    parser = ToolParser(ToolReading(format=form, only_calls=only_calls))
    bounds = [0, *sorted(cuts or []), len(text)]
    pieces = []
    for begin, end in pairwise(bounds):
        pieces += parser.push(text[begin:end])
        assert parser.num_decided <= end
        assert all(piece.end <= end for piece in pieces)
    pieces += parser.flush()
    assert parser.num_decided == len(text)
    assert [piece.end for piece in pieces] == sorted(piece.end for piece in pieces)
    assert all(piece.text for piece in pieces)
    content, calls = "", []
    for piece in pieces:
        match piece.kind:
            case "content":
                content += piece.text
                assert text[: piece.end].endswith(piece.text)
            case "call":
                calls.append([piece.text, ""])
            case "arguments":
                calls[-1][1] += piece.text
    assert parser.num_calls == len(calls)
    return content, calls


def written(form: ToolFormat, calls: list[tuple[str, Any]], before: str = "") -> str:
    """As a model writes it that keeps to the format."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return before + write_calls(named, form)


LISTS = [
    *(form for form in FORMATS.values() if form.has_parallel_calls and not form.xml),
    replace(MISTRAL, lead=" ["),
    find_dialect("{{ tools }} [TOOL_CALLS] [CALL_ID] [ARGS]", {}).format,
    find_dialect("{{ tools }} <｜tool▁calls▁begin｜> ```json", {}).format,  # noqa: RUF001 - its spelling
    find_dialect('{{ tools }} <|tool|> <|tool_call|>{"name"', {}).format,
]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", '"', "}", "</tool_call>", "é\\"]), VALUES)
NAMES = st.from_regex("[a-zA-Z0-9_-]{1,64}", fullmatch=True)
CUTS = st.lists(st.integers(0, 400), max_size=30)


@given(
    form=st.sampled_from(LISTS),
    before=st.text("ab <[\n{", max_size=10),
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3),
    cuts=CUTS,
)
def test_calls_come_back(
    form: ToolFormat, before: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    text = written(form, calls, before)
    content, found = parse(text, form, [cut for cut in cuts if cut <= len(text)])
    assert content == before.rstrip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(name=NAMES, arguments=ARGUMENTS, cuts=CUTS)
def test_a_call_as_the_whole_answer(name: str, arguments: Any, cuts: list[int]) -> None:
    text = written(LLAMA3, [(name, arguments)])
    content, found = parse(text, LLAMA3, [cut for cut in cuts if cut <= len(text)])
    assert content == ""
    assert [(found[0][0], json.loads(found[0][1]))] == [(name, arguments)]


FRAGMENTS = st.sampled_from(
    [
        CALL,
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "[TOOL_CALLS]",
        '{"name":',
        ' "f",',
        '"arguments":',
        '"parameters": ',
        "{}",
        '"}',
        "[",
        ",",
        "]",
        " \n",
        "text",
    ]
)


@given(
    form=st.sampled_from(list(FORMATS.values())),
    only_calls=st.booleans(),
    fragments=st.lists(FRAGMENTS, max_size=10),
    cuts=CUTS,
)
def test_any_text_is_read_the_same_however_it_is_cut(
    form: ToolFormat, only_calls: bool, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    whole = parse(text, form, only_calls=only_calls)
    assert parse(text, form, list(range(len(text))), only_calls=only_calls) == whole
    some = [cut for cut in cuts if cut <= len(text)]
    assert parse(text, form, some, only_calls=only_calls) == whole
    if not (whole[1] or only_calls or any(form.trigger in text for form in FORMATS.values())):
        assert whole[0] == text


@pytest.mark.parametrize(
    ("text", "form", "content", "calls"),
    [
        ("Just words. <tool", HERMES, "Just words. <tool", []),
        ("  \n", HERMES, "  \n", []),
        (f"One:\n\n{CALL}\n", HERMES, "One:", [["f", '{"a": 1}']]),
        (f"One:\n{CALL}\n{CALL} two", HERMES, "One: two", [["f", '{"a": 1}']] * 2),
        ("<tool_call>\n", HERMES, "", []),  # broke off before the name was whole
        ('<tool_call>\n{"name": "f", "argu', HERMES, "", []),
        ('<tool_call>{"name":"f","arguments":{"a": [1,', HERMES, "", [["f", '{"a": [1,']]),
        ("<tool_call> is a tag", HERMES, "<tool_call> is a tag", []),
        ('<tool_call>{"name": "f g"', HERMES, '<tool_call>{"name": "f g"', []),
        ('[TOOL_CALLS][{"name": "f", "arguments": 5}] .', MISTRAL, " .", [["f", "5"]]),
        ('{"name": "Ada", "age": 36}', LLAMA3, '{"name": "Ada", "age": 36}', []),
        ('See {"name": "f", "parameters": {}}', LLAMA3, 'See {"name": "f", "parameters": {}}', []),
        ('{"na', LLAMA3, '{"na', []),
        ('{"name":', LLAMA3, "", []),
    ],
)
def test_text_and_calls(text: str, form: ToolFormat, content: str, calls: list[Any]) -> None:
    assert parse(text, form) == (content, calls)


def test_arguments_are_not_held_back() -> None:
    parser = ToolParser(ToolReading(format=HERMES))
    (name,) = parser.push('<tool_call>\n{"name": "get", "arguments": ')
    assert (name.kind, name.text) == ("call", "get")
    assert [piece.text for piece in parser.push('{"ci')] == ['{"ci']
    assert [piece.text for piece in parser.push('ty": "')] == ['ty": "']
    assert [piece.text for piece in parser.push('Oslo"}')] == ['Oslo"}']
    assert parser.push("}\n</tool_call>") == []


def test_content_is_not_held_back() -> None:
    parser = ToolParser(ToolReading(format=HERMES))
    assert [piece.text for piece in parser.push("a < b")] == ["a < b"]
    assert [piece.text for piece in parser.push(" <to")] == []
    assert [piece.text for piece in parser.push("morrow")] == [" <tomorrow"]


@pytest.mark.parametrize("text", ["<tool", '<tool_call>\n{"name": "f'])
def test_where_calls_are_wanted_nothing_else_is_content(text: str) -> None:
    assert parse(text, HERMES, only_calls=True) == ("", [])
