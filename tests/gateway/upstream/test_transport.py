"""The transport against real sockets: what comes through, what fails how, and what is left."""

import asyncio
import gc
import gzip
import math
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from outrider.gateway.contract.errors.tree import DeadlineExceededError, FailureKind, UpstreamError
from outrider.gateway.settings.tiers import TimeoutSettings
from outrider.gateway.upstream import response as response_module
from outrider.gateway.upstream import transport as transport_module
from outrider.gateway.upstream.connection_errors import error_of
from outrider.gateway.upstream.transport import Transport, UpstreamResponse
from outrider.gateway.upstream.waits import ExchangeLimits, WaitTimer
from tests.gateway.upstream.raw_server import (
    CHUNKED,
    LAST_CHUNK,
    Connection,
    Handler,
    RawServer,
    answering,
    chunk,
    raw_server,
    whole,
)
from tests.gateway.waiting import until

pytestmark = pytest.mark.uvloop

UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
EVENTS = [b'data: {"n": %d}\n\n' % number for number in range(5)]
GENEROUS = TimeoutSettings(connect_s=10, first_token_s=10, between_tokens_s=10, total_s=10)


def limits(**seconds: float) -> TimeoutSettings:
    return GENEROUS.model_copy(update=seconds)


@asynccontextmanager
async def running(
    timeouts: TimeoutSettings = GENEROUS, *, max_connections: int = 8, **more: Any
) -> AsyncIterator[Transport]:
    transport = Transport(tier="cloud", timeouts=timeouts, max_connections=max_connections, **more)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def talking(
    handler: Handler, timeouts: TimeoutSettings = GENEROUS, **more: Any
) -> AsyncIterator[tuple[Transport, RawServer]]:
    async with raw_server(handler) as server, running(timeouts, **more) as transport:
        yield transport, server


async def ask(transport: Transport, server: RawServer, **options: Any) -> UpstreamResponse:
    return await transport.post(server.url + "/chat/completions", {}, b"{}", **options)


async def all_events(response: UpstreamResponse) -> list[bytes]:
    return [event async for event in response.events()]


async def until_error(response: UpstreamResponse) -> tuple[list[bytes], Exception]:
    """The events that came, and how they ended."""
    events: list[bytes] = []
    try:
        async for event in response.events():
            events.append(event)  # noqa: PERF401 - those before the error are wanted
    except (UpstreamError, DeadlineExceededError) as error:
        return events, error
    raise AssertionError("it ended well")


def assert_failed(error: BaseException, failure: FailureKind, server: RawServer) -> None:
    assert isinstance(error, UpstreamError)
    assert error.failure == failure
    assert error.replica == f"127.0.0.1:{server.port}"
    assert str(error).startswith("The cloud tier ")
    assert "127.0.0.1" not in str(error)
    assert str(server.port) not in str(error)


def one_stream(*pieces: bytes, head: bytes = CHUNKED) -> Handler:
    """Send these bytes, each for itself, then wait until the client leaves."""

    async def handler(connection: Connection, server: RawServer) -> None:
        server.requests.append(await connection.request())
        for piece in (head, *pieces):
            await connection.send(piece)
            await asyncio.sleep(0)
        await connection.client_left()

    return handler


# What comes through


async def test_events_come_as_they_were_sent_and_the_connection_is_kept() -> None:
    comment = b": keep-alive\n\n"
    named = b"event: message_start\r\ndata: {}\r\n\r\n"
    sent = [EVENTS[0], comment, named, "data: Ça va? 漢字\n\n".encode(), b"data: [DONE]\n\n"]
    answer = CHUNKED + chunk(b"".join(sent)) + LAST_CHUNK

    async with talking(answering(answer)) as (transport, server):
        for _ in range(3):
            response = await ask(transport, server)
            assert response.status == 200
            assert response.headers["content-type"] == "text/event-stream"
            assert response.replica == f"127.0.0.1:{server.port}"
            assert await all_events(response) == sent
        assert server.num_connections == 1
        assert len(server.requests) == 3


async def test_events_do_not_depend_on_packets() -> None:
    stream = b"".join(EVENTS)
    pieces = [chunk(stream[i : i + 7]) for i in range(0, len(stream), 7)]

    async with talking(one_stream(*pieces, LAST_CHUNK)) as (transport, server):
        assert await all_events(await ask(transport, server)) == EVENTS


