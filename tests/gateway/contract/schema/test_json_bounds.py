"""Hole 6: what a body's JSON may hold, counted over its bytes before it is parsed."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.gateway.answering.reading import reading
from outrider.gateway.contract.errors.tree import BodyTooComplexError
from outrider.gateway.contract.schema.parsing import JsonBounds, check_json_bounds
from outrider.gateway.http.edge import bodies
from tests.gateway.conftest import Server

NAMES = ("values", "strings", "fields", "objects", "nesting")
HUGE = 10**9

texts = st.text(st.sampled_from('ab"\\{}[],:\n/é'), max_size=6)
documents = st.recursive(
    texts | st.integers(-9, 9) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> dict[str, int]:
    """Count what a parser finds; lists and objects have one value more than separators."""
    found = dict.fromkeys(NAMES, 0)
    found["strings"] = isinstance(value, str)
    children: list[Any] = []
    if isinstance(value, dict | list):
        children = list(value.values()) if isinstance(value, dict) else value
        found["objects"] = 1
        found["values"] = 1 + max(len(children) - 1, 0)
    if isinstance(value, dict):
        found["fields"] = found["strings"] = len(value)
    inner = [counted(child) for child in children]
    for name in NAMES[:-1]:
        found[name] += sum(child[name] for child in inner)
    found["nesting"] = found["objects"] and 1 + max((c["nesting"] for c in inner), default=0)
    return found


def refused(body: bytes, **bounds: int) -> str | None:
    """The setting that the refusal names; None where the body passes."""
    limits = {f"max_{name}": HUGE for name in NAMES} | bounds
    try:
        check_json_bounds(body, JsonBounds(**limits))
    except BodyTooComplexError as error:
        return str(error).partition("(limits.")[2].partition(")")[0]
    return None


@settings(max_examples=60, deadline=None)
@given(documents, st.booleans())
def test_the_pass_over_bytes_counts_as_a_parser_does(document: Any, is_ascii: bool) -> None:
    body = json.dumps(document, ensure_ascii=is_ascii).encode()
    for name, count in counted(document).items():
        assert refused(body, **{f"max_{name}": count}) is None
        if count:
            assert refused(body, **{f"max_{name}": count - 1}) == f"max_json_{name}"


@given(st.binary(max_size=60))
def test_bytes_that_are_no_json_pass_or_are_refused(body: bytes) -> None:
    check_json_bounds(body, JsonBounds())
    refused(body, **{f"max_{name}": 0 for name in NAMES})


def test_signs_in_texts_are_not_counted() -> None:
    body = json.dumps({"a": '[{,:\\"' * 100_000}).encode()
    check_json_bounds(body, JsonBounds())


MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SURFACES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/route",
    "/v1/feedback",
)


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", SURFACES)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    http: httpx.Client, path: str
) -> None:
    # A parser would complain of its end.
    body = b'{"model":"auto","x":[' + b",".join([b"{}"] * 10_001)
    headers = {"content-type": "application/json"}
    response = http.post(path, content=body, headers=headers)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "10003 objects and lists" in error["message"]
    assert "limits.max_json_objects" in error["message"]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("document", "bound"),
    [
        ({"messages": [MESSAGE] * 10_000}, "max_json_objects"),
        ({"messages": [{"role": "user", "content": [PART] * 10_000}]}, "max_json_objects"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 5_000}]}, "max_json_objects"),
        ({"prompt": [5] * 200_001}, "max_json_values"),
        ({"stop": ["x"] * 100_000}, "max_json_strings"),
        ({f"x{i}": 1 for i in range(25_001)}, "max_json_fields"),
        ({"x": json.loads("[" * 200 + "]" * 200)}, "max_json_nesting"),
    ],
)
def test_the_bounds_by_default(document: Any, bound: str) -> None:
    with pytest.raises(BodyTooComplexError, match=bound):
        check_json_bounds(json.dumps(document).encode(), JsonBounds())


@pytest.mark.parametrize(
    ("arguments", "num_calls", "bound"),
    [
        ('{"a":' * 900 + "1" + "}" * 900, 1, "max_json_nesting"),
        ('{"a":[' + "[]," * 6_000 + "1]}", 2, "max_json_objects"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_arguments_of_all_calls_together_keep_to_the_bounds_of_a_body(
    server: Server, http: httpx.Client, path: str, arguments: str, num_calls: int, bound: str
) -> None:
    """Issue 15: deep ones ended the connection without an answer, long ones held all requests."""
    answer = {"role": "assistant", "tool_calls": [function_call(arguments)] * num_calls}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    turns = {"messages": [MESSAGE, answer]} if "chat" in path else {"input": [item] * num_calls}
    response = http.post(path, json={"model": "auto", **turns})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "body_too_complex"
    assert f"limits.{bound}" in response.text


def function_call(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_other_requests_run_between_the_passes_over_a_long_body(
    monkeypatch: pytest.MonkeyPatch, server: Server, http: httpx.Client
) -> None:
    """Issue 15: eight megabytes of quotes held the event loop for 190 ms."""
    turns: list[int] = []
    num_turns = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            turns.append(num_turns)
            return function(*given)

        return call

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        if len(turns) < 4:
            asyncio.get_running_loop().call_soon(turn)

    def first(*given: Any) -> Any:
        turn()
        return may_exceed(*given)

    may_exceed = bodies.may_exceed
    monkeypatch.setattr(bodies, "may_exceed", counted(first))
    monkeypatch.setattr(bodies, "check_exactly", counted(bodies.check_exactly))
    monkeypatch.setattr(reading, "read_known", counted(reading.read_known))
    monkeypatch.setattr(reading, "refuse_doubled_names", counted(reading.refuse_doubled_names))
    monkeypatch.setattr("outrider.gateway.contract.schema.parsing._LONG_BYTES", 50_000)
    body = {"model": "auto", "messages": [{**MESSAGE, "content": "[" * 90_000}]}
    assert http.post("/v1/chat/completions", json=body).status_code == 400
    assert len(turns) == 4
    assert sorted(set(turns)) == turns, "two passes in one turn of the event loop"
