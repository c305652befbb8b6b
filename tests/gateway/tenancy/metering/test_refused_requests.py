"""Requests count before their bodies are read, and stay counted where they fail by their own fault.

Else a key with one request a minute could ask once a second with bodies that cost seconds of work.
"""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from outrider.engine.errors import QueueFullError
from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BodiesFullError,
    BudgetError,
    DeadlineExceededError,
    EngineLostError,
    GenerationError,
    KeyBodiesFullError,
    UnavailableError,
    UpstreamError,
    UpstreamRefusalError,
)
from outrider.gateway.tenancy.keys.amounts import LimitSpec
from outrider.gateway.tenancy.metering.faults import is_requests_fault
from tests.gateway.http.edge.serving import read_until
from tests.gateway.tenancy.metering.tenants import Books, books

CHAT = "/v1/chat/completions"
POSTS = (
    CHAT,
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/api/chat",
    "/api/generate",
    "/infill",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/route",
    "/v1/feedback",
)
ONE_A_MINUTE = LimitSpec(requests_per_minute=1)
HELLO: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def made(
    tokenizer: ChatTokenizer,
    encode: Callable[[str], list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Books]:
    folder: Path = tmp_path_factory.mktemp("books")
    with books(tokenizer, encode, folder) as opened:
        yield opened


def post(made: Books, key: str, path: str, body: Any, **headers: str) -> httpx.Response:
    bearer = {"authorization": f"Bearer {key}", **headers}
    return httpx.post(f"{made.world.url}{path}", json=body, headers=bearer)


def head(made: Books, key: str, num_bytes: int, *lines: str) -> bytes:
    host = urlsplit(made.world.url).netloc
    typed = ("Content-Type: application/json", f"Content-Length: {num_bytes}")
    told = (f"POST {CHAT} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {key}", *typed)
    return "\r\n".join([*told, *lines, "", ""]).encode()


def connected(made: Books) -> socket.socket:
    parts = urlsplit(made.world.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", POSTS)
def test_a_request_that_is_refused_counts_as_one(made: Books, path: str) -> None:
    key = made.new_key(f"refused at {path}", ONE_A_MINUTE)
    refused = post(made, key, path, {"model": 7})
    again = post(made, key, path, {"model": 7})
    assert (refused.status_code, again.status_code) == (400, 429)
    assert int(again.headers["retry-after"]) > 1


def test_a_request_of_another_type_counts_as_one(made: Books) -> None:
    key = made.new_key("types", LimitSpec(requests_per_minute=2))
    zipped = post(made, key, CHAT, HELLO, **{"content-encoding": "gzip"})
    plain = post(made, key, CHAT, HELLO, **{"content-type": "text/plain"})
    assert (zipped.status_code, plain.status_code) == (415, 415)
    assert zipped.json()["error"]["code"] == "unsupported_content_encoding"
    assert post(made, key, CHAT, HELLO).status_code == 429


def test_a_prompt_that_fits_no_limit_of_tokens_counts_and_costs_nothing(made: Books) -> None:
    key = made.new_key("tokens", LimitSpec(requests_per_minute=2, tokens_per_minute=60))
    refused = post(made, key, CHAT, {**HELLO, "max_tokens": 100})
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-requests"] == "1"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "60"
    assert post(made, key, CHAT, {**HELLO, "max_tokens": 1}).status_code == 200
    third = post(made, key, CHAT, {**HELLO, "max_tokens": 1})
    assert "requests_per_minute" in third.json()["error"]["message"]


def test_a_used_up_key_is_refused_before_it_sends_its_body(made: Books) -> None:
    key = made.new_key("early", ONE_A_MINUTE)
    assert post(made, key, CHAT, HELLO).status_code == 200
    with connected(made) as client:
        client.sendall(head(made, key, 2**20, "Expect: 100-continue"))
        assert read_until(client, b"\r\n").startswith(b"HTTP/1.1 429 ")


def test_an_unfinished_body_is_a_request_under_way(made: Books) -> None:
    key = made.new_key("open", LimitSpec(concurrent_requests=1))
    body = json.dumps(HELLO).encode()
    with connected(made) as client:
        client.sendall(head(made, key, len(body)) + body[:5])
        made.until(lambda: post(made, key, CHAT, HELLO).status_code == 429)
        client.sendall(body[5:])
        assert read_until(client, b"\r\n").startswith(b"HTTP/1.1 200 ")
    with connected(made) as client:
        client.sendall(head(made, key, len(body)) + body[:5])
    made.until(lambda: post(made, key, CHAT, HELLO).status_code == 200)


def test_a_client_that_leaves_within_its_body_has_made_a_request(made: Books) -> None:
    key = made.new_key("left", ONE_A_MINUTE)
    with connected(made) as client:
        client.sendall(head(made, key, 100) + b"{")
    made.until(lambda: post(made, key, CHAT, HELLO).status_code == 429)
    made.settle()
    assert post(made, key, CHAT, HELLO).status_code == 429


@pytest.mark.slow
def test_a_repeated_answer_is_no_request(made: Books) -> None:
    key = made.new_key("repeats", LimitSpec(requests_per_minute=2))
    answers = [
        post(made, key, CHAT, HELLO, **{"idempotency-key": name}) for name in ("a", "a", "a", "b")
    ]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert answers[2].headers["idempotent-replayed"] == "true"
    assert post(made, key, CHAT, HELLO).status_code == 429


def test_an_idempotency_key_with_another_body_is_a_request(made: Books) -> None:
    key = made.new_key("reused", LimitSpec(requests_per_minute=2))
    headers = {"idempotency-key": "a"}
    assert post(made, key, CHAT, HELLO, **headers).status_code == 200
    assert post(made, key, CHAT, {**HELLO, "seed": 1}, **headers).status_code == 422
    assert post(made, key, CHAT, HELLO).status_code == 429


def test_an_engine_that_fails_gives_the_request_back(made: Books) -> None:
    key = made.new_key("engine", ONE_A_MINUTE)
    made.world.says("Hello", failure=("step_failed", "The engine broke."))
    assert post(made, key, CHAT, HELLO).status_code == 500
    made.world.says("Hello", failure=("invalid_grammar", "The grammar is none."))
    assert post(made, key, CHAT, HELLO).status_code == 400
    made.world.says("Hello")
    assert post(made, key, CHAT, HELLO).status_code == 429


def test_a_limit_of_one_model_counts_what_the_engine_refuses(made: Books) -> None:
    """Issue 15, second round: it gave back each one, so bad grammars were compiled without end."""
    key = made.new_key("one-model", LimitSpec(models={"small": ONE_A_MINUTE}))
    made.world.says("Hello", failure=("step_failed", "The engine broke."))
    assert post(made, key, CHAT, HELLO).status_code == 500
    made.world.says("Hello", failure=("invalid_grammar", "The grammar is none."))
    assert post(made, key, CHAT, HELLO).status_code == 400
    made.world.says("Hello")
    assert post(made, key, CHAT, HELLO).status_code == 429


@pytest.mark.parametrize(
    ("error", "is_its_own"),
    [
        (BadRequestError("no"), True),
        (BudgetError("no"), True),
        (DeadlineExceededError("too late"), True),
        (UpstreamRefusalError("no", status=422, body=b"{}"), True),
        (QueueFullError(num_waiting=9, retry_after_s=1.0), False),
        (KeyBodiesFullError(limit_bytes=1), False),
        (BodiesFullError(), False),
        (GenerationError("its grammar broke", code="request_failed"), True),
        (GenerationError("the step broke", code="step_failed"), False),
        (EngineLostError("gone"), False),
        (UnavailableError("away"), False),
        (UpstreamError("broken", failure="reset"), False),
        (ValueError("ours"), False),
    ],
)
def test_faults_are_told_apart_by_request_and_server(error: Exception, is_its_own: bool) -> None:
    assert is_requests_fault(error) is is_its_own