async def test_the_request_says_what_it_was_told_to_say() -> None:
    answers = answering(whole(b"{}", headers="Set-Cookie: a=b; Path=/\r\nX-Thing: 1\r\n"))

    async with talking(answers) as (transport, server):
        headers = {"Authorization": "Bearer key", "X-Trace": "7"}
        for _ in range(2):
            response = await transport.post(f"{server.url}/completions", headers, b'{"a":1}')
            assert response.headers["x-thing"] == "1"
            assert await response.read() == b"{}"
        for first, sent, body in server.requests:
            assert first == "POST /v1/completions HTTP/1.1"
            assert body == b'{"a":1}'
            assert sent["authorization"] == "Bearer key"
            assert sent["x-trace"] == "7"
            assert sent["content-type"] == "application/json"
            assert sent["accept-encoding"] == "identity"
            assert "cookie" not in sent


async def test_a_content_type_of_the_callers_own_is_sent_once() -> None:
    async with talking(answering(whole(b"{}"))) as (transport, server):
        response = await transport.post(server.url, {"Content-Type": "text/x"}, b"{}")
        await response.read()
        assert server.requests[0][1]["content-type"] == "text/x"


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * (3 << 12)  # 3 MiB

    async with talking(answering(whole(b"{}"))) as (transport, server):
        response = await transport.post(server.url, {}, body)
        assert await response.read() == b"{}"
        assert server.requests[0][2] == body


async def test_a_compressed_answer_is_read_all_the_same() -> None:
    packed = whole(gzip.compress(b"hello"), headers="content-encoding: gzip\r\n")
    broken = whole(b"no gzip at all", headers="content-encoding: gzip\r\n")

    async with talking(answering(packed, broken)) as (transport, server):
        assert await (await ask(transport, server)).read() == b"hello"
        with pytest.raises(UpstreamError) as caught:
            await (await ask(transport, server)).read()
        assert_failed(caught.value, "garbage", server)


async def test_redirects_are_not_followed_and_proxies_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    there = whole(b"moved", status="302 Found", headers="location: /elsewhere\r\n")

    async with talking(answering(there)) as (transport, server):
        response = await ask(transport, server)
        assert response.status == 302
        assert await response.read() == b"moved"
        assert len(server.requests) == 1


async def test_a_body_that_ends_with_the_connection_ends_cleanly() -> None:
    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(UNTIL_CLOSED + EVENTS[0] + b"data: [DONE]\n")

    async with talking(handler) as (transport, server):
        events = await all_events(await ask(transport, server))
        assert events == [EVENTS[0], b"data: [DONE]\n\n"]


async def test_get_and_warm() -> None:
    answers = answering(whole(b"[]", status="401 Unauthorized"), whole(b"models"))
    async with talking(answers) as (transport, server):
        await transport.warm(server.url)
        assert "authorization" not in server.requests[0][1]
        headers = {"authorization": "Bearer key"}
        got = await transport.get(f"{server.url}/models", headers, timeout_s=5)
        assert got == (200, b"models")
        assert server.requests[1][0] == "GET /v1/models HTTP/1.1"
        assert server.requests[1][1]["authorization"] == "Bearer key"
        assert server.num_connections == 1


# What fails


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/json"])
async def test_a_stream_of_another_type(kind: str) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: 5\r\n\r\n".encode()

    async with talking(one_stream(b"hello", head=head)) as (transport, server):
        events, error = await until_error(await ask(transport, server))
        assert events == []
        assert_failed(error, "content_type", server)
        assert kind in str(error)


@pytest.mark.parametrize(
    ("head", "pieces", "timeouts", "num_events", "failure"),
    [
        (b"", [], limits(first_token_s=0.05), 0, "first_token_timeout"),
        (CHUNKED, [], limits(first_token_s=0.05), 0, "first_token_timeout"),
        (CHUNKED, [b": wait\n\n"], limits(first_token_s=0.05), 1, "first_token_timeout"),
        (CHUNKED, [b"data: half"], limits(first_token_s=0.05), 0, "first_token_timeout"),
        (CHUNKED, EVENTS[:3], limits(between_tokens_s=0.05), 3, "between_tokens_timeout"),
        (CHUNKED, EVENTS[:3], limits(total_s=0.05), 3, "total_timeout"),
        (CHUNKED, [], limits(first_token_s=0.05, total_s=0.02), 0, "total_timeout"),
    ],
)
async def test_a_server_that_falls_silent(
    head: bytes,
    pieces: list[bytes],
    timeouts: TimeoutSettings,
    num_events: int,
    failure: FailureKind,
) -> None:
    handler = one_stream(*map(chunk, pieces), head=head)
    async with talking(handler, timeouts) as (transport, server):
        error: BaseException
        events: list[bytes] = []
        if head:
            events, error = await until_error(await ask(transport, server))
        else:
            with pytest.raises(UpstreamError) as caught:
                await ask(transport, server)
            error = caught.value
        assert len(events) == num_events
        assert_failed(error, failure, server)
        assert "0.05 s" in str(error) or "0.02 s" in str(error)


