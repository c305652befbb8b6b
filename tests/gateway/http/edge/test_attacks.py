"""Attacks over real sockets on a whole gateway: refused with a message, and nothing breaks.

After each one the same gateway answers an honest request.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from outrider.gateway.answering.text.chat import ChatTokenizer
from outrider.gateway.http.edge.bounds import ConnectionBounds
from tests.gateway.http.edge.gateways import ADMIN_TOKEN, Whole, keyed_gateway, whole_gateway
from tests.gateway.http.edge.serving import Answered, Served, answer, answers, served, wait_for

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKENIZE = "/v1/tokenize"
DETOKENIZE = "/v1/detokenize"
OLLAMA_CHAT = "/api/chat"
OLLAMA_GENERATE = "/api/generate"
POSTS = (
    *(CHAT, COMPLETIONS, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", TOKENIZE, DETOKENIZE),
    *(f"{RESPONSES}/input_tokens", OLLAMA_CHAT, OLLAMA_GENERATE),
)
JSON = {"content-type": "application/json"}
MEGABYTE = 2**20
Post = Callable[[str, bytes], httpx.Response]

HONEST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "small", "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"model": "small", "prompt": "Hi"},
    RESPONSES: {"model": "small", "input": "Hi"},
    MESSAGES: {
        "model": "small",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "Hi"}],
    },
    f"{MESSAGES}/count_tokens": {
        "model": "small",
        "messages": [{"role": "user", "content": "Hi"}],
    },
    f"{RESPONSES}/input_tokens": {"model": "small", "input": "Hi"},
    OLLAMA_CHAT: {
        "model": "small",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": False,
    },
    OLLAMA_GENERATE: {"model": "small", "prompt": "Hi", "stream": False},
    TOKENIZE: {"model": "small", "prompt": "Hi"},
    DETOKENIZE: {"model": "small", "tokens": [70]},
}


@pytest.fixture(scope="module")
def whole(tokenizer: ChatTokenizer) -> Whole:
    return whole_gateway(tokenizer)


@pytest.fixture(scope="module")
def server(whole: Whole) -> Iterator[Served]:
    bounds = ConnectionBounds(header_timeout_s=2, body_timeout_s=2, max_header_bytes=16 * 1024)
    with served(whole.app, bounds) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def running(server: Served, whole: Whole, http: httpx.Client) -> Iterator[Served]:
    """Fails the test after which honest requests are not answered, or work goes on."""
    whole.engine.submitted.clear()
    yield server
    wait_for(lambda: not whole.engine.running)
    assert http.post(CHAT, json=HONEST[CHAT]).status_code == 200
    wait_for(lambda: not server.num_tasks and server.num_connections <= 1)


@pytest.fixture
def post(running: Served, http: httpx.Client) -> Post:
    """Sends a body that is said to be JSON."""

    def send(path: str, body: bytes) -> httpx.Response:
        return http.post(path, content=body, headers=JSON)

    return send


def told(response: httpx.Response) -> str:
    """The error's message; fails for an answer that is no error in JSON."""
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.headers["x-content-type-options"] == "nosniff"
    error: dict[str, str] | str = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message
    return message


def with_field(path: str, name: str, value: str) -> bytes:
    """An honest request with one more field, its value written as it is."""
    honest = json.dumps(HONEST[path]).encode()
    return honest[:-1] + f', "{name}": {value}}}'.encode()


