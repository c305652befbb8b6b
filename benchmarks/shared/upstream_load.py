"""Clients of a gateway or of the mock behind it, in a process of their own.

Kinds of load: streamed requests that come at given moments (open loop), with --whole such requests
for whole answers, and whole answers one after the other by so many clients (closed loop). Prints
what it saw as one JSON line, in microseconds.

The mock stamps each piece with the moments when it got the request and when it sent the piece; all
processes read the same clock. So what a request spent between client and mock is known exactly,
whatever the mock's own delays were: on its way there, and for each piece on its way back.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools
import psutil  # type: ignore[import-untyped]
import uvloop

HOST: Final = "127.0.0.1"
_STAMP_DIGITS: Final = 20


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and what came of it; moments are time.perf_counter_ns.

    `failure` is empty where the answer came to its end. `parts`: when which bytes of the body came.
    """

    sent_ns: int = 0
    headers_ns: int = 0
    ended_ns: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    failure: str = ""

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(part for _, part in self.parts)

    def events(self) -> Iterator[tuple[int, bytes]]:
        """The body's events without their blank line, and when the last byte of each came."""
        pending = b""
        for moment_ns, part in self.parts:
            *complete, pending = (pending + part).split(b"\n\n")
            for event in complete:
                yield moment_ns, event


class Connection(asyncio.Protocol):
    """One kept-alive connection: one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = Exchange()
        self._done: asyncio.Future[Exchange] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes) -> "asyncio.Future[Exchange]":
        """Write a whole request; the future is done at the answer's end, and never fails."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = Exchange(sent_ns=time.perf_counter_ns())
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self, reason: str = "closed") -> None:
        """Hang up; the request under way ends with `reason`."""
        self._finish(reason)
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio and httptools ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish("reset" if exc else "closed")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._exchange.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._exchange.headers_ns = time.perf_counter_ns()
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._exchange.parts.append((time.perf_counter_ns(), body))

    def on_message_complete(self) -> None:
        self._finish("")

    def _finish(self, failure: str) -> None:
        if self._done is not None and not self._done.done():
            self._exchange.ended_ns = time.perf_counter_ns()
            self._exchange.failure = failure
            self._done.set_result(self._exchange)


class Clients:
    """As many connections to one server as requests are under way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, *, timeout_s: float = 60.0) -> Exchange:
        """Send it over a connection that is free. An answer that hangs ends as `hung`."""
        connection = await self._connection()
        done = connection.send(request)
        await asyncio.wait((done,), timeout=timeout_s)
        if not done.done():
            connection.close("hung")
        exchange = await done
        if connection.is_open and not exchange.failure:
            self._idle.append(connection)
        else:
            connection.close()
        return exchange

    async def warm_up(self, count: int) -> None:
        """Open so many connections ahead."""
        self._idle.extend([await self._connect() for _ in range(count)])

    def close(self) -> None:
        """Hang up all."""
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> Connection:
        """One that is idle, or a new one. Servers close what was idle for some seconds."""
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, HOST, self._port)
        return connection


def http_request(
    document: dict[str, Any], *, path: str = "/v1/chat/completions", key: str | None = None
) -> bytes:
    """A whole POST, with a key where the server wants one."""
    body = json.dumps(document).encode()
    authorization = "" if key is None else f"authorization: Bearer {key}\r\n"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"{authorization}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments of independent requests, `rate` a second on average: a Poisson process."""
    rng = random.Random(seed)
    moments: list[float] = []
    moment_s = rng.expovariate(rate)
    while moment_s < seconds:
        moments.append(moment_s)
        moment_s += rng.expovariate(rate)
    return moments