@pytest.mark.parametrize("piece", [b"x", b": I am alive\n\n"])
async def test_bytes_that_are_no_events_do_not_buy_time(piece: bytes) -> None:
    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(EVENTS[0]))
        while not connection.writer.is_closing():
            await connection.send(chunk(piece))
            await asyncio.sleep(0.01)

    async with talking(handler, limits(between_tokens_s=0.1)) as (transport, server):
        events, error = await until_error(await ask(transport, server))
        assert events[0] == EVENTS[0]
        assert_failed(error, "between_tokens_timeout", server)


def sending_on_request(read_on: asyncio.Event) -> Handler:
    """Every event in a packet of its own, and only when it is asked for."""

    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(EVENTS[0]))
        for event in EVENTS[1:]:
            await read_on.wait()
            read_on.clear()
            await connection.send(chunk(event))
        await connection.send(LAST_CHUNK)

    return handler


@pytest.mark.parametrize("total_s", [10.0, 0.15])
async def test_time_that_the_reader_takes_is_not_the_servers(total_s: float) -> None:
    """It counts for the total, but not as a silence between tokens."""
    read_on = asyncio.Event()

    timeouts = limits(between_tokens_s=0.1, total_s=total_s)
    async with (
        talking(sending_on_request(read_on), timeouts) as (transport, server),
        aclosing((response := await ask(transport, server)).events()) as events,
    ):
        assert await anext(events) == EVENTS[0]
        for number in (1, 2):
            read_on.set()
            assert await anext(events) == EVENTS[number]
        read_on.set()
        await until(lambda: response._answer.content.total_bytes > 3 * len(EVENTS[0]))
        await asyncio.sleep(0.2)
        if total_s < 0.2:
            with pytest.raises(UpstreamError) as caught:
                await anext(events)
            assert_failed(caught.value, "total_timeout", server)
        else:
            assert await anext(events) == EVENTS[3]
            read_on.set()
            assert [event async for event in events] == [EVENTS[4]]


async def test_the_total_counts_even_when_the_server_never_pauses() -> None:
    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(CHUNKED)
        while not connection.writer.is_closing():
            await connection.send(chunk(EVENTS[0] * 100))

    async with talking(handler, limits(total_s=0.1)) as (transport, server):
        events, error = await until_error(await ask(transport, server))
        assert len(events) > 100
        assert_failed(error, "total_timeout", server)


@pytest.mark.parametrize("head", [b"", CHUNKED, CHUNKED + chunk(EVENTS[0])])
async def test_the_deadline_of_the_request_bounds_every_wait(head: bytes) -> None:
    def clock() -> float:
        return time.monotonic() + 1000  # not the loop's: it has to be translated

    async with talking(one_stream(head=head), clock=clock) as (transport, server):
        started_s = clock()

        async def whole_exchange() -> None:
            await all_events(await ask(transport, server, deadline_s=started_s + 0.1))

        with pytest.raises(DeadlineExceededError, match="the cloud tier"):
            await whole_exchange()
        assert 0.09 < clock() - started_s < 5
        await asyncio.sleep(0)
        assert len(server.requests) == 1


async def test_nothing_is_sent_behind_the_deadline() -> None:
    async with talking(answering(whole(b"{}")), clock=lambda: 5.0) as (transport, server):
        await (await ask(transport, server)).read()
        with pytest.raises(DeadlineExceededError):
            await ask(transport, server, deadline_s=5.0)
        await (await ask(transport, server, deadline_s=15.0)).read()
        assert len(server.requests) == 2
        assert server.num_connections == 1