# Bodies


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" * MEGABYTE, id="brackets"),
        pytest.param(b'{"a":' * (MEGABYTE // 5), id="braces"),
        pytest.param(b"[" * (MEGABYTE // 2) + b"]" * (MEGABYTE // 2), id="nested"),
        pytest.param(b'{"messages": ' + b"[" * 500_000 + b"]" * 500_000 + b"}", id="in-field"),
        pytest.param(b'{"model": "small", "prompt": "\xff\xfe"}', id="not-utf8"),
        pytest.param(b'{"model": "small", "prompt": "\xed\xa0\x80"}', id="surrogate-bytes"),
        pytest.param(b'{"model": "small", "prompt": "\xc0\xaf"}', id="overlong"),
        pytest.param('{"model": "small"}'.encode("utf-16"), id="utf-16"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00" * 1000, id="zeros"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'"text"', id="string"),
        pytest.param(b"{}{}", id="two"),
        pytest.param(b"{'model': 'small'}", id="python"),
        pytest.param(b'{"model": "small",}', id="comma"),
        pytest.param(gzip.compress(b"{}"), id="gzip"),
    ],
)
def test_bodies_that_are_no_request(post: Post, whole: Whole, path: str, body: bytes) -> None:
    response = post(path, body)
    assert response.status_code == 400
    message = told(response)
    assert len(message) < 1000
    assert whole.engine.submitted == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none(post: Post, whole: Whole, path: str, number: str) -> None:
    for name in ("temperature", "max_tokens", "top_p", "metadata"):
        response = post(path, with_field(path, name, number))
        assert response.status_code == 400, name
        told(response)
    assert whole.engine.submitted == []


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "number", ["9" * 5000, "-" + "9" * 5000, "1" + "0" * 400, "1e308", str(2**63), str(-(2**64))]
)
def test_numbers_that_are_huge(post: Post, whole: Whole, path: str, number: str) -> None:
    for name in ("max_tokens", "max_output_tokens", "n", "top_k", "seed", "logprobs", "top_p"):
        response = post(path, with_field(path, name, number))
        assert response.status_code in {200, 400}, (name, response.text)
        if response.status_code == 400:
            assert len(told(response)) < 1000
    # A seed may be any integer of 64 bits, and what is ignored may be anything.
    assert all(request.sampling.seed is not None for request in whole.engine.submitted)


@pytest.mark.parametrize("path", POSTS)
def test_unknown_fields_are_named(post: Post, whole: Whole, path: str) -> None:
    response = post(path, with_field(path, "temprature", "0.5"))
    assert response.status_code == 400
    assert "temprature" in told(response)
    assert whole.engine.submitted == []


@pytest.mark.slow_cases
@pytest.mark.parametrize("path", POSTS)
def test_a_field_name_of_a_megabyte_is_not_repeated(post: Post, path: str) -> None:
    for body in (
        HONEST[path] | {"x" * MEGABYTE: 1},
        HONEST[path] | {"model": "x" * MEGABYTE},
        HONEST[path] | {"messages": [{"x" * MEGABYTE: 1}]},
    ):
        response = post(path, json.dumps(body).encode())
        assert response.status_code in {400, 404}
        assert len(response.content) < 3000


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({f"field{i}": i for i in range(20_000)}, id="unknown"),
        pytest.param({"stop": ["x"] * 50_000}, id="stop"),
        pytest.param({"logit_bias": {str(i): 1 for i in range(20_000)}}, id="logit_bias"),
        pytest.param({"messages": [{"role": "x"}] * 20_000}, id="messages"),
        pytest.param({"tools": [{"type": "function"}] * 20_000}, id="tools"),
        pytest.param({"prompt_cache_key": "x" * MEGABYTE}, id="long"),
    ],
)
def test_fields_by_the_thousand(post: Post, fields: dict[str, Any]) -> None:
    response = post(CHAT, json.dumps(HONEST[CHAT] | fields).encode())
    assert response.status_code in {200, 400}
    assert len(response.content) < 3000


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "text", ["\\ud800", "\\udfff\\ud800", "\\u0000", "\\u202e", "\\ufffe\\uffff", "a" * 20_000]
)
def test_strange_text_is_answered_or_refused(post: Post, path: str, text: str) -> None:
    body = json.dumps(HONEST[path]).replace('"Hi"', f'"{text}"').encode()
    response = post(path, body)
    assert response.status_code in {200, 400}, response.text
    response.json()


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonx",
        "text/json",
        "*/*",
    ],
)
@pytest.mark.parametrize("path", POSTS)
def test_other_content_types_are_refused(
    running: Served, http: httpx.Client, whole: Whole, path: str, content_type: str
) -> None:
    """A page of another site can send these without a preflight."""
    body = json.dumps(HONEST[path]).encode()
    headers = {"content-type": content_type.encode("latin-1")}
    response = http.post(path, content=body, headers=headers)
    assert response.status_code == 415
    told(response)
    assert whole.engine.submitted == []


@pytest.mark.parametrize("path", POSTS)
def test_a_body_over_the_limit_is_refused_by_its_length_and_by_its_bytes(
    post: Post, http: httpx.Client, path: str
) -> None:
    large = b'{"model": "' + b"x" * (2 * MEGABYTE) + b'"}'
    assert post(path, large).status_code == 413

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(large), 65_536):
            yield large[start : start + 65_536]

    response = http.post(path, content=chunks(), headers=JSON)
    assert response.status_code == 413
    told(response)


