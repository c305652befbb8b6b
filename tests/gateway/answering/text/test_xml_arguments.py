"""Arguments between tags: typed by the schema, given as growing JSON, however the text is cut."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.answering.text.reasoning_formats import PLAIN
from outrider.gateway.answering.text.tool_formats import (
    GLM45,
    QWEN3_CODER,
    ToolDialect,
    ToolFormat,
    find_dialect,
)
from outrider.gateway.answering.text.tool_parser import ToolParser, ToolReading
from outrider.gateway.answering.text.tool_prompt import write_calls
from outrider.gateway.answering.text.xml_values import value_form, value_forms
from outrider.gateway.contract.errors.tree import BadRequestError
from tests.gateway.answering.text.tool_cases import compiled, plan, verdict

GLM47 = find_dialect("{{ tools }}<tool_call><arg_key>k</arg_key><arg_value>", {}).format
FORMS = [QWEN3_CODER, GLM45, GLM47]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
    },
}
TEXTS = st.text(max_size=12).filter(lambda text: "</" not in text)
# A text that reads like null is null where the schema allows both: nothing tells them apart.
MAYBE = TEXTS.filter(lambda text: text.strip() not in ("null", "None")) | st.none()
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS | st.sampled_from(["\n", "\n\n", "5", "null", '"', "</param", "<arg_key>"]),
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "list": st.lists(JSON_VALUES, max_size=3),
        "object": st.dictionaries(TEXTS, JSON_VALUES, max_size=3),
        "maybe": MAYBE,
        "other": st.integers() | st.sampled_from(["Oslo", "a\nb"]),
    },
)
CUTS = st.lists(st.integers(0, 600), max_size=30)


def parse(
    text: str, form: ToolFormat, cuts: list[int] | None = None, parameters: Any = PARAMETERS
) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and name and arguments of each call of a text cut at these places."""
    forms = {"f": value_forms(parameters)}
    parser = ToolParser(ToolReading(format=form, value_forms=forms))
    bounds = [0, *sorted(cut for cut in cuts or [] if cut <= len(text)), len(text)]
    pieces = []
    for begin, end in pairwise(bounds):
        pieces += parser.push(text[begin:end])
        assert 0 <= parser.num_decided <= end
        assert all(piece.end <= end for piece in pieces)
    pieces += parser.flush()
    assert parser.num_decided == len(text)
    assert [piece.end for piece in pieces] == sorted(piece.end for piece in pieces)
    content, calls = "", []
    for piece in pieces:
        assert piece.text
        match piece.kind:
            case "content":
                content += piece.text
            case "call":
                calls.append((piece.text, ""))
            case "arguments":
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, calls


@given(form=st.sampled_from(FORMS), calls=st.lists(ARGUMENTS, min_size=1, max_size=2), cuts=CUTS)
def test_values_come_back_with_their_types(
    form: ToolFormat, calls: list[dict[str, Any]], cuts: list[int]
) -> None:
    text = "Well. " + write_calls([{"name": "f", "arguments": call} for call in calls], form)
    content, found = parse(text, form, cuts)
    assert content == "Well."
    assert [(name, json.loads(arguments)) for name, arguments in found] == [
        ("f", call) for call in calls
    ]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<function=", "f", "\n"),
    *("<parameter=", "text", "count>", ">", "</parameter>", "</par", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "5", '"', "{", "\\", "<", " ", "é", "other"),
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n",
    "<tool_call>f\n<arg_key>count</arg_key>\n<arg_value>5</arg_value>\n",
]


@given(
    form=st.sampled_from(FORMS),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=CUTS,
)
def test_any_text_is_read_the_same_however_it_is_cut(
    form: ToolFormat, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    whole = parse(text, form)
    assert parse(text, form, list(range(len(text)))) == whole
    assert parse(text, form, cuts) == whole
    assert form.xml is not None
    closed = f"{text}{form.xml.key_end}{form.xml.value_end}\n."
    for _, arguments in parse(closed, form)[1]:
        assert isinstance(json.loads(arguments or "{}"), dict), "malformed calls end as valid JSON"


def qwen(*arguments: tuple[str, str]) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, " two\nlines ", " two\nlines "),
        ({"type": "string", "maxLength": 3}, "12", "12"),
        ({"enum": ["a", "5"]}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nil", "nil"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"5"', "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"type": "string", "pattern": "^[0-9]+$"}, '"5"', "5"),
        ({"type": "object"}, '{"a": [1, "</b>"]}', {"a": [1, "</b>"]}),
        ({"$ref": "#/$defs/d"}, "5", 5),
        ({"$ref": "#/$defs/nowhere"}, "5", 5),
        ({}, "5", 5),
        ({}, "plain", "plain"),
        (True, "[1]", [1]),
    ],
)
def test_the_schema_tells_a_value_from_a_text(schema: Any, written: str, value: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"d": {"type": "integer"}}}
    ((_, arguments),) = parse(qwen(("x", written)), QWEN3_CODER, parameters=parameters)[1]
    assert json.loads(arguments) == {"x": value}


def test_branches_that_refer_to_themselves_are_looked_at_once() -> None:
    loop = {"anyOf": [{"$ref": "#/properties/x"}, {"$ref": "#/properties/x"}]}
    assert value_form(loop, {"properties": {"x": loop}}).mode == "json"
    assert value_form({"$ref": "#/properties/x"}, {"properties": {"x": {"$ref": "#/properties/x"}}})


