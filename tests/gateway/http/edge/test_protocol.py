"""Connections within bounds: time, size, number and order, over real sockets."""

import asyncio
import contextlib
import json
import logging
import socket
import struct
import time
from collections.abc import Iterator

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from outrider.gateway.http.edge.bounds import ConnectionBounds, usable_connections
from tests.gateway.http.edge.serving import (
    Served,
    answer,
    answers,
    read_to_end,
    read_until,
    served,
    wait_for,
)

HOST = b"Host: a\r\n"
GET = b"GET /echo HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /echo HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
BOUNDS = ConnectionBounds(
    header_timeout_s=0.25,
    body_timeout_s=0.25,
    write_timeout_s=0.4,
    keep_alive_s=1.0,
    max_header_bytes=4096,
    max_connections=40,
)


class Application:
    """Answers /echo with what it got, /hold when it is let go, others with more than is read."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []
        self.size = 0
        self.let_go: asyncio.Event | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.loop = asyncio.get_running_loop()
            self.let_go = asyncio.Event()
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.asked.append(scope["path"])
        if scope["path"] == "/early":
            await respond(send, 413, b"too large")
            return
        body = await self._body(scope, receive)
        if body is None:
            return
        if scope["path"].startswith("/hold"):
            await self._hold(scope, receive, send)
        elif scope["path"] == "/sized":
            await respond(send, 200, b"x" * self.size)
        elif scope["path"] == "/flood":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(2000):
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
            echo = {"path": scope["path"], "body": body.decode("latin-1"), "headers": headers}
            await respond(send, 200, json.dumps(echo).encode())

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left.append(scope["path"])
                return None
            body += message["body"]
            if not message["more_body"]:
                return body

    async def _hold(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an endpoint does: a client that leaves ends the work."""
        assert self.let_go is not None
        going = asyncio.ensure_future(self.let_go.wait())
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
        if going.done():
            await respond(send, 200, scope["path"].encode())
        else:
            self.left.append(scope["path"])
        for task in (going, leaving):
            task.cancel()
        await asyncio.wait((going, leaving))

    def hold_again(self) -> None:
        assert self.let_go is not None
        self.let_go.clear()

    def let_all_go(self) -> None:
        assert self.loop is not None
        assert self.let_go is not None
        self.loop.call_soon_threadsafe(self.let_go.set)


async def respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Application, Served]]:
    application = Application()
    with served(application, BOUNDS) as running:
        yield application, running


@pytest.fixture
def application(shared: tuple[Application, Served]) -> Application:
    """The one that most tests share, with a fresh memory."""
    application, _ = shared
    application.asked.clear()
    application.left.clear()
    application.hold_again()
    return application


@pytest.fixture
def running(shared: tuple[Application, Served], application: Application) -> Iterator[Served]:
    """The server of most tests. Fails the test that leaves a connection or a task."""
    _, running = shared
    yield running
    wait_for(running.is_clean)


@pytest.fixture
def own() -> Application:
    """For a server of the test's own."""
    return Application()


def echoed(received: bytes) -> list[dict[str, object]]:
    return [json.loads(one.body) for one in answers(received)]


# Time


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_headers_that_do_not_end_are_answered_408(own: Application, loop: str) -> None:
    with served(own, BOUNDS, loop=loop) as running:
        start_s = time.monotonic()
        late = answer(running.ask(b"GET /echo HTTP/1.1\r\nHo"))
        assert 0.2 < time.monotonic() - start_s < 2
        assert (late.status, late.code) == (408, "header_timeout")
        assert late.headers["connection"] == "close"
        assert late.headers["content-type"] == "application/json"
        assert late.headers["x-content-type-options"] == "nosniff"
        assert late.headers["x-request-id"].startswith("req-")
        assert own.asked == []
        assert running.refusals("header_timeout") == 1


def test_slow_loris_does_not_get_more_time_by_dripping(running: Served) -> None:
    with running.connect() as client:
        start_s = time.monotonic()
        client.settimeout(0.02)
        received = b""
        for byte in b"GET /echo HTTP/1.1\r\n" + b"X-A: b\r\n" * 100:
            client.sendall(bytes([byte]))
            try:
                received = client.recv(65_536)
            except TimeoutError:
                continue
            break
        assert time.monotonic() - start_s < 2
        assert b"408 Request Timeout" in received