def test_a_declared_length_that_never_comes_is_refused_at_once(running: Served) -> None:
    head = raw("POST", CHAT, "Content-Type: application/json", f"Content-Length: {10**15}")
    with running.connect() as client:
        client.sendall(head)
        received = client.recv(65_536)
    assert answer(received).status == 413


# Headers


def raw(method: str, target: str, *lines: str, host: str = "Host: 127.0.0.1") -> bytes:
    """A request's head as these lines write it."""
    return "\r\n".join([f"{method} {target} HTTP/1.1", host, *lines, "", ""]).encode("latin-1")


BODY = json.dumps(HONEST[CHAT]).encode()
LENGTH = f"Content-Length: {len(BODY)}"
TYPED = "Content-Type: application/json"
GET = raw("GET", "/v1/models")


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (raw("POST", CHAT, TYPED, LENGTH, LENGTH), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, LENGTH, "Content-Length: 0"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, f"{LENGTH}, {len(BODY)}"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Content-Length: +5"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Content-Length: -5"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Content-Length: 0x5"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Content-Length: 9" * 25), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, LENGTH, "Transfer-Encoding: chunked"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Transfer-Encoding: chunked", LENGTH), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Transfer-Encoding: xchunked"), 400, "invalid_framing"),
        (raw("POST", CHAT, TYPED, "Transfer-Encoding: identity"), 400, "invalid_framing"),
        (raw("POST", CHAT, TYPED, "Transfer-Encoding: gzip, chunked"), 400, "invalid_framing"),
        (raw("POST", CHAT, TYPED, "Transfer-Encoding: chunked, chunked"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Transfer-Encoding: \x0bchunked"), 400, "malformed_request"),
        (raw("POST", CHAT, TYPED, "Transfer-Encoding : chunked"), 400, "malformed_request"),
        (raw("GET", "/", "X-A: a\r\n folded"), 400, "malformed_request"),
        (raw("GET", "/", "X-A: a\x00b"), 400, "malformed_request"),
        (raw("GET", "/", "X-A: a\rX-B: b"), 400, "malformed_request"),
        (raw("GET", "/", "X-A: a\nX-B: b"), 400, "malformed_request"),
        (raw("GET", "/", "X-A: a\x7f"), 400, "malformed_request"),
        (raw("GET", "/", "X A: a"), 400, "malformed_request"),
        (raw("GET", "/", "X\xe4: a"), 400, "malformed_request"),
        (raw("GET", "/", ": a"), 400, "malformed_request"),
        (raw("GET", "/", "Host: other.example"), 400, "invalid_host"),
        (raw("GET", "/", host="Host: "), 400, "invalid_host"),
        (raw("GET", "/", host="Host: ["), 400, "invalid_host"),
        (raw("GET", "/", host="Host: a/b"), 400, "invalid_host"),
        (raw("GET", "/", host="Host: a@b"), 400, "invalid_host"),
        (raw("GET", "/", host="X-Host: a"), 400, "invalid_host"),
        (raw("GET", "/", "Authorization: a", "Authorization: b"), 400, "repeated_header"),
        (raw("GET", "/", "x-api-key: a", "X-API-KEY: b"), 400, "repeated_header"),
        (raw("POST", CHAT, TYPED, TYPED, LENGTH), 400, "repeated_header"),
        (raw("GET", "/", *["X-A: a"] * 500), 431, "headers_too_large"),
        (raw("GET", "/", "X-A: " + "a" * 17_000), 431, "headers_too_large"),
        (raw("GET", "/" + "a" * 17_000), 414, "url_too_long"),
        (b"GET /\r\n\r\n", 505, "http_version"),
        (b"GET / HTTP/1.9\r\nHost: a\r\n\r\n", 400, "malformed_request"),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400, "malformed_request"),
        (b"FROB / HTTP/1.1\r\nHost: a\r\n\r\n", 400, "malformed_request"),
        (
            b"POST /v1/tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "invalid_framing",
        ),
    ],
)
def test_heads_that_two_servers_could_read_differently(
    running: Served, whole: Whole, head: bytes, status: int, code: str
) -> None:
    """One answer, although another request is hidden behind: nothing behind it is read."""
    only = answer(running.ask(head + BODY + GET))
    assert (only.status, only.code) == (status, code)
    assert only.headers["connection"] == "close"
    assert whole.engine.submitted == []