async def test_an_endless_line_is_cut_off() -> None:
    left = asyncio.Event()
    most = 10 << 20

    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(EVENTS[0]))
        try:
            for _ in range(most >> 16):
                await connection.send(chunk(b"x" * (1 << 16)))
        except ConnectionError:
            left.set()

    async with talking(handler) as (transport, server):
        events, error = await until_error(await ask(transport, server))
        assert events == [EVENTS[0]]
        assert_failed(error, "too_large", server)
        await asyncio.wait_for(left.wait(), 5)


async def test_a_large_event_below_the_limit_passes() -> None:
    event = b"data: " + b"x" * (3 << 20) + b"\n\n"

    async with talking(one_stream(chunk(event), LAST_CHUNK)) as (transport, server):
        assert await all_events(await ask(transport, server)) == [event]


async def test_a_body_over_the_limit() -> None:
    async with talking(answering(whole(b"x" * 100_000))) as (transport, server):
        with pytest.raises(UpstreamError) as caught:
            await (await ask(transport, server)).read(limit_bytes=99_999)
        assert_failed(caught.value, "too_large", server)
        response = await ask(transport, server)
        assert len(await response.read(limit_bytes=100_000)) == 100_000


def breaking(*pieces: bytes, with_reset: bool) -> Handler:
    """Send these bytes and break off; no answer where there are none."""

    async def handler(connection: Connection, server: RawServer) -> None:
        server.requests.append(await connection.request())
        for piece in pieces:
            await connection.send(piece)
        if with_reset:
            connection.reset()

    return handler


@pytest.mark.parametrize("with_reset", [True, False])
@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-ty"])
async def test_a_connection_that_breaks_before_the_headers(head: bytes, with_reset: bool) -> None:
    async with talking(breaking(head, with_reset=with_reset)) as (transport, server):
        with pytest.raises(UpstreamError) as caught:
            await ask(transport, server)
        assert_failed(caught.value, "reset", server)
        assert len(server.requests) == 1


async def test_a_body_that_breaks_off_gives_what_had_come() -> None:
    pieces = (CHUNKED, *map(chunk, EVENTS[:3]))

    async with talking(breaking(*pieces, with_reset=False)) as (transport, server):
        events, error = await until_error(await ask(transport, server))
        assert events == EVENTS[:3]
        assert_failed(error, "reset", server)
        with pytest.raises(UpstreamError) as caught:
            await (await ask(transport, server)).read()
        assert_failed(caught.value, "reset", server)


async def test_a_reader_that_was_busy_when_the_connection_broke_loses_nothing() -> None:
    """The error is known before the events are read that came ahead of it."""
    may_break = asyncio.Event()

    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(EVENTS[0]))
        await may_break.wait()
        await connection.send(b"".join(map(chunk, EVENTS[1:])))

    async with (
        talking(handler) as (transport, server),
        aclosing((response := await ask(transport, server)).events()) as events,
    ):
        assert await anext(events) == EVENTS[0]
        may_break.set()
        await until(lambda: response._answer.content.exception() is not None)
        assert [await anext(events) for _ in EVENTS[1:]] == EVENTS[1:]
        with pytest.raises(UpstreamError) as caught:
            await anext(events)
        assert_failed(caught.value, "reset", server)


async def test_a_reset_in_mid_stream() -> None:
    was_read = asyncio.Event()

    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(EVENTS[0]))
        await was_read.wait()
        connection.reset()

    async with talking(handler) as (transport, server):
        events = (await ask(transport, server)).events()
        assert await anext(events) == EVENTS[0]
        was_read.set()
        with pytest.raises(UpstreamError) as caught:
            await anext(events)
        assert_failed(caught.value, "reset", server)