def test_strings_are_given_as_they_are_written_and_other_values_when_they_are_complete() -> None:
    parser = ToolParser(ToolReading(format=QWEN3_CODER, value_forms={"f": value_forms(PARAMETERS)}))

    def push(text: str) -> str:
        return "".join(piece.text for piece in parser.push(text) if piece.kind == "arguments")

    assert push("<tool_call>\n<function=f>\n<parameter=text>") == '{"text": "'
    assert push("\nOs") == "Os"
    assert push('lo "x"\n') == 'lo \\"x\\"'
    assert push("</param") == ""
    assert push("eter>\n<parameter=count>\n4") == "\\n</param"[:0] + '", "count": '
    assert push("2") == ""
    assert push("\n</parameter>\n") == "42"
    assert push("</function>\n</tool_call>") == "}"


def test_of_arguments_with_one_name_the_first_counts() -> None:
    text = qwen(("text", "a"), ("count", "1"), ("text", "b"), ("count", "2"))
    assert parse(text, QWEN3_CODER) == ("", [("f", '{"text": "a", "count": 1}')])


# ---- grammars -----------------------------------------------------------------------------


def tool(**parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", **parameters}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


QWEN_DIALECT = ToolDialect(format=QWEN3_CODER, is_native=True, special_ids={})


@pytest.mark.parametrize(
    ("schema", "whole", "refused"),
    [
        ({"type": "string"}, ["", "5", "a\nb", "</param", "\n"], ["a\n</parameter>\nb"]),
        ({"type": "string", "maxLength": 3}, ["", "a\nb"], ["abcd"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ({"enum": ["red", "blue"]}, ["red"], ["green", '"red"', ""]),
        ({"type": "integer", "minimum": 3}, ["5"], ["2", '"5"', "5.0", ""]),
        ({"type": ["string", "null"]}, ["null", "x"], []),
        ({"type": "string", "pattern": "^[a-z]+$"}, ['"abc"'], ["abc", '"5"']),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["5", '"x"'], ["x"]),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, ["[1]"], ['["x"]', "1"]),
        ({}, ["5", "x"], []),
    ],
)
def test_a_value_is_held_to_its_schema(schema: Any, whole: list[str], refused: list[str]) -> None:
    asked = tool(properties={"x": schema}, required=["x"], **{"$defs": {"n": {"type": "integer"}}})
    grammar = compiled(QWEN_DIALECT, tools=[asked], tool_choice="required")
    for value in whole:
        assert verdict(grammar, qwen(("x", value))) == "whole", value
    for value in refused:
        assert verdict(grammar, qwen(("x", value))) == "refused", value


def test_arguments_come_in_order_and_once() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}}
    grammar = compiled(QWEN_DIALECT, tools=[tool(properties=properties, required=["a"])])
    assert verdict(grammar, qwen(("a", "x"))) == "whole"
    assert verdict(grammar, qwen(("a", "x"), ("b", "1"))) == "whole"
    for pairs in ([("b", "1")], [("b", "1"), ("a", "x")], [("a", "x")] * 2, [("c", "x")]):
        assert verdict(grammar, qwen(*pairs)) == "refused", pairs


def test_arguments_that_are_not_described_are_allowed_where_none_are_or_the_schema_says() -> None:
    anything = compiled(QWEN_DIALECT, tools=[tool()])
    assert verdict(anything, qwen(("any", "x"), ("more", "5"))) == "whole"
    typed = compiled(
        QWEN_DIALECT,
        tools=[tool(properties={"a": {}}, additionalProperties={"type": "integer"})],
    )
    assert verdict(typed, qwen(("a", "x"), ("b", "5"))) == "whole"
    assert verdict(typed, qwen(("a", "x"), ("b", "x"))) == "refused"


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{"required": ["a"]}]},
        {"minProperties": 1},
        {"properties": []},
        {"required": "a"},
        {"properties": {"a": 5}},
        {"properties": {"a": False}, "required": ["a"]},
        {"additionalProperties": "x"},
        {
            "properties": {f"a{i}": {"$ref": "#/$defs/d"} for i in range(2000)},
            "$defs": {"d": {"type": "integer", "title": "x" * 20_000}},
        },
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_schemas_of_several_arguments_at_once_are_refused_where_they_are_strict(
    parameters: dict[str, Any],
) -> None:
    asked = tool(**parameters)
    strict = {**asked, "function": {**asked["function"], "strict": True}}
    with pytest.raises(BadRequestError) as caught:
        plan(tools=[strict]).grammar(QWEN_DIALECT, PLAIN, "none")
    assert caught.value.param == "tools"
    assert len(str(caught.value)) < 300
    grammar = compiled(QWEN_DIALECT, tools=[asked], tool_choice="required")
    assert all(name.startswith("tools.0.function.parameters") for name in grammar.left_out)
    assert grammar.left_out


def test_what_is_left_out_of_several_arguments_is_named() -> None:
    asked = tool(
        properties={"a": {"type": "integer", "not": {"const": 1}}},
        required=["a", "b"],
        additionalProperties=False,
        anyOf=[{"required": ["a"]}],
    )
    grammar = compiled(QWEN_DIALECT, tools=[asked], tool_choice="required")
    assert set(grammar.left_out) == {
        "tools.0.function.parameters#/anyOf",
        "tools.0.function.parameters#/additionalProperties",
        "tools.0.function.parameters.properties.a#/not",
    }
    assert verdict(grammar, qwen(("a", "1"), ("b", "x"))) == "whole"
    assert verdict(grammar, qwen(("a", "x"), ("b", "x"))) == "refused"
