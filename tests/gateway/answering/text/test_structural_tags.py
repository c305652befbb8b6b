"""Structural tags: what the grammars of both notations allow, and what is refused by name."""

import json
from typing import Any

import pytest

from outrider.engine.grammar.grammar import TokenGrammar
from outrider.gateway.answering.text.structured import plan_structured
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.parsing import parse
from tests.engine.grammar.compiling import compiled
from tests.engine.grammar.test_schema_texts import allows

INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD = {"begin": "<function=add>", "schema": INTEGER, "end": "</function>"}
SAY = {"begin": "<function=say>", "schema": {"type": "string"}, "end": "</function>"}


def grammar_of(**fields: Any) -> TokenGrammar:
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "structural_tag", **fields},
    }
    found = plan_structured(parse(ChatRequest, json.dumps(body).encode()))
    assert found is not None
    return compiled(found.grammar())


def tag(begin: str, content: Any, end: str = "") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


SCHEMA = {"type": "json_schema", "json_schema": INTEGER}
WORD = {"type": "regex", "pattern": "[a-z]+"}
ANY: dict[str, Any] = {"type": "any_text"}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [tag("<f=a>", SCHEMA, "</f>"), tag("<f=b>", WORD, "</f>")],
}

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "free text and what its triggers begin": (
        {"structures": [ADD, SAY], "triggers": ["<function="]},
        [
            "",
            "no call, but 1 < 2",
            'First <function=add>{"n": 1}</function> then <function=say>"x"</function>.',
            '<function=add>{"n":1}</function>',
        ],
        ["<function=", "<function=mul>", '<function=add>"x"', '<function=add>{"n":1}</'],
    ),
    "a trigger for each": (
        {"structures": [ADD, SAY], "triggers": ["<function=add>", "<function=say>"]},
        ['<function=mul><function=say>"x"</function>', "<function="],
        ["<function=add>", '<function=say>{"n":1}</function>'],
    ),
    "triggered tags": (
        {"format": CALLS},
        ["hi", 'hi <f=a>{"n":1}</f> and <f=b>word</f>'],
        ["<f=c>", "<f=b>1", "<f=a>x"],
    ),
    "at least one tag": (
        {"format": {**CALLS, "at_least_one": True}},
        ["<f=b>x</f>", "<f=b>x</f> text <f=b>y</f>"],
        ["", "text", "text <f=b>x</f>"],
    ),
    "one tag": (
        {"format": {**CALLS, "stop_after_first": True}},
        ["text", "text <f=b>x</f>"],
        ["<f=b>x</f> text"],
    ),
    "exactly one tag": (
        {"format": {**CALLS, "stop_after_first": True, "at_least_one": True}},
        ["<f=b>x</f>"],
        ["text", "<f=b>x</f> text"],
    ),
    "a sequence": (
        {"format": {"type": "sequence", "elements": [const("a"), WORD, const("!")]}},
        ["abc!"],
        ["a!", "abc", "bb!"],
    ),
    "thinking in front of calls": (
        {
            "format": {
                "type": "sequence",
                "elements": [tag("<think>", ANY, "</think>"), CALLS],
            }
        },
        ["<think>hm</think>text", "<think><f=c></think><f=b>x</f>"],
        ["text", "<think>hm", "<think>hm</think><f=c>"],
    ),
    "free text up to a tag": (
        {"format": {"type": "sequence", "elements": [ANY, tag("<<", SCHEMA, ">>")]}},
        ['so: <<{"n":1}>>', '<<{"n":1}>>'],
        ["so", 'so <<{"n":1}>>!', "so <<1>>"],
    ),
    "tags in front of a text": (
        {"format": {"type": "sequence", "elements": [CALLS, const("END"), WORD]}},
        ["text ENDx", "<f=b>y</f>ENDx"],
        ["text", "END1"],
    ),
    "one of several": (
        {"format": {"type": "or", "elements": [SCHEMA, tag("(", WORD, ")")]}},
        ['{"n":1}', "(a)"],
        ["(a", "[a]", "text"],
    ),
    "tags with a separator": (
        {
            "format": {
                "type": "tags_with_separator",
                "tags": [tag("(", WORD, ")"), tag("[", SCHEMA, "]")],
                "separator": ", ",
            }
        },
        ["", "(a)", '(a), [{"n":1}], (b)'],
        ["(a)(b)", "(a), "],
    ),
    "repeated": (
        {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "optional", "content": const("-")},
                    {"type": "plus", "content": tag("(", WORD, ")")},
                    {"type": "star", "content": const("!")},
                ],
            }
        },
        ["(a)", "-(a)(b)!!"],
        ["-", "!", "--(a)"],
    ),
    "a grammar": (
        {"format": tag("<", {"type": "grammar", "grammar": 'root ::= "a" "b"'}, ">")},
        ["<ab>"],
        ["ab", "<a>"],
    ),
    "text alone": ({"format": ANY}, ["", "anything <f"], []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_structural_tag_allows(name: str) -> None:
    fields, allowed, refused = CASES[name]
    grammar = grammar_of(**fields)
    for text in allowed:
        assert allows(grammar, text), text
    for text in refused:
        assert not allows(grammar, text), text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "response_format"),
        ({"structures": [ADD]}, "response_format"),
        ({"structures": [ADD], "triggers": ["<"], "format": ANY}, "response_format"),
        ({"structures": [{"schema": {}}], "triggers": ["<"]}, "response_format.structures.0.begin"),
        (
            {"structures": [ADD, SAY], "triggers": ["<function=s"]},
            "response_format.structures.0.begin",
        ),
        ({"structures": [ADD], "triggers": [""]}, "response_format.triggers.0"),
        ({"format": {"type": "magic"}}, "response_format.format.type"),
        ({"format": {}}, "response_format.format.type"),
        (
            {"format": {"type": "qwen_xml_parameter", "json_schema": {}}},
            "response_format.format.type",
        ),
        ({"format": {**SCHEMA, "style": "qwen_xml"}}, "response_format.format.style"),
        ({"format": {"type": "json_schema"}}, "response_format.format.json_schema"),
        ({"format": tag("<", {"type": "x"}, ">")}, "response_format.format.content.type"),
        ({"format": {**ANY, "excludes": ["x"]}}, "response_format.format.excludes"),
        ({"format": {**CALLS, "excludes": ["x"]}}, "response_format.format.excludes"),
        ({"format": {**CALLS, "triggers": ["<g"]}}, "response_format.format.tags.0.begin"),
        ({"format": {**CALLS, "triggers": [5]}}, "response_format.format.triggers.0"),
        ({"format": {**CALLS, "tags": []}}, "response_format.format.tags"),
        ({"format": {**CALLS, "tags": [5]}}, "response_format.format.tags.0.begin"),
        (
            {"format": {"type": "sequence", "elements": [ANY, WORD]}},
            "response_format.format.elements.0",
        ),
        ({"format": {"type": "or", "elements": [ANY, WORD]}}, "response_format.format"),
        ({"format": {"type": "star", "content": ANY}}, "response_format.format"),
        (
            {"format": {**CALLS, "tags": [tag("<f", ANY)]}},
            "response_format.format.tags.0.end",
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "grammar", "grammar": 'root ::= "a"'}] * 2,
                }
            },
            "response_format.format.elements.1",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        grammar_of(**fields)
    assert caught.value.param == param


def test_schemas_in_tags_are_lenient_and_named() -> None:
    schema = {"type": "string", "not": {"const": "a"}}
    legacy = grammar_of(structures=[ADD, {**SAY, "schema": schema}], triggers=["<function="])
    assert legacy.left_out == ("response_format.structures.1.schema#/not",)
    newer = grammar_of(format=tag("<", {"type": "json_schema", "json_schema": schema}, ">"))
    assert newer.left_out == ("response_format.format.content.json_schema#/not",)


def test_nesting_is_bounded() -> None:
    form: dict[str, Any] = WORD
    for _ in range(40):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(BadRequestError, match="levels deep"):
        grammar_of(format=form)
