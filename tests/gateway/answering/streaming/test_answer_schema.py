"""An answer that ends by itself is checked against its schema before it is called done."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import jsonschema_rs
import pytest

from benchmarks.chaos.fuzzed_schemas import random_schema
from outrider.gateway.answering.text.answer_schema import AnswerSchema
from outrider.gateway.answering.text.chat import ChatTokenizer
from tests.engine.grammar.test_fuzz import hostile_schema
from tests.gateway.conftest import Server, scripted_server
from tests.grammars import is_refused
from tests.sizes import repeats

SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string", "maxLength": 200}},
    "required": ["label"],
    "additionalProperties": False,
}
RIGHT, WRONG = '{"label": "abc"}', '{"label": "abc", "evil": "z"}'
TOOL = {"type": "function", "function": {"name": "tag", "parameters": SCHEMA}}
STRUCTURED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
}


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "tag", "arguments": {arguments}}}\n</tool_call>'


def ask(http: httpx.Client, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "hi"}]}
    prompt = prompt if path == "chat/completions" else {"prompt": "hi"}
    return http.post(f"/v1/{path}", json={"model": "large", **prompt, **fields})


def counted(http: httpx.Client) -> dict[str, float]:
    lines = http.get("/metrics").text.splitlines()
    name = "outrider_structured_answers_total"
    return {line.split('"')[1]: float(line.split()[1]) for line in lines if line.startswith(name)}


@pytest.fixture(scope="module")
def running_server(
    tokenizer: ChatTokenizer, encode: Callable[[str], list[int]]
) -> Iterator[Server]:
    """As the others' server, with room for tools."""
    with scripted_server(tokenizer, encode, max_context=4096) as server:
        yield server


@pytest.fixture
def new(http: httpx.Client) -> Iterator[dict[str, float]]:
    """What was counted in this test, once it has ended."""
    before, new = counted(http), dict[str, float]()
    yield new
    after = {name: count - before.get(name, 0) for name, count in counted(http).items()}
    assert {name: count for name, count in after.items() if count} == new


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (STRUCTURED, RIGHT, WRONG),
        (STRUCTURED, RIGHT, '{"label": "a\nb"}'),
        ({"response_format": {"type": "json_object"}}, WRONG, '{"n": }'),
        ({"tools": [TOOL]}, call(RIGHT), call(WRONG)),
        ({"tools": [TOOL], "tool_choice": "required"}, call(RIGHT), call(RIGHT) + call(WRONG)),
    ],
)
def test_an_answer_that_does_not_conform_is_an_error(
    server: Server,
    http: httpx.Client,
    new: dict[str, float],
    fields: dict[str, Any],
    right: str,
    wrong: str,
) -> None:
    new |= {"conforms": 2, "differs": 2}
    server.says(right)
    assert ask(http, **fields).status_code == 200
    assert "error" not in ask(http, **fields, stream=True).text
    server.says(wrong)
    whole = ask(http, **fields)
    assert whole.status_code == 500
    assert whole.json()["error"]["code"] == "schema_mismatch"
    assert "does not conform to the schema" in whole.json()["error"]["message"]
    streamed = ask(http, **fields, stream=True).text
    assert '"code":"schema_mismatch"' in streamed
    assert '"finish_reason":"' not in streamed


def test_completions_are_checked_too(server: Server, http: httpx.Client) -> None:
    server.says(WRONG)
    answer = ask(http, "completions", structured_outputs={"json": SCHEMA})
    assert answer.json()["error"]["code"] == "schema_mismatch"


@pytest.mark.parametrize(
    "fields",
    [
        {**STRUCTURED, "stop": ["evil"]},  # the client's own cut
        {"tools": [TOOL]},  # free text
        {"structured_outputs": {"regex": ".*"}},  # no JSON
    ],
)
def test_what_need_not_conform_is_left_alone(
    server: Server, http: httpx.Client, fields: dict[str, Any]
) -> None:
    server.says(WRONG)
    assert ask(http, **fields).status_code == 200


def test_an_answer_cut_at_its_length_is_no_error(server: Server, http: httpx.Client) -> None:
    server.says('{"label": "a', finish_reason="length")
    answer = ask(http, **STRUCTURED)
    assert answer.json()["choices"][0]["finish_reason"] == "length"


# ---- the check itself ---------------------------------------------------------------------------


def verdict(schema: Any, value: Any) -> str:
    return AnswerSchema(content=json.dumps(schema)).verdict(json.dumps(value), [])