async def open_loop(clients: Clients, request: bytes, moments_s: Sequence[float]) -> list[Exchange]:
    """Send at these moments, whatever has become of the earlier ones. In the order of sending."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    tasks = []
    for moment_s in moments_s:
        await asyncio.sleep(max(0.0, began_s + moment_s - loop.time()))
        tasks.append(asyncio.create_task(clients.ask(request)))
    return await asyncio.gather(*tasks)


async def closed_loop(
    clients: Clients, request: bytes, *, num_clients: int, seconds: float
) -> tuple[float, list[Exchange]]:
    """Each client sends its next request when it has its answer; also returns the seconds."""
    started_s = time.perf_counter()
    deadline_s = started_s + seconds
    done: list[Exchange] = []

    async def client() -> None:
        while time.perf_counter() < deadline_s:
            done.append(await clients.ask(request))

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return time.perf_counter() - started_s, done


def transit(exchange: Exchange) -> dict[str, Any]:
    """Return what one streamed exchange spent on its ways, in microseconds.

    there: from sending to the mock. first and last: the same with the way back of the first and the
    last piece. back: each piece's way back. failure: empty for a whole answer.
    """
    found = [
        (moment_ns, piece)
        for moment_ns, event in exchange.events()
        if (piece := _piece(event)) is not None
    ]
    is_whole = not exchange.failure and exchange.status == 200 and bool(found)
    if not is_whole:
        return {"failure": exchange.failure or f"status {exchange.status}"}
    received_ns = int(found[0][1][:_STAMP_DIGITS])
    there_ns = received_ns - exchange.sent_ns
    back_ns = [moment_ns - int(piece[_STAMP_DIGITS:]) for moment_ns, piece in found]
    return {
        "failure": "",
        "there": round(there_ns / 1e3),
        "first": round((there_ns + back_ns[0]) / 1e3),
        "last": round((there_ns + back_ns[-1]) / 1e3),
        "back": [round(way_ns / 1e3) for way_ns in back_ns],
    }


def _piece(event: bytes) -> str | None:
    """The stamped piece that an event holds."""
    if not event.startswith(b"data: {"):
        return None
    choices = json.loads(event[6:])["choices"]
    content = choices[0]["delta"].get("content") if choices else None
    return content or None


def _request(arguments: argparse.Namespace, *, streams: bool) -> bytes:
    document = {
        "model": arguments.model,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. Answer in short."},
            {"role": "user", "content": "Tell me about trees. " * arguments.sentences},
        ],
        "temperature": 0,
        "max_tokens": arguments.max_tokens,
    }
    return http_request(document | ({"stream": True} if streams else {}), key=arguments.key)


def is_good(exchange: Exchange) -> bool:
    """Return whether it came to its end, and was an answer."""
    return not exchange.failure and exchange.status == 200


async def _run_open(arguments: argparse.Namespace) -> dict[str, Any]:
    request = _request(arguments, streams=not arguments.whole)
    clients = Clients(arguments.port)
    await clients.warm_up(8)
    await open_loop(clients, request, [i / arguments.rate for i in range(arguments.warm_up)])
    moments_s = arrivals(arguments.rate, arguments.seconds, arguments.seed)
    before_s = cpu_s(arguments.server_pid)
    with _no_collections():
        exchanges = await open_loop(clients, request, moments_s)
    busy_s = cpu_s(arguments.server_pid) - before_s
    clients.close()
    if not arguments.whole:
        return {"exchanges": [transit(exchange) for exchange in exchanges], "busy_s": busy_s}
    return {
        "busy_s": busy_s,
        "num_failed": sum(not is_good(e) for e in exchanges),
        "latencies": [_latency_us(e) if is_good(e) else None for e in exchanges],
    }


def _latency_us(exchange: Exchange) -> int:
    return round((exchange.ended_ns - exchange.sent_ns) / 1e3)


async def _run_closed(arguments: argparse.Namespace) -> dict[str, Any]:
    request = _request(arguments, streams=False)
    clients = Clients(arguments.port)
    await closed_loop(clients, request, num_clients=arguments.clients, seconds=1.0)
    before_s = cpu_s(arguments.server_pid)
    with _no_collections():
        seconds, exchanges = await closed_loop(
            clients, request, num_clients=arguments.clients, seconds=arguments.seconds
        )
    busy_s = cpu_s(arguments.server_pid) - before_s
    clients.close()
    good = [e for e in exchanges if is_good(e)]
    return {
        "seconds": seconds,
        "busy_s": busy_s,
        "num_failed": len(exchanges) - len(good),
        "latencies": [_latency_us(e) for e in good],
    }


def cpu_s(pid: int) -> float:
    """Processor time that a program has used so far, its children's included."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(time.user + time.system for time in times))


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """The client's own garbage collection is no latency of the server's."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(argv: Sequence[str] | None = None) -> None:
    """Send, and print what came."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server-pid", type=int, required=True, help="whose work is counted")
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, help="streamed requests a second")
    parser.add_argument("--clients", type=int, help="clients that ask for whole answers")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--sentences", type=int, default=20, help="of the prompt")
    parser.add_argument("--warm-up", type=int, default=50, help="streamed requests before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", type=int, help="stay on this core")
    parser.add_argument("--key", help="sent as a bearer token")
    parser.add_argument("--whole", action="store_true", help="with --rate: whole answers")
    arguments = parser.parse_args(argv)
    if (arguments.rate is None) == (arguments.clients is None):
        parser.error("give either --rate or --clients")
    if arguments.core is not None:
        os.sched_setaffinity(0, {arguments.core})
    run = _run_open if arguments.rate is not None else _run_closed
    print(json.dumps(uvloop.run(run(arguments))))


if __name__ == "__main__":
    main()
