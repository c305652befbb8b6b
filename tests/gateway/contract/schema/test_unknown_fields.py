"""Unknown fields are left out at any depth and named; what may be an option of ours is refused."""

import json
from typing import Any

import pytest

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.unknown_fields import read_known, read_tolerant
from outrider.gateway.http.apis.messages.schema import MessagesRequest
from outrider.gateway.http.apis.responses.request import ResponsesRequest

MESSAGE: dict[str, Any] = {"role": "user", "content": "Hi"}
CHAT: dict[str, Any] = {"model": "auto", "messages": [MESSAGE]}


def test_unknown_fields_at_any_depth() -> None:
    part = {"type": "text", "text": "Hi", "odd": 1, "none": None}
    document = {
        **CHAT,
        "odd": {"a": 1},
        "messages": [{**MESSAGE, "content": [part], "new": [2]}],
        "stream_options": {"include_usage": True, "more": 1},
    }
    request, unknown = read_tolerant(ChatRequest, json.dumps(document).encode())
    plain = {**CHAT, "messages": [{**MESSAGE, "content": [{"type": "text", "text": "Hi"}]}]}
    plain["stream_options"] = {"include_usage": True}
    assert request == ChatRequest.model_validate(plain)
    paths = {"odd", "messages.0.new", "messages.0.content.0.odd", "stream_options.more"}
    assert set(unknown) == paths
    assert len(unknown) == len(paths)


@pytest.mark.parametrize(
    "fields",
    [
        {"outrider": {"privcy": "private"}},
        {"outrider": {"slo": {"ttft": 3}}},
        {"privacy": "private"},
        {"metadata_": 1, "Privacy": "private"},
        {"max_cost_usd": 0.1},
        {"outrider_options": {}},
        {"messages": [{**MESSAGE, "privacy": "private"}]},
        {"messages": [{**MESSAGE, "content": [{"type": "text", "text": "", "maxCostUsd": 1}]}]},
    ],
)
def test_what_may_be_an_option_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        read_tolerant(ChatRequest, json.dumps({**CHAT, **fields}).encode())


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatRequest, {"temperature": 9}, "temperature"),
        (ChatRequest, {"messages": []}, "messages"),
        (ChatRequest, {"audio": {"voice": "x"}}, "audio"),
        (ResponsesRequest, {"input": "Hi", "background": True}, "background"),
        (MessagesRequest, {"max_tokens": -1}, "max_tokens"),
    ],
)
def test_other_faults_are_named_as_ever(model: Any, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "auto", "messages": [MESSAGE], "odd": 1, **fields}).encode()
    with pytest.raises(BadRequestError) as refused:
        read_tolerant(model, body)
    assert refused.value.param == param


def test_fields_that_do_nothing_alone_are_named() -> None:
    idle = {**CHAT, "top_logprobs": 3, "stream_options": {"include_usage": True}}
    for ignores_unknown in (False, True):
        _, ignored = read_known(ChatRequest, None, json.dumps(idle).encode(), ignores_unknown)
        assert ignored == ("stream_options", "top_logprobs")
        used = {**idle, "stream": True, "logprobs": True}
        assert read_known(ChatRequest, used, b"", ignores_unknown)[1] == ()
    off = {**CHAT, "top_logprobs": 0, "stream_options": {"include_usage": False}}
    assert read_known(ChatRequest, off, b"", False)[1] == ()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{**MESSAGE, "content": []}]}, "messages.0.content: List should have at le"),
        ({"stop": ["x"] * 17}, "stop: List should have at most 16 items"),
        ({"stop": "x" * 257}, "stop: String should have at most 256 characters"),
        ({"stop": 3}, "stop: Input should be a valid string"),
    ],
)
def test_a_refusal_speaks_of_the_value_that_was_sent(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        read_known(ChatRequest, None, json.dumps({**CHAT, **fields}).encode(), False)
    assert str(refused.value).startswith(words)


def test_an_empty_input_is_told_as_one() -> None:
    with pytest.raises(BadRequestError, match="input: List should have at least 1 item"):
        read_tolerant(ResponsesRequest, b'{"model": "auto", "input": []}')