def test_blank_lines_do_not_hold_a_connection(running: Served) -> None:
    with running.connect() as client:
        start_s = time.monotonic()
        client.settimeout(0.05)
        received: bytes | None = None
        while received is None and time.monotonic() - start_s < 2:
            try:
                client.sendall(b"\r\n")
                received = client.recv(65_536)
            except TimeoutError:
                continue
            except ConnectionError:
                received = b""
        assert received == b""
        assert time.monotonic() - start_s < BOUNDS.keep_alive_s


def test_a_body_that_stops_is_answered_408_and_its_request_told(
    running: Served, application: Application
) -> None:
    head = b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 10\r\n\r\nabc"
    late = answer(running.ask(head))
    assert (late.status, late.code) == (408, "body_timeout")
    wait_for(lambda: application.left == ["/echo"])


def test_a_body_that_only_drips_is_answered_408(running: Served) -> None:
    with running.connect() as client:
        client.sendall(b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n")
        client.settimeout(0.02)
        start_s = time.monotonic()
        received = b""
        while not received and time.monotonic() - start_s < 3:
            client.sendall(b"x")
            try:
                received = client.recv(65_536)
            except TimeoutError:
                continue
        assert b"408 Request Timeout" in received


def test_a_body_in_parts_that_keep_coming_may_take_longer_than_the_timeout(running: Served) -> None:
    with running.connect() as client:
        client.sendall(b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 10000\r\n\r\n")
        for _ in range(10):
            time.sleep(0.05)
            client.sendall(b"x" * 1000)
        (whole,) = echoed(read_until(client, b"}}"))
        assert whole["body"] == "x" * 10_000


def test_idle_connections_are_closed_without_a_word(running: Served) -> None:
    with running.connect() as never, running.connect() as after:
        after.sendall(GET)
        read_until(after, b"}}")
        start_s = time.monotonic()
        assert read_to_end(never) == b""
        assert read_to_end(after) == b""
        assert 0.8 < time.monotonic() - start_s < 3


def test_a_client_that_does_not_read_is_cut_off(running: Served) -> None:
    with running.connect(receive_buffer=4096) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\n" + HOST + b"\r\n")
        wait_for(lambda: running.num_tasks == 1)
        wait_for(lambda: running.is_clean())  # without a byte read


@pytest.mark.parametrize("size", [50_000, 16 * 2**20])
def test_a_client_that_does_not_read_the_end_is_cut_off(own: Application, size: int) -> None:
    """The answer is whole and the connection closing, but not all of it is taken."""
    with served(own, BOUNDS, send_buffer=4096) as running:
        own.size = size
        with running.connect(receive_buffer=4096) as client:
            client.sendall(b"GET /sized HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
            wait_for(lambda: own.asked == ["/sized"] and not running.num_tasks)
            assert running.num_connections == 1
            wait_for(running.is_clean)


# Size


def test_large_headers_are_answered_431(running: Served, application: Application) -> None:
    for head in (
        b"GET /echo HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /echo HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 200 + b"\r\n",
    ):
        large = answer(running.ask(head))
        assert (large.status, large.code) == (431, "headers_too_large")
    assert application.asked == []


def test_a_header_without_end_is_answered_while_it_comes(running: Served) -> None:
    with running.connect() as client:
        client.sendall(b"GET /echo HTTP/1.1\r\n" + HOST + b"X: ")
        wait_for(lambda: running.num_connections == 1)
        for _ in range(64):
            time.sleep(0.001)
            try:
                client.sendall(b"a" * 8192)
            except ConnectionError:
                break
        large = answer(read_to_end(client))
        assert (large.status, large.code) == (431, "headers_too_large")


@pytest.mark.parametrize("is_split", [False, True])
def test_a_long_url_is_answered_414(running: Served, is_split: bool) -> None:
    url = b"GET /" + b"a" * 5000
    rest = b"b HTTP/1.1\r\n" + HOST + b"\r\n"
    with running.connect() as client:
        client.sendall(url if is_split else url + rest)
        if is_split:
            wait_for(lambda: running.num_connections == 1)
            time.sleep(0.02)
            client.sendall(b"a" * 5000)
        long = answer(read_to_end(client))
    assert (long.status, long.code) == (414, "url_too_long")


def test_headers_up_to_the_bound_pass(running: Served) -> None:
    value = b"a" * 3900
    (echo,) = echoed(
        running.ask(
            b"GET /echo HTTP/1.1\r\n" + HOST + b"Connection: close\r\nX: " + value + b"\r\n\r\n"
        )
    )
    assert echo["headers"]["x"] == value.decode()  # type: ignore[index]


def test_chunks_that_are_all_framing_are_refused(running: Served) -> None:
    head = b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1;"
    with running.connect() as client:
        client.sendall(head)
        wait_for(lambda: running.num_tasks == 1)
        wasteful = b""
        for _ in range(200):
            try:
                client.sendall(b"e" * 1000)
            except ConnectionError:
                break
        wasteful = read_to_end(client)
    assert (answer(wasteful).status, answer(wasteful).code) == (400, "invalid_framing")


@pytest.mark.parametrize("line", [b"A: b\r\n", b"a"], ids=["many", "one without end"])
def test_trailers_without_end_are_refused(running: Served, line: bytes) -> None:
    """A large body must not earn room for trailers, which would be kept as headers are."""
    head = b"POST /slow HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
    size = 2**20
    with running.connect() as client:
        client.sendall(head + b"%x\r\n" % size + b"x" * size + b"\r\n0\r\nX-A: ")
        trailers = (b"\r\n" if len(line) > 1 else b"") + line * (2**20 // len(line))
        with contextlib.suppress(ConnectionError):
            client.sendall(trailers)
        refused = answer(read_until(client, b"}}"))
    assert (refused.status, refused.code) == (400, "invalid_framing")


def test_the_end_of_a_large_body_in_chunks_may_come_alone(running: Served) -> None:
    head = b"POST /echo HTTP/1.1\r\n" + HOST + b"Connection: close\r\n"
    size = 2**18
    with running.connect() as client:
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        client.sendall(b"%x\r\n" % size + b"x" * size + b"\r\n")
        time.sleep(0.05)
        client.sendall(b"0\r\n\r\n")
        (echo,) = echoed(read_to_end(client))
    assert len(str(echo["body"])) == size


def test_chunks_of_one_byte_pass(running: Served) -> None:
    chunks = b"1\r\na\r\n" * 5000 + b"0\r\n\r\n"
    head = (
        b"POST /echo HTTP/1.1\r\n"
        + HOST
        + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    (echo,) = echoed(running.ask(head, chunks))
    assert echo["body"] == "a" * 5000


def test_an_early_answer_reaches_a_client_that_still_sends(running: Served) -> None:
    size = 4 * 2**20
    head = b"POST /early HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % size
    with running.connect() as client:
        client.sendall(head)
        client.sendall(b"x" * size)
        client.sendall(LAST)
        received = read_to_end(client)
    early, echo = answers(received)
    assert (early.status, echo.status) == (413, 200)


def test_an_early_answer_that_ends_the_connection_is_read_by_a_client_that_still_sends(
    running: Served,
) -> None:
    size = 4 * 2**20
    head = b"POST /early HTTP/1.1\r\n" + HOST + b"Connection: close\r\n"
    with running.connect() as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % size)
        client.sendall(b"x" * size)
        client.sendall(LAST)  # behind its last request
        early = answer(read_to_end(client))
    assert (early.status, early.headers["connection"]) == (413, "close")


def test_a_body_that_stops_after_its_early_answer_ends_the_connection(running: Served) -> None:
    head = b"POST /early HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\nabc"
    start_s = time.monotonic()
    early = answer(running.ask(head))
    assert early.status == 413
    assert time.monotonic() - start_s < BOUNDS.keep_alive_s


def test_an_idle_connection_after_an_early_answer_is_closed(running: Served) -> None:
    with running.connect() as client:
        client.sendall(b"POST /early HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\nabc")
        assert answer(read_until(client, b"too large")).status == 413
        client.sendall(b"x" * 997)
        start_s = time.monotonic()
        assert read_to_end(client) == b""
        assert 0.8 < time.monotonic() - start_s < 3


# Number


def test_a_thousand_idle_connections_do_no_harm(own: Application) -> None:
    bounds = ConnectionBounds(max_connections=1000)
    with served(own, bounds) as running:
        idle = [running.connect() for _ in range(1000)]
        wait_for(lambda: running.num_connections == 1000)
        (echo,) = echoed(running.ask(LAST))  # one idle connection made room
        assert echo["path"] == "/echo"
        assert idle[0].recv(1) == b""
        for client in idle:
            client.close()
        wait_for(running.is_clean)


def test_busy_connections_are_not_closed_for_new_ones(
    own: Application, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "outrider.gateway.http.edge")
    with served(own, BOUNDS) as running:
        hold = b"GET /hold HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
        busy = [running.connect() for _ in range(BOUNDS.max_connections)]
        for client in busy:
            client.sendall(hold)
        wait_for(lambda: len(own.asked) == BOUNDS.max_connections)
        for _ in range(3):
            full = answer(running.ask(GET))
            assert (full.status, full.code) == (503, "too_many_connections")
            assert full.headers["retry-after"] == "1"
        own.let_all_go()
        assert [answer(read_to_end(client)).status for client in busy] == [200] * len(busy)
        for client in busy:
            client.close()
        assert answer(running.ask(LAST)).status == 200
    assert len([r for r in caplog.records if "connections are full" in r.message]) == 1


def test_far_too_many_connections_are_dropped(own: Application) -> None:
    with served(own, BOUNDS) as running:
        partial = [running.connect() for _ in range(BOUNDS.max_connections)]
        hold = b"GET /hold HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"
        for client in partial:
            client.sendall(hold)
        wait_for(lambda: len(own.asked) == BOUNDS.max_connections)
        more = [running.connect() for _ in range(60)]
        wait_for(lambda: running.refusals("too_many_connections") == 60)
        assert running.num_connections <= BOUNDS.max_connections * 9 // 8 + 8
        for client in [*partial, *more]:
            client.close()


# Order


def test_pipelined_requests_are_answered_in_order(
    running: Served, application: Application
) -> None:
    paths = [f"/echo{i}" for i in range(10)]
    requests = [f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for path in paths]
    received = running.ask(b"".join(requests) + LAST)
    assert [echo["path"] for echo in echoed(received)] == [*paths, "/echo"]


def test_too_many_pipelined_requests_end_the_connection_after_those_before(
    running: Served, application: Application
) -> None:
    received = running.ask(GET * 5000)
    found = answers(received)
    assert [one.status for one in found] == [200] * 17  # one at work and sixteen that wait
    assert found[-1].headers["connection"] == "close"
    assert len(application.asked) == 17


def test_garbage_behind_a_request_does_not_get_into_its_answer(
    running: Served, application: Application
) -> None:
    before = running.refusals("malformed_request")
    with running.connect() as client:
        client.sendall(b"GET /hold HTTP/1.1\r\n" + HOST + b"\r\n" + b"\x00garbage\r\n\r\n")
        wait_for(lambda: running.refusals("malformed_request") == before + 1)
        application.let_all_go()
        held = answer(read_to_end(client))
    assert (held.status, held.body) == (200, b"/hold")


def test_a_broken_body_behind_a_request_does_not_get_into_its_answer(
    running: Served, application: Application
) -> None:
    before = running.refusals("malformed_request")
    broken = b"POST /echo HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
    with running.connect() as client:
        client.sendall(b"GET /hold HTTP/1.1\r\n" + HOST + b"\r\n" + broken)
        wait_for(lambda: running.refusals("malformed_request") == before + 1)
        application.let_all_go()
        held = answer(read_to_end(client))
    assert (held.status, held.body) == (200, b"/hold")
    assert application.asked == ["/hold"]


def test_a_partial_request_behind_one_waits_for_that(
    running: Served, application: Application
) -> None:
    with running.connect() as client:
        client.sendall(b"GET /hold HTTP/1.1\r\n" + HOST + b"\r\nGET /ec")
        wait_for(lambda: application.asked == ["/hold"])
        time.sleep(BOUNDS.header_timeout_s * 1.5)
        application.let_all_go()
        held = read_until(client, b"/hold")
        late = answer(read_to_end(client))
    assert answer(held).status == 200
    assert late.status == 408


def test_leaving_with_requests_in_the_queue_ends_the_one_at_work(
    running: Served, application: Application
) -> None:
    with running.connect() as client:
        client.sendall(b"GET /hold HTTP/1.1\r\n" + HOST + b"\r\n" + GET * 3)
        wait_for(lambda: application.asked == ["/hold"])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: application.left == ["/hold"])
    assert application.asked == ["/hold"]


def test_requests_after_the_last_one_are_not_read(
    running: Served, application: Application
) -> None:
    received = running.ask(LAST + GET)
    assert answer(received).status == 200
    assert application.asked == ["/echo"]


# Other protocols


@pytest.mark.parametrize("is_split", [False, True])
def test_an_upgrade_is_ignored_and_the_body_read(running: Served, is_split: bool) -> None:
    """As Java's HTTP client asks, for HTTP/2, with its first request."""
    head = (
        b"POST /echo HTTP/1.1\r\n" + HOST + b"Connection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nContent-Length: 5\r\n\r\n"
    )
    with running.connect() as client:
        if is_split:
            client.sendall(head)
            time.sleep(0.02)
            client.sendall(b"hello" + LAST)
        else:
            client.sendall(head + b"hello" + LAST)
        first, last = echoed(read_to_end(client))
    assert first["body"] == "hello"
    assert "upgrade" not in first["headers"]  # type: ignore[operator]
    assert last["path"] == "/echo"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"*1\r\n$4\r\nPING\r\n",
    ],
)
def test_other_protocols_are_answered_400(running: Served, request_bytes: bytes) -> None:
    wrong = answer(running.ask(request_bytes))
    assert (wrong.status, wrong.code) == (400, "malformed_request")


def test_expecting_100_continue_gets_it(running: Served) -> None:
    with running.connect() as client:
        client.sendall(
            b"POST /echo HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        )
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"ok")
        (echo,) = echoed(read_until(client, b"}}"))
        assert echo["body"] == "ok"


# The process


def test_a_real_client_keeps_its_connection(running: Served) -> None:
    with httpx.Client(base_url=running.url) as client:
        for _ in range(50):
            assert client.post("/echo", content=b"hi").json()["body"] == "hi"
        assert running.num_connections == 1
        assert "server" not in client.get("/echo").headers


def test_shutdown_finishes_requests_and_closes_idle_connections(own: Application) -> None:
    with (
        served(own, BOUNDS) as running,
        running.connect() as idle,
        running.connect() as busy,
    ):
        busy.sendall(b"GET /hold HTTP/1.1\r\n" + HOST + b"\r\n")
        wait_for(lambda: own.asked == ["/hold"])
        running.server.should_exit = True
        assert read_to_end(idle) == b""
        own.let_all_go()
        assert answer(read_to_end(busy)).body == b"/hold"


def test_the_log_names_no_header(running: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "outrider.gateway.http.edge")
    running.ask(b"GET /echo HTTP/1.1\r\nAuthorization: Bearer or-secret\r\n x\r\n\r\n")
    assert "code=malformed_request peer=127.0.0.1" in caplog.text
    assert "secret" not in caplog.text


def test_more_connections_than_open_files_are_not_promised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"now": (1024, 4096)}
    module = "outrider.gateway.http.edge.bounds.resource"
    monkeypatch.setattr(f"{module}.getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(f"{module}.setrlimit", lambda _, new: limits.update(now=new))
    assert usable_connections(500) == 500
    assert limits["now"] == (1024, 4096)
    assert usable_connections(2000) == 2000
    assert limits["now"] == (2256, 4096)
    assert caplog.text == ""
    assert usable_connections(10_000) == 3840
    assert limits["now"] == (4096, 4096)
    assert "wanted=10000 possible=3840" in caplog.text
