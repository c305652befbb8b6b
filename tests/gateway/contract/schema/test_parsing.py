"""A body that is parsed already is judged like its text."""

import json

import msgspec
import pytest
from pydantic import BaseModel

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.parsing import parse, validate
from outrider.gateway.http.apis.responses.request import ResponsesRequest

VALUES = [
    "null",
    "true",
    "1",
    "1.0",
    "1.5",
    "-0.0",
    "1e308",
    "18446744073709551616",
    "1" + "0" * 400,
    '"1"',
    '"flex"',
    "[]",
    "[1, 2.0]",
    '["a", "b"]',
    "{}",
    '{"5": 1}',
    '{"5": 1.0, "x": 2}',
    '{"include_usage": true}',
    '{"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}',
    '[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]',
    '[{"role": "robot", "content": "hi"}]',
    '{"tier": "small", "sources": ["model"], "quality": {"cascade": 1}}',
    '[{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, null]}}}]',
]
REQUIRED: dict[type[BaseModel], dict[str, object]] = {
    ChatRequest: {"model": "auto", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "auto", "prompt": "hi"},
    ResponsesRequest: {"model": "auto", "input": "hi"},
}


def outcome(model: type[BaseModel], body: bytes, *, is_parsed: bool) -> object:
    try:
        if not is_parsed:
            return parse(model, body).model_dump()
        return validate(model, msgspec.json.decode(body), body).model_dump()
    except BadRequestError as error:
        return (str(error), error.param, error.code)


@pytest.mark.parametrize("model", REQUIRED, ids=lambda model: model.__name__)
def test_a_parsed_body_is_judged_like_its_text(model: type[BaseModel]) -> None:
    for name in model.model_fields:
        for value in VALUES:
            own = {key: json.dumps(one) for key, one in REQUIRED[model].items()} | {name: value}
            body = "{" + ", ".join(f'"{key}": {one}' for key, one in own.items()) + "}"
            seen = outcome(model, body.encode(), is_parsed=True)
            wanted = outcome(model, body.encode(), is_parsed=False)
            assert repr(seen) == repr(wanted), body