@pytest.mark.parametrize(
    "answer",
    [
        b"this is not HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_responses_that_are_not_http_are_reported(answer: bytes) -> None:
    async with talking(answering(answer)) as (transport, server):
        with pytest.raises(UpstreamError) as caught:
            await ask(transport, server)
        assert_failed(caught.value, "garbage", server)


def closed_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_a_refused_connection_is_reported() -> None:
    server = RawServer(port=closed_port())
    async with running() as transport:
        with pytest.raises(UpstreamError) as caught:
            await ask(transport, server)
        assert_failed(caught.value, "refused", server)
        assert "the server may be down" in str(caught.value)
        with pytest.raises(UpstreamError) as caught:
            await transport.get(server.url, {}, timeout_s=5)
        assert_failed(caught.value, "refused", server)
        await transport.warm(server.url)


def test_an_unknown_host_name() -> None:
    """Only the words: a test looks no names up."""
    key = ConnectionKey("nowhere.example", 443, True, True, None, None, None)
    error = aiohttp.ClientConnectorDNSError(key, socket.gaierror(-2, "Name or service not known"))
    exchange = ExchangeLimits(tier="cloud", replica="x:1", timeouts=GENEROUS, started_s=0)
    told = error_of(error, exchange)
    assert told.failure == "refused"
    assert str(told) == "The cloud tier has a host name that cannot be looked up."


async def test_a_connection_that_is_not_taken_in_time() -> None:
    """The handshake of TLS is a part of connecting, and this server does not say a word."""

    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.client_left()

    async with talking(handler, limits(connect_s=0.05)) as (transport, server):
        server.scheme = "https"
        with pytest.raises(UpstreamError) as caught:
            await ask(transport, server)
        assert_failed(caught.value, "connect_timeout", server)
        assert "did not take the connection within 0.05 s" in str(caught.value)


async def test_the_pool_is_full() -> None:
    handler = one_stream(chunk(EVENTS[0]))
    timeouts = limits(connect_s=0.05)
    async with talking(handler, timeouts, max_connections=1) as (transport, server):
        holder = await ask(transport, server)
        with pytest.raises(UpstreamError) as caught:
            await ask(transport, server)
        assert_failed(caught.value, "connect_timeout", server)
        assert "no connection free, of 1" in str(caught.value)
        await holder.aclose()
        await (await ask(transport, server)).aclose()
        assert server.num_connections == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_private_address_is_not_connected_to(host: str) -> None:
    async with talking(answering(whole(b"{}")), allow_private=False) as (transport, server):
        with pytest.raises(UpstreamError, match="allow_private_upstreams is false") as caught:
            await transport.post(f"http://{host}:{server.port}/v1", {}, b"{}")
        assert caught.value.failure == "refused"
        assert server.num_connections == 0


# Connections that were closed while they were idle


def closing_on_reuse(*, with_reset: bool) -> Handler:
    """Answer once for each connection; the next request finds it closed."""

    async def handler(connection: Connection, server: RawServer) -> None:
        server.requests.append(await connection.request())
        await connection.send(whole(b"%d" % len(server.requests)))
        await connection.request()
        if with_reset:
            connection.reset()

    return handler


@pytest.mark.parametrize("with_reset", [True, False])
async def test_a_stale_connection_is_replaced(with_reset: bool) -> None:
    handler = closing_on_reuse(with_reset=with_reset)
    async with talking(handler) as (transport, server):
        for number in (b"1", b"2", b"3"):
            assert await (await ask(transport, server)).read() == number
        assert server.num_connections == 3


async def test_many_stale_connections_are_replaced() -> None:
    """All of the pool may have gone, as behind a router that forgets."""

    async with talking(closing_on_reuse(with_reset=True)) as (transport, server):
        responses = [await ask(transport, server) for _ in range(4)]
        for response in responses:
            await response.read()
        assert server.num_connections == 4
        assert await (await ask(transport, server)).read() == b"5"
        assert server.num_connections == 5


async def test_a_server_that_thought_about_it_is_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport_module, "_STALE_S", 0.0)

    async with talking(closing_on_reuse(with_reset=False)) as (transport, server):
        await (await ask(transport, server)).read()
        with pytest.raises(UpstreamError) as caught:
            await ask(transport, server)
        assert_failed(caught.value, "reset", server)
        assert server.num_connections == 1


async def test_a_reused_connection_that_breaks_within_the_headers_is_a_failure() -> None:
    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        await connection.send(whole(b"{}"))
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\nx-half: 1\r\ny")

    async with talking(handler) as (transport, server):
        await (await ask(transport, server)).read()
        with pytest.raises(UpstreamError) as caught:
            await ask(transport, server)
        assert_failed(caught.value, "reset", server)
        assert server.num_connections == 1


# What is left


@pytest.mark.parametrize("way", ["aclose", "generator", "cancel", "before"])
async def test_leaving_early_cuts_the_connection(way: str) -> None:
    left = asyncio.Event()

    async def handler(connection: Connection, server: RawServer) -> None:
        server.requests.append(await connection.request())
        if way != "before":
            await connection.send(CHUNKED + chunk(EVENTS[0]))
        await connection.client_left()
        left.set()

    async def read(transport: Transport, server: RawServer) -> None:
        response = await ask(transport, server)
        async with aclosing(response.events()) as events:
            async for _ in events:
                if way == "generator":
                    break
                if way == "aclose":
                    await response.aclose()
                    await response.aclose()
                    return

    async with talking(handler) as (transport, server):
        task = asyncio.create_task(read(transport, server))
        await until(lambda: len(server.requests) == 1)
        if way in ("cancel", "before"):
            await asyncio.sleep(0.02)
            task.cancel()
        await asyncio.wait([task])
        await asyncio.wait_for(left.wait(), 5)
        assert server.num_connections == 1


@pytest.mark.parametrize("head", [b"", CHUNKED + chunk(EVENTS[0])])
async def test_closing_ends_what_is_under_way(head: bytes) -> None:
    async with talking(one_stream(head=head)) as (transport, server):

        async def read() -> list[bytes]:
            return await all_events(await ask(transport, server))

        reading = asyncio.create_task(read())
        await until(lambda: len(server.requests) == 1)
        await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            await transport.close()
            await transport.close()
            with pytest.raises(UpstreamError, match="shutting down") as caught:
                await reading
        assert_failed(caught.value, "reset", server)


async def test_it_must_be_started() -> None:
    transport = Transport(tier="cloud", timeouts=GENEROUS, max_connections=1)
    with pytest.raises(RuntimeError, match="start the transport"):
        await transport.post("http://127.0.0.1:1/v1", {}, b"{}")


@pytest.mark.parametrize("status", [None, 200])
async def test_get_is_bounded(status: int | None) -> None:
    """Neither a silent server nor one that sends for ever holds a probe up."""

    async def handler(connection: Connection, server: RawServer) -> None:
        await connection.request()
        if status is None:
            await connection.client_left()
        await connection.send(CHUNKED)
        while not connection.writer.is_closing():
            await connection.send(chunk(b"x" * (1 << 16)))

    async with talking(handler) as (transport, server):
        timeout_s = 0.05 if status is None else 10.0
        with pytest.raises(UpstreamError) as caught:
            await transport.get(server.url, {}, timeout_s=timeout_s)
        failure: FailureKind = "total_timeout" if status is None else "too_large"
        assert_failed(caught.value, failure, server)


class CountingLoop:
    """A clock that is moved by hand, and the timers that were set on it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_timers = 0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when: float, callback: Callable[[], None]) -> "CountingLoop":
        self.num_timers += 1
        self.timers = [(when, callback)]  # the one before was cancelled, or has fired
        return self

    def cancel(self) -> None:
        self.timers = []

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        while self.timers and self.timers[0][0] <= self.now_s:
            _, callback = self.timers.pop()
            callback()


def test_a_thousand_waits_take_few_timers() -> None:
    loop = CountingLoop()
    late: list[float] = []
    watch = WaitTimer(loop, lambda: late.append(loop.now_s))  # type: ignore[arg-type]
    watch.wait_until(60.0)
    for _ in range(1000):
        watch.rest()
        loop.advance(0.02)
        watch.wait_until(loop.now_s + 5.0)
    assert loop.num_timers <= 8
    assert late == []
    loop.advance(4.9)
    assert late == []
    loop.advance(0.2)
    assert len(late) == 1
    watch.wait_until(math.inf)
    watch.close()
    assert loop.timers == []


class Waiting:
    """Holds a timer that calls it back, as a server's answer does."""

    def __init__(self) -> None:
        self.watch = WaitTimer(CountingLoop(), self.late)  # type: ignore[arg-type]

    def late(self) -> None:
        raise AssertionError("it waited for nothing")


def test_a_closed_timer_keeps_nothing_for_the_garbage_collector() -> None:
    waiting = Waiting()
    known = weakref.ref(waiting)
    waiting.watch.wait_until(1.0)
    waiting.watch.close()
    gc.disable()
    try:
        del waiting
        assert known() is None
    finally:
        gc.enable()


def test_limits_are_as_said() -> None:
    assert response_module.MAX_EVENT_BYTES == 4 << 20
    assert response_module.MAX_BODY_BYTES == 32 << 20
