"""The envelope of every request, refused in the words of the full schema."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.contract.errors.validation import bad_request
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.envelope import Envelope, ReadRequest, read_request
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.parsing import RequestJson

CHAT = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "auto", "prompt": "Hi"}
REQUESTS: dict[Endpoint, tuple[type[BaseModel], dict[str, Any]]] = {
    "chat": (ChatRequest, CHAT),
    "completion": (CompletionRequest, COMPLETION),
}


def read(document: object, endpoint: Endpoint = "chat") -> ReadRequest:
    return read_request(RequestJson(json.dumps(document).encode()), endpoint)


def refusal(body: bytes, endpoint: Endpoint = "chat") -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read_request(RequestJson(body), endpoint)
    return caught.value


def full_refusal(body: bytes, endpoint: Endpoint) -> BadRequestError:
    """Return what the local models' own schema says."""
    with pytest.raises(ValidationError) as caught:
        REQUESTS[endpoint][0].model_validate_json(body)
    return bad_request(caught.value, body)


def test_the_envelope_reads_its_fields() -> None:
    document = {
        **CHAT,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": True},
        "n": 2.0,
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "temperature": 1,
        "seed": -3,
        "user": "u",
        "outrider": {"policy": "prefer_cloud", "deadline_ms": 500},
        "reasoning_effort": "high",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    }
    request = read(document)
    assert request.document == document
    envelope = request.envelope
    assert envelope.is_streamed
    assert envelope.wants_usage_chunk
    assert (envelope.num_choices, envelope.token_limit, envelope.seed) == (2, 7, -3)
    assert (envelope.options.policy, envelope.options.deadline_ms) == ("prefer_cloud", 500)
    outward = request.outward()
    assert "outrider" not in outward
    assert outward == {name: value for name, value in document.items() if name != "outrider"}
    assert "outrider" in request.document


@pytest.mark.parametrize("endpoint", REQUESTS)
def test_optional_fields_may_be_absent(endpoint: Endpoint) -> None:
    envelope = read(REQUESTS[endpoint][1], endpoint).envelope
    assert not envelope.is_streamed
    assert not envelope.wants_usage_chunk
    assert (envelope.num_choices, envelope.token_limit) == (1, None)
    assert envelope.options.policy is None
    for name in set(Envelope.model_fields) - {"model"}:
        assert read({**REQUESTS[endpoint][1], name: None}, endpoint).envelope == envelope


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1], [2]]])
def test_prompts(prompt: object) -> None:
    assert read({**COMPLETION, "prompt": prompt}, "completion").document["prompt"] == prompt


@pytest.mark.parametrize("endpoint", REQUESTS)
@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 5}, "temperature"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"user": 5}, "user"),
        ({"outrider": []}, "outrider"),
        ({"outrider": {"depth": 1}}, "outrider.depth"),
        ({"outrider": {"policy": "cheap"}}, "outrider.policy"),
        ({"outrider": {"privacy": "local"}}, "outrider.privacy"),
        ({"outrider": {"quality": {"cascade": 2}}}, "outrider.quality.cascade"),
    ],
)
def test_refused_in_the_same_words(endpoint: Endpoint, extra: dict[str, Any], param: str) -> None:
    body = json.dumps({**REQUESTS[endpoint][1], **extra}).encode()
    error = refusal(body, endpoint)
    assert error.param == param
    full = full_refusal(body, endpoint)
    assert (str(error), error.param, error.code) == (str(full), full.param, full.code)


@pytest.mark.parametrize(
    ("endpoint", "document"),
    [
        ("chat", {"model": "auto"}),
        ("chat", {**CHAT, "messages": []}),
        ("chat", {**CHAT, "messages": "Hi"}),
        ("chat", {**CHAT, "messages": None}),
        ("completion", {"model": "auto"}),
        ("completion", {**COMPLETION, "prompt": ""}),
        ("completion", {**COMPLETION, "prompt": None}),
        ("completion", {**COMPLETION, "prompt": 5}),
    ],
)
def test_required_fields_must_be_present(endpoint: Endpoint, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    error, full = refusal(body, endpoint), full_refusal(body, endpoint)
    assert (str(error), error.param) == (str(full), full.param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b"[" * 1000,
        b"[" * 100_000,
        b'{"model": "auto"} x',
        b"[]",
        b"null",
        b"5",
        b'"x"',
    ],
)
@pytest.mark.parametrize("endpoint", REQUESTS)
def test_invalid_requests_are_refused(endpoint: Endpoint, body: bytes) -> None:
    error, full = refusal(body, endpoint), full_refusal(body, endpoint)
    assert error.code == full.code
    assert error.param is None
    if error.code == "invalid_json":
        assert str(error) == str(full)
    else:
        assert str(error).startswith("body: ")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_numbers_that_json_does_not_have(number: bytes) -> None:
    """They could not be sent on."""
    start = json.dumps(CHAT).encode()[:-1]
    error = refusal(start + b', "other": ' + number + b"}")
    assert error.code == "invalid_json"
    assert refusal(start + b', "temperature": ' + number + b"}").param == "temperature"


def nested(depth: int) -> bytes:
    """A request whose deepest list lies in so many others; the request itself is the first."""
    return (
        json.dumps(CHAT).encode()[:-1] + b', "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    )


def test_nesting_ends_where_the_full_schema_ends_it() -> None:
    read_request(RequestJson(nested(200)), "chat")
    for depth in (201, 202, 500, 900, 5000):
        error = refusal(nested(depth))
        assert error.code == "invalid_json"
        assert "recursion limit exceeded" in str(error)
    # Many lists beside each other are none in each other.
    wide = {**CHAT, "x": [[{}, [1]] for _ in range(500)]}
    assert read(wide).document == wide


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
NAMES = st.sampled_from([*Envelope.model_fields, "messages", "prompt", "tools", "x"])


@given(st.dictionaries(NAMES, JSON), st.sampled_from(["chat", "completion"]))
def test_any_json_is_read_or_refused(fields: dict[str, Any], endpoint: Endpoint) -> None:
    document = {**REQUESTS[endpoint][1], **fields}
    body = json.dumps(document).encode()
    full_schema = REQUESTS[endpoint][0]
    try:
        request = read_request(RequestJson(body), endpoint)
    except BadRequestError:
        with pytest.raises(ValidationError):  # the local models would not have taken it either
            full_schema.model_validate_json(body)
        return
    assert request.document == document
    assert msgspec.json.decode(msgspec.json.encode(request.outward())) == request.outward()


@given(st.binary(max_size=40))
def test_any_bytes_are_refused(body: bytes) -> None:
    assert refusal(body).code in (None, "invalid_json")
