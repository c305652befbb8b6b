"""Hole 6: readers of answers on hostile output. What is read again with each piece stays short."""

from itertools import groupby
from operator import itemgetter

import pytest

from outrider.gateway.answering.text.reasoning_formats import THINK
from outrider.gateway.answering.text.thinking import ThinkingSplitter
from outrider.gateway.answering.text.tool_formats import FORMATS
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from outrider.gateway.contract.schema.kinds import ToolFormatName
from tests.sizes import repeats

MAX_HELD_CHARS = 512
HERMES_HEAD = '<tool_call>\n{"name": "f", "arguments": {}}'
QWEN_HEAD = "<tool_call>\n<function=f>\n"
NUM_CHARS = repeats(20_000, 4_000)
SPACE = " " * NUM_CHARS
HOSTILE = {
    "openings": "<tool_call>" * (NUM_CHARS // 7),
    "openings with names": '<tool_call>\n{"name": "' * (NUM_CHARS // 13),
    "space": f"{SPACE}x",
    "space in a head": f"<tool_call>{SPACE}x",
    "space behind a call": f"{HERMES_HEAD}{SPACE}x",
    "calls without ends": HERMES_HEAD * (NUM_CHARS // 40),
    "a long name": '<tool_call>\n{"name": "' + "a" * NUM_CHARS,
    "llama space": f'{{"name":{SPACE}x',
    "mistral openings": "[TOOL_CALLS] " * (NUM_CHARS // 13),
    "xml value without an end": f"{QWEN_HEAD}<parameter=a>\n" + "x\n" * (NUM_CHARS // 2),
    "xml value of beginnings of ends": f"{QWEN_HEAD}<parameter=a>" + "\n</param" * (NUM_CHARS // 8),
    "xml key without an end": f"{QWEN_HEAD}<parameter=" + "a" * NUM_CHARS,
    "xml keys that repeat": QWEN_HEAD + "<parameter=a>1</parameter>" * (NUM_CHARS // 26),
    "xml space": f"{QWEN_HEAD}{SPACE}<parameter=a>{SPACE}",
    "glm keys": "<tool_call>f\n" + "<arg_key>a</arg_key>" * (NUM_CHARS // 20),
    "glm values": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>"
    + "<arg_value>" * (NUM_CHARS // 11),
    "granite calls": "<|tool_call|>[" + '{"name": "f", "arguments": {}}, ' * (NUM_CHARS // 32),
    "mistral 11 openings": "[TOOL_CALLS]f[ARGS]" * (NUM_CHARS // 19),
    "mistral space": '[TOOL_CALLS] [{"name": "f", "arguments": {}}' + f"{SPACE}x",
}


def read(form: ToolFormatName, text: str, step: int, *, only_calls: bool = False) -> list[str]:
    """Content, calls and arguments, each run as one text behind its kind."""
    parser = ToolParser(ToolReading(format=FORMATS[form], only_calls=only_calls))
    runs: list[tuple[str, str]] = []
    for start in range(0, len(text), step):
        runs += [(piece.kind, piece.text) for piece in parser.push(text[start : start + step])]
        assert len(parser._held) <= MAX_HELD_CHARS
    runs += [(piece.kind, piece.text) for piece in parser.flush()]
    joined: list[str] = []
    for kind, run in groupby(runs, key=itemgetter(0)):
        joined.append(f"{kind}:" + "".join(part for _, part in run))
    return joined


@pytest.mark.slow_cases
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_little_of_a_hostile_answer_is_read_again(form: ToolFormatName, text: str) -> None:
    in_tokens = read(form, text, 7)
    assert in_tokens == read(form, text, len(text)), "cuts do not matter"
    read(form, text, 7, only_calls=True)


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_spaces", range(220, 300, 7))
def test_where_a_head_is_too_long_does_not_depend_on_the_cuts(num_spaces: int) -> None:
    text = "<tool_call>" + " " * num_spaces + '{"name": "f", "arguments": {}}' + " " * num_spaces
    text += "</tool_call>."
    for form in FORMATS:
        whole = read(form, text, len(text))
        assert all(read(form, text, step) == whole for step in (1, 5, 255, 256, 257))


@pytest.mark.parametrize("name", ["openings", "openings with names", "space", "space in a head"])
def test_content_that_is_no_call_is_kept_to_the_character(name: str) -> None:
    text = HOSTILE[name] + "."  # of a head that breaks off at the end, nothing is shown
    assert read("hermes", text, 7) == [f"content:{text}"]


def test_space_in_front_of_an_answer_is_not_read_again() -> None:
    for end, expected in (("x", "content"), (f"{THINK.open}x", "reasoning")):
        splitter = ThinkingSplitter()
        pieces = []
        for char in " " * 5000 + end:
            pieces += splitter.push(char)
            assert len(splitter._held) <= len(THINK.open)
        pieces += splitter.flush()
        assert {kind for kind, _ in pieces} == {expected}
        text = "".join(part for _, part in pieces)
        assert text == (" " * 5000 + "x" if expected == "content" else "x")


def test_an_answer_of_space_alone_is_kept() -> None:
    splitter = ThinkingSplitter()
    for _ in range(10):
        assert not splitter.push(" ")
    assert splitter.flush() == [("content", " " * 10)]
    assert read("hermes", " " * 10, 3) == [f"content:{' ' * 10}"]