def test_a_long_check_is_given_up() -> None:
    """Each level tries two branches, and each of them the whole rest."""
    levels: dict[str, Any] = {"l0": {"type": "null"}}
    for level in range(1, 60):
        below = {"$ref": f"#/$defs/l{level - 1}"}
        branch = {"type": "object", "properties": {"x": below, "y": False}}
        levels[f"l{level}"] = {"anyOf": [branch, {"type": "object", "properties": {"x": below}}]}
    value: Any = None
    for _ in range(59):
        value = {"x": value, "y": 1}
    assert verdict({"$ref": "#/$defs/l59", "$defs": levels}, value) == "conforms"
    wide = {"items": {"anyOf": [{"enum": [*range(500)]}, {"type": "null"}]}}
    assert verdict(wide, [None] * 10) == "conforms"
    assert verdict(wide, [499] * 100) == "unchecked"
    assert verdict({"items": {"$ref": "#/items"}}, [1]) == "unchecked"
    for text in ("[" * 100_000, "1" * 10_000):
        assert AnswerSchema(content="{}").verdict(text, []) == "unchecked"


def test_no_schema_holds_the_loop() -> None:
    """Names listed 8,000 times, which a grammar may have, took seconds; 60 calls took 8 s."""
    listed = (
        ({"type": ["string"] * 8000 + ["integer"]}, 1000),
        ({"type": "object", "required": ["a"] * 8000}, {"a": 1}),
    )
    start_s = time.process_time()
    for schema, value in listed:
        assert verdict({"items": schema}, [value] * 2) != "differs"
        many = [value + index if isinstance(value, int) else value for index in range(2000)]
        assert verdict({"items": schema}, many) == "unchecked"
    wide = {"type": "object", "anyOf": [{"required": ["b"]} for _ in range(4000)] + [True]}
    tools = AnswerSchema(arguments={"f": wide})
    assert tools.verdict("", [("f", "{}")]) == "conforms"
    assert tools.verdict("", [("f", "{}")] * 60) == "unchecked"
    assert time.process_time() - start_s < 1.5


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one part of it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {key: item for key, item in value.items() if key != name}
        return value | {name: mutated(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], mutated(value[place], rng), *value[place + 1 :]]
    return rng.choice([None, 0, 2.5, -7, "", "漢字" * 9, [], {}, [1, "x"], {"a": 1}, "name"])


def sample(schema: Any, document: Any) -> Any:  # noqa: C901 - one case a kind
    """A value that nearly conforms."""
    if isinstance(schema, bool):
        return 1
    if "$ref" in schema:
        return sample(document["$defs"]["leaf"], document)
    for name in ("enum", "anyOf", "oneOf"):
        if name in schema:
            first = schema[name][0]
            return first if name == "enum" else sample(first, document)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "null")
    kind = kind if isinstance(kind, str) else kind[0]
    match kind:
        case "object":
            described = schema.get("properties", {})
            value = {name: sample(item, document) for name, item in described.items()}
            return dict.fromkeys(schema.get("required", ()), 1) | value
        case "array":
            first = [sample(item, document) for item in schema.get("prefixItems", ())]
            rest = schema.get("items", True)
            while len(first) < schema.get("minItems", 0):
                first.append(sample(rest, document))
            return first
        case "integer" | "number":
            return schema.get("maximum", 1)
        case "boolean":
            return True
        case "string":
            return "a" * schema.get("minLength", 1)
        case _:
            return None


def test_the_check_agrees_with_another_library() -> None:
    """Wherever patterns and formats, which it leaves to the grammar, do not decide."""
    rng = random.Random(3)
    seen = {True: 0, False: 0}
    for _ in range(repeats(600, 200)):
        schema = random_schema(rng)
        value = sample(schema, schema)
        for _ in range(rng.randrange(3)):
            value = mutated(value, rng)
        text = json.dumps(schema)
        if '"pattern"' in text or '"format"' in text:
            continue
        right = jsonschema_rs.validator_for(schema).is_valid(value)
        seen[right] += 1
        assert verdict(schema, value) == ("conforms" if right else "differs"), (schema, value)
    assert min(seen.values()) > 20


@pytest.mark.slow
def test_the_check_ends_for_every_schema_that_compiles() -> None:
    """`items: null` passed the compiler, and its check answered 500."""
    rng = random.Random(4)
    num_checked = 0
    for _ in range(repeats(20_000, 2000)):
        schema = hostile_schema(rng)
        with suppress(RecursionError):
            if is_refused(schema):
                continue
            for value in ("name", 3, None, [], [1, "x"], {"name": 1, "x": [2]}):
                AnswerSchema(content=json.dumps(schema)).verdict(json.dumps(value), ())
                num_checked += 1
    assert num_checked > 500


@pytest.mark.parametrize("name", ["items", "unevaluatedItems", "unevaluatedProperties"])
@pytest.mark.parametrize("value", [None, 3, "x"])
def test_what_is_no_schema_is_refused(name: str, value: Any) -> None:
    for beside in ({}, {"items": True}, {"additionalProperties": {"type": "null"}}):
        assert is_refused({**beside, name: value})