@pytest.mark.parametrize(
    "chunks",
    [
        b"-1\r\na\r\n",
        b"ffffffffffffffffff\r\na\r\n",
        b"1;a\nb\r\na\r\n0\r\n\r\n",
        b"1\na\n0\n\n",
        b"1\r\nabc\r\n0\r\n\r\n",
        b"0x1\r\na\r\n0\r\n\r\n",
        b" 1\r\na\r\n0\r\n\r\n",
    ],
)
def test_chunks_that_two_servers_could_read_differently(
    running: Served, whole: Whole, chunks: bytes
) -> None:
    head = raw("POST", CHAT, TYPED, "Transfer-Encoding: chunked")
    only = answer(running.ask(head + chunks + GET))
    assert (only.status, only.code) == (400, "malformed_request")
    assert whole.engine.submitted == []


def test_trailers_are_no_headers(running: Served) -> None:
    body = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
    head = raw("POST", CHAT, TYPED, "Transfer-Encoding: chunked", "Connection: close")
    trailer = b"X-Request-Id: from-trailer\r\nIdempotency-Key: a b\r\n\r\n"
    only = answer(running.ask(head + body + trailer))
    assert only.status == 200
    assert only.headers["x-request-id"] != "from-trailer"


@pytest.mark.parametrize("given", ["a b", "a;b", "x" * 129, "\xfc", "a\tb", "<script>", "%0d%0a"])
def test_a_request_id_is_given_back_only_if_it_is_sane(
    running: Served, http: httpx.Client, given: str
) -> None:
    headers = {"x-request-id": given.encode("latin-1")}
    response = http.get("/v1/models", headers=headers)
    assert response.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_nothing_that_is_asked_gets_into_headers(
    running: Served, http: httpx.Client, path: str
) -> None:
    evil = "small\r\nx-evil: 1\r\n\r\n<html>"
    body = HONEST[path] | {"model": evil, "user": evil, "metadata": {"user_id": evil}}
    response = http.post(path, json=body)
    assert response.status_code in {400, 404}
    assert "x-evil" not in response.headers
    assert response.headers["content-type"] == "application/json"


# Paths


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../v1/models",
        "/./v1/models",
        "/v1/%2e%2e/admin/keys",
        "/..%2f..%2fetc/passwd",
        "/static/../../etc/passwd",
        "/V1/MODELS",
        "/v1/models;jsessionid=1",
        "/v1/chat/completions/",
        "/v1/chat%2fcompletions/x",
        "/admin/",
        "/.env",
        "/.git/config",
        "/docs",
        "/redoc",
        "/" + "a" * 8000,
        "/v1/models/" + "%2e%2e%2f" * 500,
        "/v1/models/\\..\\..",
        "/%ff%fe",
        "/%f0%9f%92%a9",
        "/v1/models/..%5c..%5cwindows",
    ],
)
def test_path_tricks_lead_nowhere(running: Served, target: str) -> None:
    only = answer(running.ask(raw("GET", target, "Connection: close")))
    assert only.status in {404, 405}, only.body
    assert json.loads(only.body)["error"]["message"]
    assert only.headers["content-type"] == "application/json"
    assert "location" not in only.headers


@pytest.mark.parametrize(
    "target", ["//v1/models", "/v1//models", "//v1%2f/models", "/openai/models"]
)
def test_doubled_slashes_lead_to_the_same_path(running: Served, target: str) -> None:
    only = answer(running.ask(raw("GET", target, "Connection: close")))
    assert (only.status, json.loads(only.body)["object"]) == (200, "list")


@pytest.mark.parametrize("target", ["/%00", "/v1/models/%0d%0aX-Evil:%201", "/v1/models/%1b[0m"])
def test_control_characters_in_paths_are_refused(running: Served, target: str) -> None:
    only = answer(running.ask(raw("GET", target)))
    assert (only.status, only.code) == (404, "invalid_path")


@pytest.mark.parametrize("target", ["?a=b", "http://", "a", "*", "http://127.0.0.1", "\xe4"])
def test_targets_that_are_no_path_are_refused(running: Served, target: str) -> None:
    only = answer(running.ask(raw("GET", target, "Connection: close")))
    assert only.status in {400, 404}
    assert json.loads(only.body)["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"])
