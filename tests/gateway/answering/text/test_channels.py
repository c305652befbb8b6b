"""The harmony format of gpt-oss: messages in channels become reasoning, content and calls."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from outrider.gateway.answering.text.channels import ChannelSplitter
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.reasoning_formats import HARMONY as HARMONY_REASONING
from outrider.gateway.answering.text.reasoning_formats import ReasoningDialect, Thinking
from outrider.gateway.answering.text.structured import StructuredPlan
from outrider.gateway.answering.text.tool_formats import HARMONY, HERMES, ToolDialect, find_dialect
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from tests.gateway.answering.text.tool_cases import (
    HELLO,
    compiled,
    grammar_of,
    request,
    verdict,
)

TEMPLATE = """{% for tool in tools %}{{ tool.function.name }}{% endfor %}\
{% for m in messages %}{{ '<|start|>' + m.role }}{% if m.thinking %}{{ '<|channel|>analysis' }}\
{{ '<|message|>' + m.thinking }}{% endif %}{% for c in m.tool_calls or [] %}{{ ' to=functions.' }}\
{{ c.function.name + '<|channel|>commentary json<|message|>' + c.function.arguments | tojson }}\
{{ "<|call|>" }}{% endfor %}{% if m.content %}{{ "<|message|>" + m.content }}{% endif %}\
{{ "<|end|>" }}\
{% endfor %}{{ '<|start|>assistant' }}"""
ANALYSIS = "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Hello!<|return|>"
CALL = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>"
WEATHER = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
SPECIAL = {"<|channel|>": 0, "<|message|>": 1, "<|constrain|>": 3, "<|start|>": 4, "<|end|>": 5}


def read(text: str, cuts: list[int], *, opens: bool = False) -> tuple[str, str, list[list[str]]]:
    """Return reasoning, content and calls of a text that is cut at these places."""
    splitter, parser = (
        ChannelSplitter(opens_thinking=opens),
        ToolParser(ToolReading(format=HARMONY)),
    )
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [piece for a, b in pairwise(bounds) for piece in splitter.push(text[a:b])]
    pieces += splitter.flush()
    parsed = [
        part for kind, piece in pieces if kind == "content" for part in parser.push(piece)
    ] + parser.flush()
    content, calls = "", []
    for part in parsed:
        match part.kind:
            case "content":
                content += part.text
            case "call":
                calls.append([part.text, ""])
            case "arguments":
                calls[-1][1] += part.text
    return "".join(piece for kind, piece in pieces if kind == "reasoning"), content, calls


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (ANALYSIS + FINAL, "The user greets.", "Hello!", []),
        (FINAL, "", "Hello!", []),
        (FINAL.removesuffix("<|return|>"), "", "Hello!", []),
        (ANALYSIS + CALL, "The user greets.", "", [["clock", "{}"]]),
        (
            ANALYSIS + PREAMBLE + WEATHER,
            "The user greets.",
            "I look it up.",
            [["get_weather", '{"city": "Oslo"}']],
        ),
        (ANALYSIS + ANALYSIS + FINAL, "The user greets.\nThe user greets.", "Hello!", []),
        (PREAMBLE + FINAL, "", "I look it up.\nHello!", []),
        (
            f"{CALL}<|start|>assistant{WEATHER}",
            "",
            "",
            [["clock", "{}"], ["get_weather", '{"city": "Oslo"}']],
        ),
        # The template writes earlier calls like this, and so do some answers.
        (
            " to=functions.clock<|channel|>commentary json<|message|>{}<|call|>",
            "",
            "",
            [["clock", "{}"]],
        ),
        ("<|channel|>analysis to=functions.clock<|message|>{}", "", "", [["clock", "{}"]]),
        # What keeps to no rule is text, without the marks.
        ("Just words.", "", "Just words.", []),
        ("<|channel|>commentary to=functions.clock<|message|>five", "", "five", []),
        ("<|channel|>commentary to=browser.open<|message|>{}", "", "{}", []),
        ("<|channel|>commentary to=functions.a.b<|message|>{}", "", "{}", []),
        ("<|channel|>final<|message|>a<|channel|>final<|message|>b", "", "a\nb", []),
        ("<|channel|>final", "", "", []),
        ("<|channel|>analysis<|message|>Hm <|", "Hm <|", "", []),
        ("", "", "", []),
    ],
)
def test_messages_become_reasoning_content_and_calls(
    text: str, reasoning: str, content: str, calls: list[list[str]]
) -> None:
    assert read(text, []) == (reasoning, content, calls)
    assert read(text, list(range(len(text)))) == (reasoning, content, calls)


def test_a_prompt_may_end_inside_a_thought() -> None:
    text = ANALYSIS.partition("<|message|>")[2] + FINAL
    assert read(text, [], opens=True) == ("The user greets.", "Hello!", [])


PARTS = [
    *SPECIAL,
    *("<|call|>", "<|return|>", "assistant", "analysis", "commentary", "final", " to=functions."),
    *("clock", "{}", '{"a": "<|end|>"}', "x", " ", "<|", "json", "user", CALL, FINAL, ANALYSIS),
]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=30),
    opens=st.booleans(),
)
def test_any_text_is_read_the_same_however_it_is_cut(
    parts: list[str], cuts: list[int], opens: bool
) -> None:
    text = "".join(parts)
    whole = read(text, [], opens=opens)
    assert read(text, list(range(len(text))), opens=opens) == whole
    assert read(text, cuts, opens=opens) == whole


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>" * 4000,
        "<|channel|>final" * 4000,
        "<|start|>assistant" * 4000,
        "<|channel|>final<|message|>" * 2000,
        "<|channel|>commentary to=functions." + "a" * 20_000,
        "<|channel|>commentary to=functions.f<|message|>" + " " * 20_000 + "{",
        "<|channel|>final<|message|>" + "<|en" * 5000,
        "<|end|>" * 5000,
        " " * 20_000,
    ],
)
def test_little_of_a_hostile_answer_is_held(text: str) -> None:
    splitter = ChannelSplitter()
    for start in range(0, len(text), 7):
        splitter.push(text[start : start + 7])
        assert len(splitter._held) <= 512


# ---- grammars -----------------------------------------------------------------------------

TOOLS = ToolDialect(format=HARMONY, is_native=True, special_ids=SPECIAL)
REASONING = ReasoningDialect(format=HARMONY_REASONING, is_known=True, special_ids=SPECIAL)
ONLY_CALL, ONLY_WEATHER = CALL.removesuffix("<|call|>"), WEATHER.removesuffix("<|call|>")
ANSWER = FINAL.removesuffix("<|return|>")
"""Without the stop tokens, which stand in no grammar."""


def test_the_grammar_of_calls_in_channels() -> None:
    auto = compiled(TOOLS, "possible", REASONING)
    for text in (ANSWER, ANALYSIS + ANSWER, ANALYSIS + PREAMBLE + ONLY_WEATHER, ONLY_CALL):
        assert verdict(auto, text, SPECIAL) == "whole", text
    for text in (
        ONLY_CALL.replace("clock", "other"),
        ONLY_WEATHER.replace('"Oslo"', "5"),
        f"{ONLY_CALL} and",
        "Hello",
    ):
        assert verdict(auto, text, SPECIAL) == "refused", text
    required = compiled(TOOLS, "possible", REASONING, tool_choice="required")
    assert verdict(required, ANALYSIS + ONLY_CALL, SPECIAL) == "whole"
    assert verdict(required, ANALYSIS + ANSWER, SPECIAL) == "refused"
    opened = compiled(TOOLS, "open", REASONING, tool_choice="required")
    assert verdict(opened, f"Hm.<|end|><|start|>assistant{ONLY_CALL}", SPECIAL) == "whole"


def test_calls_of_another_format_stand_in_the_final_message() -> None:
    hermes = ToolDialect(format=HERMES, is_native=False, special_ids={})
    grammar = compiled(hermes, "possible", REASONING, tool_choice="required")
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert verdict(grammar, f"{ANALYSIS}<|channel|>final<|message|>{call}", SPECIAL) == "whole"
    assert verdict(grammar, ANALYSIS + call, SPECIAL) == "refused"


@pytest.mark.parametrize("thinking", ["possible", "open"])
def test_a_structured_answer_is_the_final_message(thinking: Thinking) -> None:
    spec = StructuredPlan(kind="json_schema", text='{"type": "integer"}', param="x")
    grammar = grammar_of(spec.grammar(thinking, REASONING))
    begin = "" if thinking == "possible" else "Hm.<|end|><|start|>assistant"
    for before in ("", ANALYSIS):
        text = f"{begin}{before}<|channel|>final<|message|>5"
        assert verdict(grammar, text, SPECIAL) == "whole"
    text = f"{begin}<|channel|>final<|message|>five"
    assert verdict(grammar, text, SPECIAL) == "refused"


# ---- prompts ------------------------------------------------------------------------------


def test_the_format_cannot_be_set_for_a_template_without_channels() -> None:
    with pytest.raises(ValueError, match="needs a chat template with channels"):
        find_dialect("{{ tools }}", {}, "harmony")


def test_earlier_reasoning_is_shown_under_the_template_s_name(tokenizer_folder: Any) -> None:
    loaded = AutoTokenizer.from_pretrained(tokenizer_folder)
    loaded.chat_template = TEMPLATE
    loaded.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|return|>"]})
    tokenizer = ChatTokenizer(loaded)
    assert tokenizer.dialect.format is HARMONY
    ends = [loaded.convert_tokens_to_ids(mark) for mark in ("<|return|>", "<|call|>")]
    assert tokenizer.stop_token_ids[-2:] == tuple(ends)
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
    }
    said = {"role": "assistant", "reasoning_content": "Look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Rain"}

    def shown(**fields: Any) -> str:
        asked = request(messages=[HELLO, {**said, **fields}, result])
        prompt = asyncio.run(tokenizer.render_chat(asked.messages, None, asked.tools or ()))
        return str(loaded.decode(prompt.token_ids))

    text = shown(content=None)
    assert "<|channel|>analysis<|message|>Look." in text
    assert f"functions.get_weather<|channel|>commentary json<|message|>{json.dumps(CITY)}" in text
    assert "Look." not in shown(content="Well")


CITY = {"city": "Oslo"}
