"""`response_format` and `structured_outputs`: fields, the grammars they mean, real answers."""

import json
from collections.abc import Iterator

import httpx
import pytest

from outrider.engine.request import MAX_GRAMMAR_BYTES, MAX_PARTS_BYTES
from outrider.gateway.answering.reading.gateway_limits import GatewayLimits
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.answering.text.reasoning_formats import Thinking
from outrider.gateway.answering.text.structured import StructuredPlan, plan_structured
from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.parsing import parse
from outrider.gateway.contract.schema.structured import MAX_REGEX_CHARS
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.wiring.application import build_app
from tests.engines import PAIR_FOLDER, make_engine, shipped_pair
from tests.gateway.conftest import parts_over, running, wait_for
from tests.grammars import shipped_compiler, shipped_token_bytes

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "größer"]},
        "when": {"type": "string", "pattern": r"^\d{4}-\d{2}(-\d{2})?$"},
    },
    "required": ["city", "size", "when"],
    "additionalProperties": False,
}


def chat(**fields: object) -> ChatRequest:
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(ChatRequest, json.dumps(body).encode())


def plan(**fields: object) -> StructuredPlan | None:
    request = chat(**fields)
    return plan_structured(request)


def json_schema(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


# ---- the fields -----------------------------------------------------------------------------


def test_a_schema_as_text_that_is_too_long_is_not_parsed() -> None:
    """Issue 15, second round: for a model that thinks it was, 8 MB of it on the event loop."""
    asked = plan(structured_outputs={"json": "[" * (MAX_GRAMMAR_BYTES + 1)})
    assert asked is not None
    states: tuple[Thinking, ...] = ("none", "open")
    for thinking in states:
        with pytest.raises(BadRequestError, match="over the limit"):
            asked.grammar(thinking)


def test_free_text_has_no_grammar() -> None:
    assert plan() is None
    assert plan(response_format=None, structured_outputs=None) is None
    assert plan(response_format={"type": "text"}) is None
    assert plan(response_format={"type": "text"}, structured_outputs={"regex": "a"}) is not None


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
        ({"response_format": json_schema({"a": "é"}, strict=True)}, "json_schema", '{"a":"é"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "json", ""),
        ({"structured_outputs": {"regex": "[a-z]+"}}, "regex", "[a-z]+"),
        ({"structured_outputs": {"choice": ["a", "ß"]}}, "choice", '["a","ß"]'),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "grammar", 'root ::= "x"'),
        ({"structured_outputs": {"json": {"type": "null"}}}, "json_schema", '{"type":"null"}'),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json_schema", '{"type": "null"}'),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type":"null"}'),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"guided_grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"ebnf": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
        ({"json_schema": {"type": "null"}}, "json_schema", '{"type":"null"}'),
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"grammar": 'root ::= "x"'}, "grammar", 'root ::= "x"'),
    ],
)
def test_each_form_means_a_grammar(fields: dict[str, object], kind: str, text: str) -> None:
    found = plan(**fields)
    assert found is not None
    spec = found.grammar()
    assert (spec.kind, spec.text) == (kind, text)
    assert found.param in fields


@pytest.mark.parametrize(
    ("response_format", "place"),
    [
        (json_schema({"type": "null"}), "response_format.json_schema.schema"),
        (json_schema({"type": "null"}, strict=False), "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
            "response_format.json_schema.schema",
        ),
        ({"type": "json_schema", "schema": {"type": "null"}}, "response_format.schema"),
        ({"type": "json_object", "schema": {"type": "null"}}, "response_format.schema"),
    ],
)
def test_a_schema_that_is_not_strict_is_lenient_wherever_it_stands(
    response_format: dict[str, object], place: str
) -> None:
    found = plan(response_format=response_format)
    assert found is not None
    spec = found.grammar()
    assert spec.kind == "parts"
    assert json.loads(spec.text) == {
        "type": "json_schema",
        "json_schema": {"type": "null"},
        "lenient": True,
        "place": place,
    }


