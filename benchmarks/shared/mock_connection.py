"""One client of the mock: reads a request, plays the steps of its answer, reads the next one."""

import asyncio
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, Literal, Protocol, cast

import httptools

from benchmarks.shared.mock_script import STAMP
from benchmarks.shared.toxics import Ending, Plan, Step

logger = logging.getLogger(__name__)

# Timers of event loops are no finer than this; earlier steps are sent at once.
_TIMER_S: Final = 0.001

Outcome = Literal["open", "answered", "broken_off", "client_left"]
"""broken_off: by a toxic. client_left: it closed the connection before the answer's end."""


class MockRequest:
    """A request that the mock has got. `index` counts from 0; header names are lower-case."""

    def __init__(self, index: int, method: str, path: str, headers: dict[str, str]) -> None:
        self.index = index
        self.method = method
        self.path = path
        self.headers = headers
        self.body = b""
        self.received_ns = time.perf_counter_ns()
        self.outcome: Outcome = "open"

    @cached_property
    def document(self) -> dict[str, Any]:
        """The body as JSON; empty where there is none."""
        document: dict[str, Any] = json.loads(self.body) if self.body else {}
        return document


class Mock(Protocol):
    """The part of a server that its connections need."""

    def plan(self, request: MockRequest) -> Plan:
        """Return what is answered."""

    def joined(self, connection: "Connection") -> None:
        """A client has connected."""

    def left(self, connection: "Connection") -> None:
        """A connection has ended."""

    def changed(self) -> None:
        """Wake the waiters: something has happened."""


class Connection(asyncio.Protocol):
    """One client: one request at a time."""

    def __init__(self, mock: Mock) -> None:
        self._mock = mock
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._path = ""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._request: MockRequest | None = None
        self._steps: Sequence[Step] = ()
        self._next = 0
        self._due_s = 0.0
        self._ending: Ending = "keep"
        self._is_waiting = False
        self._timer: asyncio.TimerHandle | None = None
        self._keeps_alive = True

    # ---- asyncio ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not say that they are asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._mock.joined(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            logger.error("bad request reason=%s", error)
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None and self._request.outcome == "open":
            self._request.outcome = "client_left"
        self._mock.left(self)

    def cut(self) -> None:
        """Hang up at once."""
        if self._transport is not None:
            self._transport.abort()

    # ---- httptools ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._path = ""
        self._headers = {}
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        request = MockRequest(-1, method, self._path.partition("?")[0], self._headers)
        request.body = b"".join(self._body)
        self._keeps_alive = self._parser.should_keep_alive()
        self._request = request
        plan = self._mock.plan(request)
        self._steps, self._ending, self._next = plan.steps, plan.ending, 0
        self._due_s = self._loop.time()
        self._play()

    # ---- the answer ---------------------------------------------------------------------------

    def _play(self) -> None:
        """Send what is due; come back for the rest."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        due: list[bytes] = []
        latest_s = self._loop.time() + _TIMER_S / 2
        while self._next < len(self._steps):
            step = self._steps[self._next]
            if step.wait_s and not self._is_waiting:
                # Counted from when the step before was due, so that delays do not add up.
                self._due_s += step.wait_s
                self._is_waiting = True
            if self._due_s > latest_s:
                self._timer = self._loop.call_at(self._due_s, self._play)
                break
            self._is_waiting = False
            due.append(step.data)
            self._next += 1
        if due:
            data = b"".join(due)
            if STAMP in data and self._request is not None:
                moments = (self._request.received_ns, time.perf_counter_ns())
                data = data.replace(STAMP, b"%020d%020d" % moments)
            self._transport.write(data)
        if self._next == len(self._steps):
            self._end()

    def _end(self) -> None:
        assert self._transport is not None
        if self._request is not None and self._ending != "stall":
            self._request.outcome = "answered" if self._ending == "keep" else "broken_off"
        if self._ending == "reset":
            _reset(self._transport)
        elif self._ending == "fin" or (self._ending == "keep" and not self._keeps_alive):
            self._transport.close()
        self._mock.changed()


def _reset(transport: asyncio.Transport) -> None:
    """Close with RST instead of FIN."""
    connection: socket.socket = transport.get_extra_info("socket")
    # A duplicate, because uvloop's stand-in for the socket takes no options.
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
