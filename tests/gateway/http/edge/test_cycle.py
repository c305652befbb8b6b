"""The head of an answer: what it says of the connection and the body, and what it may not hold."""

from collections.abc import Iterator

import pytest
from starlette.types import Receive, Scope, Send

from outrider.gateway.http.edge.bounds import ConnectionBounds
from tests.gateway.http.edge.serving import Served, served

GET = b"GET %s HTTP/1.%d\r\nHost: a\r\nConnection: %s\r\n\r\n"
HEADERS: dict[str, list[tuple[bytes, bytes]]] = {
    "/sized": [(b"content-length", b"4"), (b"x-odd", b"\xe4\tb")],
    "/stream": [],
    "/chunked": [(b"transfer-encoding", b"chunked")],
    "/last": [(b"content-length", b"4"), (b"connection", b"close")],
    "/none": [],
    "/value": [(b"content-length", b"4"), (b"x-a", b"b\r\nset-cookie: evil=1")],
    "/nul": [(b"x-a", b"b\x00")],
    "/name": [(b"x-a: b\r\nx-c", b"d")],
    "/colon": [(b"x:a", b"b")],
}


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    status = 204 if scope["path"] == "/none" else 200
    body = b"" if status == 204 else b"text"
    start = {"status": status, "headers": HEADERS[scope["path"]]}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with served(application, ConnectionBounds()) as running:
        yield running


def ask(running: Served, path: str, version: int = 1) -> tuple[set[bytes], bytes]:
    """Return the lines of the head but the date, and what follows them."""
    head, _, body = running.ask(GET % (path.encode(), version, b"close")).partition(b"\r\n\r\n")
    return {line for line in head.split(b"\r\n") if not line.startswith(b"date: ")}, body


@pytest.mark.parametrize(
    ("path", "more", "body"),
    [
        ("/sized", {b"content-length: 4", b"x-odd: \xe4\tb"}, b"text"),
        ("/stream", {b"transfer-encoding: chunked"}, b"4\r\ntext\r\n0\r\n\r\n"),
        ("/chunked", {b"transfer-encoding: chunked"}, b"4\r\ntext\r\n0\r\n\r\n"),
        ("/last", {b"content-length: 4"}, b"text"),
    ],
)
@pytest.mark.parametrize("version", [0, 1])
def test_the_head_tells_how_the_body_ends(
    running: Served, path: str, more: set[bytes], body: bytes, version: int
) -> None:
    lines = {b"HTTP/1.1 200 OK", b"connection: close", *more}
    assert ask(running, path, version) == (lines, body)


def test_an_answer_without_content_has_no_body(running: Served) -> None:
    lines = {b"HTTP/1.1 204 No Content", b"connection: close"}
    assert ask(running, "/none") == (lines, b"")


@pytest.mark.parametrize("path", ["/value", "/nul", "/name", "/colon"])
def test_no_header_can_begin_another(running: Served, path: str) -> None:
    assert running.ask(GET % (path.encode(), 1, b"keep-alive")) == b""


def test_an_answer_may_end_the_connection(running: Served) -> None:
    received = running.ask(GET % (b"/last", 1, b"keep-alive") * 2)
    assert received.count(b"HTTP/1.1 200 OK") == 1, "the second request came too late"