def test_a_long_schema_loses_its_notes_first_and_then_all_but_its_type() -> None:
    long = "x" * MAX_PARTS_BYTES
    for schema, kept in (
        ({"type": "string", "title": long, "maxLength": 3}, {"type": "string", "maxLength": 3}),
        ({"type": "string", "enum": [long]}, {"type": "string"}),
        ({"properties": {"title": {"const": long}}}, {}),
    ):
        found = plan(response_format=json_schema(schema))
        assert found is not None
        part = json.loads(found.grammar().text)
        assert part["json_schema"] == kept
        assert part.get("left_out", []) == [f"{part['place']}#"] * ("maxLength" not in kept)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"json_schema": []}, "json_schema"),
        (
            {"response_format": json_schema([])},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice.0"),
        ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        plan(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}, "grammar"),
    ],
)
def test_two_fields_that_differ_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError, match="give one of the two") as caught:
        plan(**fields)
    assert caught.value.param == param


def test_two_fields_that_say_the_same_are_one() -> None:
    found = plan(guided_regex="a", structured_outputs={"regex": "a"}, regex="a")
    assert found is not None
    assert (found.kind, found.text) == ("regex", "a")


def test_two_grammars_and_large_ones_are_refused() -> None:
    with pytest.raises(BadRequestError, match="give one of the two"):
        plan(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    for name, limit in (("regex", MAX_REGEX_CHARS), ("grammar", MAX_GRAMMAR_BYTES)):
        assert plan(structured_outputs={name: "a" * limit}) is not None
        with pytest.raises(BadRequestError, match=str(limit)) as caught:
            plan(structured_outputs={name: "a" * (limit + 1)})
        assert caught.value.param == f"structured_outputs.{name}"
    too_large = plan(structured_outputs={"json": "a" * (MAX_GRAMMAR_BYTES + 1)})
    assert too_large is not None
    with pytest.raises(BadRequestError, match="over the limit") as caught:
        too_large.grammar()
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"structured_outputs": {"choice": ["a"]}}, "choice"),
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"response_format": json_schema({}, strict=True)}, "json_schema"),
        ({"guided_choice": ["a"]}, "choice"),
    ],
)
def test_completions_take_them_too(fields: dict[str, object], kind: str) -> None:
    body = {"model": "auto", "prompt": "x", **fields}
    request = parse(CompletionRequest, json.dumps(body).encode())
    found = plan_structured(request)
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize(
    ("fields", "answer", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "1"),
        ({"response_format": json_schema(SCHEMA)}, '{"city":"Ulm","size":"größer",', '{"size"'),
        ({"structured_outputs": {"regex": "x+"}}, "xx", "y"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "no", "ny"),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "x", "y"),
    ],
)
def test_thinking_comes_before_the_grammar(
    fields: dict[str, object], answer: str, wrong: str
) -> None:
    found = plan(**fields)
    assert found is not None
    token = {text: index for index, text in enumerate(shipped_token_bytes()) if len(text) == 1}

    def accepts(text: str, thinking: Thinking) -> bool:
        spec = found.grammar(thinking)
        matcher = shipped_compiler().compile(spec).result(20).matcher()
        return all(matcher.accept(token[bytes([byte])]) for byte in text.encode())

    thought = 'hm, {"a" <think </thin'
    for thinking, before in (
        ("none", ""),
        ("open", f"{thought}</think>\n\n"),
        ("open", "</think>"),
        ("possible", ""),
        ("possible", f"<think>\n{thought}</think>\n"),
    ):
        assert accepts(before + answer, thinking), (thinking, before)
        assert not accepts(before + wrong, thinking), (thinking, before)
    assert not accepts("<think>", "none")


# ---- real answers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway on the bundled pair, with speculation and grammars."""
    compilers = {"large": shipped_compiler(), "small": shipped_compiler()}
    engine = InProcessEngineClient(lambda _: make_engine(shipped_pair(), grammars=compilers))
    tokenizer = ChatTokenizer.load(PAIR_FOLDER / "large")
    limits = GatewayLimits(default_max_tokens=160, max_body_bytes=2**20)
    with running(build_app(parts_over(engine, tokenizer, limits=limits))) as url:
        wait_for(lambda: engine.is_ready, 180)
        yield url