def test_other_methods_are_refused(running: Served, http: httpx.Client, method: str) -> None:
    response = http.request(method, CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


# Keys


@pytest.fixture(scope="module")
def keyed_whole(
    tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Whole]:
    with keyed_gateway(tokenizer, tmp_path_factory.mktemp("keyed")) as whole:
        yield whole


@pytest.fixture(scope="module")
def keys(keyed_whole: Whole) -> list[str]:
    """Two tenants' keys, made before the gateway starts."""
    return [keyed_whole.new_key(name) for name in ("mine", "other")]


@pytest.fixture(scope="module")
def keyed(keyed_whole: Whole, keys: list[str]) -> Iterator[tuple[Served, Whole]]:
    bounds = ConnectionBounds(header_timeout_s=2, body_timeout_s=2)
    with served(keyed_whole.app, bounds) as running:
        yield running, keyed_whole


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "target",
    [
        *POSTS,
        "/",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/v1/usage",
        "/admin/keys",
        "/nowhere",
        "//health",
        "/health/",
        "/health/../metrics",
        "/ready/..%2fmetrics",
        "/health%2f..%2fmetrics",
        "/Health",
        "/health;x",
        "/health%20",
        "http://127.0.0.1/metrics",
    ],
)
def test_without_a_key_there_is_nothing_but_health(
    keyed: tuple[Served, Whole], method: str, target: str
) -> None:
    running, whole = keyed
    only = answer(running.ask(raw(method, target, "Connection: close")))
    assert only.status == 401
    assert b"key" in only.body
    assert only.headers["x-request-id"]
    assert whole.engine.submitted == []


def test_health_needs_no_key_however_it_is_written(keyed: tuple[Served, Whole]) -> None:
    running, _ = keyed
    for target in ("/health", "/ready", "/%68ealth", "/health?x=1", "http://a.example/ready"):
        assert answer(running.ask(raw("GET", target, "Connection: close"))).status == 200


def test_with_a_key_any_name_and_origin_will_do(keyed: tuple[Served, Whole]) -> None:
    """Its client is no page of another site, which has no key to send."""
    running, _ = keyed
    lines = (
        f"Authorization: Bearer {ADMIN_TOKEN}",
        "Origin: http://a.example",
        "Connection: close",
    )
    named = "Host: gateway.example"
    assert answer(running.ask(raw("GET", "/admin/keys", *lines, host=named))).status == 200
    azure = raw("GET", "/admin/keys", f"api-key: {ADMIN_TOKEN}", *lines[1:], host=named)
    assert answer(running.ask(azure)).status == 200
    post = raw("POST", "/admin/keys", *lines, TYPED, "Content-Length: 2", host=named)
    assert answer(running.ask(post + b"{}")).status == 400  # it was read


def test_a_key_behind_a_trailer_or_an_upgrade_is_the_requests_own(
    keyed: tuple[Served, Whole],
) -> None:
    running, _ = keyed
    bearer = f"Authorization: Bearer {ADMIN_TOKEN}"
    head = raw("POST", TOKENIZE, TYPED, "Transfer-Encoding: chunked", "Connection: close")
    received = running.ask(head + b"2\r\n{}\r\n0\r\n" + bearer.encode() + b"\r\n\r\n")
    assert answer(received).status == 401
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    without = raw("GET", "/admin/keys", *upgrade)
    with_key = raw("GET", "/admin/keys", bearer, *upgrade)
    last = raw("GET", "/admin/keys", "Connection: close")
    found: list[Answered] = answers(running.ask(without + with_key + last))
    assert [one.status for one in found] == [401, 200, 401]


def test_an_idempotency_key_gives_no_answer_of_another_key(
    keyed: tuple[Served, Whole], keys: list[str]
) -> None:
    running, whole = keyed

    def ask(key: str | None) -> httpx.Response:
        headers = {"idempotency-key": "one"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return httpx.post(running.url + CHAT, json=HONEST[CHAT], headers=headers)

    mine, again, other, nobody = (ask(key) for key in (keys[0], keys[0], keys[1], None))
    assert again.content == mine.content
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-request-id"] != mine.headers["x-request-id"]
    assert other.status_code == 200
    assert other.json()["id"] != mine.json()["id"]
    assert nobody.status_code == 401
    assert len(whole.engine.submitted) == 2
