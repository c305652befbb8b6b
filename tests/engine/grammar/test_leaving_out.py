"""Schemas that are not strict: what is left out, under which name, and what still holds."""

import json
from typing import Any

import pytest

from outrider.engine.grammar.llguidance_backend import LLGuidanceCompiler
from outrider.engine.grammar.process import CompileBounds
from outrider.engine.request import GrammarSpec
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from tests.engine.grammar.compiling import compiled
from tests.engine.grammar.test_schema_texts import allows
from tests.engines import shipped_tokenizer
from tests.grammars import shipped_token_bytes


def lenient(schema: Any) -> GrammarSpec:
    part = {"type": "json_schema", "json_schema": schema, "lenient": True, "place": "p"}
    return GrammarSpec(kind="parts", text=json.dumps(part))


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


WORD = {"type": "string", "pattern": "^(?!x)[a-z]+$"}
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
# A schema, what is left out of it, a text that it allows and one that it does not.
CASES: tuple[tuple[Any, set[str], str, str], ...] = (
    (an_object(a=WORD), {"/properties/a/pattern"}, '{"a":"X"}', '{"a":1}'),
    (an_object(a={**WORD, "pattern": r"(a)\1"}), {"/properties/a/pattern"}, '{"a":"b"}', "[]"),
    (an_object(a={**WORD, "pattern": "("}), {"/properties/a/pattern"}, '{"a":"b"}', '{"a":1}'),
    ({**NAMED, "propertyNames": {"pattern": "^a"}}, {"/propertyNames"}, '{"a":1}', '{"a":"b"}'),
    (
        {**NAMED, "patternProperties": {"(?=y)": {}, "^z$": {"type": "null"}}},
        {"/patternProperties/(?=y)"},
        '{"y":1,"z":null}',
        '{"z":1}',
    ),
    (
        {**an_object(a={"type": "integer", "minimum": 5, "maximum": 3}), "required": ["a"]},
        {"/properties/a/maximum"},
        '{"a":7}',
        '{"a":4}',
    ),
    (an_object(a={"$ref": "http://x/y"}), {"/properties/a/$ref"}, '{"a":[]}', "[]"),
    (an_object(a={"$ref": "#/properties/a"}), {"/properties/a/$ref"}, '{"a":[]}', "[]"),
    (
        {**an_object(a={"$ref": "#/$defs/w"}), "$defs": {"w": WORD}},
        {"/$defs/w/pattern"},
        '{"a":"X"}',
        '{"a":1}',
    ),
    (
        an_object(a={"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
        {"/properties/a/oneOf"},
        '{"a":"x"}',
        '{"a":1}',
    ),
    (an_object(**{"a/b~": {"type": "banana"}}), {"/properties/a~1b~0/type"}, '{"a/b~":1}', "[]"),
    ({"type": "object", "properties": []}, {"/properties"}, '{"a":1}', "[]"),
    ({**NAMED, "minProperties": 2}, {"/minProperties"}, '{"a":1}', '{"a":"x"}'),
    (
        {**NAMED, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"/if", "/then"},
        '{"a":1}',
        '{"a":"x"}',
    ),
    (
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"/additionalProperties"},
        '{"a":1}',
        "{}",
    ),
    (an_object(a={"const": 2**60}, b={"type": "null"}), {"/properties/a/const"}, '{"a":1}', "[]"),
    (an_object(a={"enum": list(range(9000))}), {"/properties/a/enum"}, '{"a":"x"}', "[]"),
    ("no schema", {""}, "1", "x"),
    # All of these are enforced.
    ({**NAMED, "anyOf": [{"required": ["a"]}]}, set(), '{"a":1}', "{}"),
    ({"type": "object", "$ref": "#/$defs/n", "$defs": {"n": NAMED}}, set(), '{"a":1}', '{"a":"x"}'),
    ({"type": "string", "oneOf": [{"const": "a"}, {"const": 1}]}, set(), '"a"', "1"),
    ({"type": "integer", "allOf": [{"minimum": 2}, {"maximum": 4}]}, set(), "3", "5"),
)


@pytest.mark.parametrize(("schema", "left_out", "allowed", "refused"), CASES)
def test_what_is_left_out_is_little_and_named(
    schema: Any, left_out: set[str], allowed: str, refused: str
) -> None:
    grammar = compiled(lenient(schema))
    assert set(grammar.left_out) == {f"p#{pointer}" for pointer in left_out}
    assert allows(grammar, allowed)
    assert not allows(grammar, refused)
    rest = AnswerSchema(content=json.dumps(schema), place="p").enforced(grammar.left_out)
    assert rest.verdict(allowed, ()) == "conforms"


def test_each_part_says_what_it_lacks_and_what_was_left_out_before() -> None:
    parts = [
        {"type": "note", "left_out": ["q#/x"]},
        *(
            {"type": "json_schema", "json_schema": schema, "lenient": True, "place": place}
            for place, schema in (("a", an_object(x=WORD)), ("b", {"not": {}}))
        ),
    ]
    spec = GrammarSpec(kind="parts", text=json.dumps({"type": "sequence", "elements": parts}))
    assert compiled(spec).left_out == ("q#/x", "a#/properties/x/pattern", "b#/not")


@pytest.mark.slow
def test_a_schema_whose_trial_ends_the_process_keeps_its_type() -> None:
    compiler = LLGuidanceCompiler(
        shipped_token_bytes(),
        vocab_size=len(shipped_token_bytes()),
        stop_token_ids=[shipped_tokenizer().eos_token_id],
        bounds=CompileBounds(compile_cpu_s=0.05),
    )
    many = {f"p{number}": {"type": "integer"} for number in range(1000)}
    try:
        grammar = compiler.compile(lenient(an_object(**many))).result(60)
    finally:
        compiler.close()
    assert grammar.left_out == ("p#",)
    assert allows(grammar, '{"p1":"x"}')
    assert not allows(grammar, "[]")