def ask(url: str, **fields: object) -> httpx.Response:
    body = {
        "model": "large",
        "messages": [{"role": "user", "content": "Tell me about Rome."}],
        "temperature": 0,
        **fields,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    return choice["message"]["content"]


def streamed(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks)
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


@pytest.mark.slow
def test_a_schema_gives_json_whole_and_streamed(url: str) -> None:
    fields = {"response_format": json_schema(SCHEMA, strict=True)}
    answer = content(ask(url, **fields))
    found = json.loads(answer)
    assert list(found) == ["city", "size", "when"]
    assert found["size"] in {"small", "größer"}
    assert streamed(ask(url, stream=True, **fields)) == answer
    assert content(ask(url, outrider={"speculation": "off"}, **fields)) == answer


@pytest.mark.slow
def test_several_choices_conform_each(url: str) -> None:
    response = ask(
        url, n=3, temperature=1.2, seed=5, response_format=json_schema(SCHEMA), model="small"
    )
    assert response.status_code == 200
    texts = [choice["message"]["content"] for choice in response.json()["choices"]]
    assert len(set(texts)) == 3
    for text in texts:
        assert set(json.loads(text)) == {"city", "size", "when"}


@pytest.mark.slow
def test_regex_choice_and_grammar(url: str) -> None:
    assert content(ask(url, structured_outputs={"choice": ["Paris", "Oslo"]})) in {"Paris", "Oslo"}
    assert content(ask(url, structured_outputs={"regex": "[A-F]{3}[0-9]"}))[:3].isupper()
    grammar = 'root ::= "<" [a-z]{1,9} ">"'
    assert content(ask(url, structured_outputs={"grammar": grammar})).startswith("<")
    body = {"model": "large", "prompt": "x", "structured_outputs": {"choice": ["(ja)"]}}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.json()["choices"][0]["text"] == "(ja)"


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"response_format": json_schema({"type": "banana"}, strict=True)},
            "response_format",
            "Invalid type: banana",
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a" b'}},
            "structured_outputs",
            "Rule 'b' not found",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        (
            {"structured_outputs": {"json": '{"items":' * 5000 + "{}" + "}" * 5000}},
            "structured_outputs",
            "nested",
        ),
        (
            {"response_format": json_schema({"enum": ["a" * MAX_GRAMMAR_BYTES]}, strict=True)},
            "response_format",
            "over the limit",
        ),
    ],
)
def test_an_invalid_grammar_is_a_400_before_any_byte(
    url: str, stream: bool, fields: dict[str, object], param: str, reason: str
) -> None:
    response = ask(url, stream=stream, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert reason in error["message"]
    assert ask(url, max_tokens=1).status_code == 200  # the engine lives


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_left_out_of_a_schema_is_named_and_the_rest_holds(url: str, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 5, "pattern": "^(?!x)[a-z]+$"}},
        "required": ["a"],
        "not": {"required": ["b"]},
    }
    response = ask(url, stream=stream, response_format=json_schema(schema))
    named = "response_format.json_schema.schema"
    assert response.headers["x-outrider-ignored-fields"] == (
        f"{named}.not, {named}.properties.a.pattern"
    )
    answer = streamed(response) if stream else content(response)
    (text,) = json.loads(answer).values()
    assert len(text) <= 5
    body = {"model": "small", "prompt": "x", "response_format": {"type": "json_object"}}
    response = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 40}, timeout=60)
    assert response.json()["choices"][0]["text"].lstrip().startswith("{")
    assert "x-outrider-ignored-fields" not in response.headers


def test_a_body_nested_without_end_is_a_400(url: str) -> None:
    nested = '{"items":' * 10_000 + "{}" + "}" * 10_000
    body = (
        '{"model":"large","messages":[{"role":"user","content":"x"}],"response_format":'
        '{"type":"json_schema","json_schema":{"name":"n","schema":' + nested + "}}}"
    )
    response = httpx.post(
        f"{url}/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert response.status_code == 400, response.text
