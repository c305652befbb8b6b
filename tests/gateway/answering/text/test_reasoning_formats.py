"""Reasoning by model family: told from templates, split however it is cut, in front of grammars."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.answering.text.reasoning_formats import (
    COHERE,
    GEMMA,
    GRANITE,
    HARMONY,
    MISTRAL,
    PLAIN,
    RESPONSE,
    THINK,
    ReasoningDialect,
    ReasoningFormat,
    Thinking,
    find_reasoning,
    thinking_variables,
)
from outrider.gateway.answering.text.structured import StructuredPlan
from outrider.gateway.answering.text.thinking import make_splitter
from outrider.gateway.answering.text.tool_formats import COHERE as COHERE_TOOLS
from outrider.gateway.answering.text.tool_formats import HERMES, ToolDialect
from tests.gateway.answering.text.tool_cases import compiled, grammar_of, verdict

COHERE_IDS = {
    "<|START_THINKING|>": 0,
    "<|END_THINKING|>": 1,
    "<|START_RESPONSE|>": 3,
    "<|END_RESPONSE|>": 4,
}
ACTION = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "clock", "parameters": {}}\n]'


@pytest.mark.parametrize(
    ("template", "form", "is_known"),
    [
        ("{%- if enable_thinking is false %}<think>\n\n</think>{%- endif %}", THINK, True),
        ("{%- if thinking %}Here is my thought process: … Here is my response:", GRANITE, True),
        ("<think>…</think><response>…</response>", RESPONSE, True),
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>", COHERE, True),
        ("[THINK]your thoughts[/THINK]", MISTRAL, True),
        ("{{- '<|channel>thought\\n<channel|>' -}}", GEMMA, True),
        ("<|start|>assistant<|channel|>analysis<|message|>", HARMONY, True),
        ("{{ messages }}", THINK, False),
        (None, THINK, False),
    ],
)
def test_a_template_tells_how_its_model_reasons(
    template: Any, form: ReasoningFormat, is_known: bool
) -> None:
    dialect = find_reasoning(template, {"<|START_THINKING|>": 7, "<s>": 1})
    assert (dialect.format, dialect.is_known) == (form, is_known)
    assert dialect.special_texts == ({7: "<|START_THINKING|>"} if form == COHERE else {})


def split(
    text: str, form: ReasoningFormat, cuts: list[int], *, opens: bool = False
) -> tuple[str, str]:
    """Return thinking and content of a text that is cut at these places."""
    splitter = make_splitter(ReasoningDialect(format=form, special_ids={}), opens_thinking=opens)
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [piece for a, b in pairwise(bounds) for piece in splitter.push(text[a:b])]
    pieces += splitter.flush()
    assert all(text for _, text in pieces)
    thought = "".join(text for kind, text in pieces if kind == "reasoning")
    return thought, "".join(text for kind, text in pieces if kind == "content")


CASES = [
    (THINK, "<think>\nHm</think>\n\nYes", "Hm", "Yes"),
    (THINK, "Yes, <think> is a tag", "", "Yes, <think> is a tag"),
    (GRANITE, "Here is my thought process: Hm. Here is my response: Yes", "Hm. ", "Yes"),
    (GRANITE, "Here is my answer", "", "Here is my answer"),
    (RESPONSE, "<think>Hm</think><response>Yes</response>", "Hm", "Yes"),
    (RESPONSE, "<think>Hm</think>\nYes, </response> is a tag", "Hm", "Yes, </response> is a tag"),
    (RESPONSE, "<response>\nYes</resp", "", "Yes</resp"),
    (
        COHERE,
        "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>",
        "Hm",
        "Yes",
    ),
    (COHERE, "<|START_RESPONSE|>Yes<|END_RESPONSE|>", "", "Yes"),
    (COHERE, "Yes<|END_RESPONSE|>", "", "Yes"),
    (COHERE, f"<|START_THINKING|>Hm<|END_THINKING|>{ACTION}", "Hm", ACTION),
    (COHERE, "<|START_THINKING|>Hm", "Hm", ""),
    (GRANITE, "Here's my thought process: Hm. Here is my response: Yes", "Hm. ", "Yes"),
    (GRANITE, "Here is my thought process: Hm. Here's my response: Yes", "Hm. ", "Yes"),
    (MISTRAL, "[THINK]Hm[/THINK]Yes", "Hm", "Yes"),
    (GEMMA, "<|channel>thought\nHm<channel|>Yes", "Hm", "Yes"),
]


@pytest.mark.parametrize(("form", "text", "thought", "content"), CASES)
def test_thinking_and_answer_come_apart_wherever_the_text_is_cut(
    form: ReasoningFormat, text: str, thought: str, content: str
) -> None:
    assert split(text, form, []) == (thought, content)
    assert split(text, form, list(range(len(text)))) == (thought, content)
    if text.startswith(form.open):
        assert split(text.removeprefix(form.open), form, [], opens=True) == (thought, content)


FORMS = [THINK, GRANITE, RESPONSE, COHERE, MISTRAL, GEMMA, HARMONY]
MARKS = sorted({mark for form in FORMS for mark in form.marks.split("\n") if mark})
FRAGMENTS = st.sampled_from([*MARKS, "Here is my ", "<|", "<th", "</", " ", "\n", "x", "final"])


@given(
    form=st.sampled_from(FORMS),
    fragments=st.lists(FRAGMENTS, max_size=10),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    opens=st.booleans(),
)
def test_any_text_is_split_the_same_however_it_is_cut(
    form: ReasoningFormat, fragments: list[str], cuts: list[int], opens: bool
) -> None:
    text = "".join(fragments)
    whole = split(text, form, [], opens=opens)
    assert split(text, form, list(range(len(text))), opens=opens) == whole
    assert split(text, form, cuts, opens=opens) == whole


# ---- grammars -----------------------------------------------------------------------------

COHERE_DIALECT = ReasoningDialect(format=COHERE, is_known=True, special_ids=COHERE_IDS)


def verdict_of_choice(
    thinking: Thinking, dialect: ReasoningDialect, text: str, special: dict[str, int]
) -> str:
    """Check a text against the grammar of an answer that is yes or no."""
    spec = StructuredPlan(kind="choice", text='["yes", "no"]', param="x").grammar(thinking, dialect)
    return verdict(grammar_of(spec), text, special)


@pytest.mark.parametrize("form", [GRANITE, RESPONSE, MISTRAL, COHERE, GEMMA])
def test_a_structured_answer_comes_behind_the_familys_marks(form: ReasoningFormat) -> None:
    special = {COHERE: COHERE_IDS, GEMMA: {"<|channel>": 0, "<channel|>": 1}}.get(form, {})
    dialect = ReasoningDialect(format=form, is_known=True, special_ids=special)
    framed = f"{form.answer_open}yes{form.answer_close}"
    for answer in {"no", framed}:
        thought = f"{form.open}Hm, perhaps.{form.close}"
        for text in (answer, thought + answer, f"{thought}\n{answer}"):
            assert verdict_of_choice("possible", dialect, text, special) == "whole", text
        assert verdict_of_choice("open", dialect, f"Hm{form.close}{answer}", special) == "whole"
    assert verdict_of_choice("possible", dialect, "perhaps", special) == "refused"
    assert verdict_of_choice("open", dialect, f"Hm{form.close}perhaps", special) == "refused"


def test_calls_come_behind_cohere_s_thinking() -> None:
    special = {"<|START_ACTION|>": 5} | COHERE_IDS
    tools = ToolDialect(format=COHERE_TOOLS, is_native=True, special_ids={"<|START_ACTION|>": 5})
    auto = compiled(tools, "possible", COHERE_DIALECT)
    whole = f"{ACTION}<|END_ACTION|>"
    thought = "<|START_THINKING|>Hm<|END_THINKING|>"
    answer = "<|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    for text in (whole, thought + whole, thought + answer, answer, "Yes."):
        assert verdict(auto, text, special) == "whole", text
    assert verdict(auto, thought + whole.replace("clock", "other"), special) == "refused"
    required = compiled(tools, "possible", COHERE_DIALECT, tool_choice="required")
    assert verdict(required, thought + whole, special) == "whole"
    assert verdict(required, thought + answer, special) == "refused"


def test_a_free_answer_with_calls_may_hold_marks_that_are_text() -> None:
    dialect = ReasoningDialect(format=RESPONSE, is_known=True, special_ids={})
    tools = ToolDialect(format=HERMES, is_native=True, special_ids={})
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    auto = compiled(tools, "possible", dialect)
    for text in (f"<think>Hm</think><response>Yes</response>{call}", call, "<response>Yes"):
        assert verdict(auto, text) == "whole", text


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{% if thinking %}Here is my thought process:", {"thinking": False}),
        ("{% if reasoning %}<|START_THINKING|>", {"reasoning": False}),
        ("<|channel|>analysis {{ reasoning_effort }}", {"reasoning_effort": "low"}),
        ("{% if enable_thinking %}<think>", {}),
    ],
)
def test_the_switch_of_thinking_has_the_template_s_name(
    template: str, names: dict[str, Any]
) -> None:
    given = {"enable_thinking": False}
    found = thinking_variables(given, template, find_reasoning(template, {}))
    assert found.items() >= {**given, **names}.items()
    if not names:
        assert found == given
    assert thinking_variables({"a": 1}, template, PLAIN) == {"a": 1}
