"""uvicorn's HTTP/1.1 connection within bounds: time, size, number, and framing without doubt.

uvicorn on httptools parses strictly. But it waits for ever for headers and bodies, holds headers of
any size, and starts as many requests of one connection as fit into a read.
"""

import asyncio
import urllib.parse
from typing import Any, Final, Literal

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from outrider.gateway.http.edge import refusals
from outrider.gateway.http.edge.answer_transport import AnswerTransport
from outrider.gateway.http.edge.bounds import ConnectionBounds
from outrider.gateway.http.edge.connections import Connections
from outrider.gateway.http.edge.cycle import EdgeCycle
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
from outrider.gateway.http.edge.framing import complaint
from outrider.gateway.http.edge.message_size import MessageSize
from outrider.gateway.http.edge.refusals import EdgeRefusal

_MAX_PIPELINED: Final = 16
_MIN_BODY_BYTES_PER_S: Final = 500
"""The least mean rate of a body, once it takes longer than its time-out."""
_LINGER_S: Final = 2.0
"""Seconds that a refused client has to read the refusal."""
_HOP_HEADERS: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})

Awaited = Literal["headers", "body"]


class _RefusedError(Exception):
    """Leaves the parser; the refusal itself is in the connection."""


class EdgeProtocol(HttpToolsProtocol):
    """One connection. A broken bound is answered in JSON and ends it."""

    cycle: EdgeCycle

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        shared: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._shared = shared
        self._bounds = shared.bounds
        self.timeout_keep_alive = shared.bounds.keep_alive_s  # type: ignore[assignment]
        self._running: EdgeCycle | None = None  # the one that may write
        self._refusal: EdgeRefusal | None = None  # why a callback left the parser
        self._is_deaf = False  # no more is read: the connection is about to end
        self._is_lingering = False  # and only waits for the client to read its last answer

        # The message that is being read.
        self._num_begun = 0
        self._num_complete = 0
        self._in_headers = False
        self._is_upgrading = False
        self._size = MessageSize(self._bounds.max_header_bytes)

        self._timer: asyncio.TimerHandle | None = None
        self._awaited: Awaited | None = None
        self._body_start_s = 0.0
        self._last_part_s = 0.0
        self._write_timer: asyncio.TimerHandle | None = None

    # Coming and going

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._shared.count(len(self.connections))
        if self._shared.has_room(len(self.connections)):
            self._wait_idle()
        else:
            self._turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request, and release all resources."""
        self._unset_keepalive_if_required()
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            self._running.leave()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._shared.count(len(self.connections))

    def make_room(self) -> None:
        """Close this idle connection to make room for one with a request."""
        self._shared.idle.pop(self, None)
        self.transport.close()
        self.connections.discard(self)
        self._abort_unless_taken()

    def shutdown(self) -> None:
        """Close, or finish the answer that is being written."""
        super().shutdown()
        self._abort_unless_taken()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        self._shared.idle.pop(self, None)
        super().timeout_keep_alive_handler()
        self._abort_unless_taken()

    def _unset_keepalive_if_required(self) -> None:
        self._shared.idle.pop(self, None)
        super()._unset_keepalive_if_required()

    def _wait_idle(self) -> None:
        self._shared.idle[self] = None
        self.timeout_keep_alive_task = self.loop.call_later(
            self._bounds.keep_alive_s, self.timeout_keep_alive_handler
        )

    # Reading

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes, and wait for the missing ones."""
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        num_begun, num_complete = self._num_begun, self._num_complete
        was_in_headers = self._in_headers
        if not self._feed(data):
            return
        if num_begun == self._num_begun and num_begun > num_complete:
            refusal = self._outgrown(len(data), was_in_headers=was_in_headers)
            if refusal is not None:
                self._refuse(refusal)
                return
        self._last_part_s = self.loop.time()
        self._watch(has_completed=self._num_complete > num_complete)

    def _feed(self, data: bytes) -> bool:
        """Parse; False where that ended the connection."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._is_upgrading:
                return self._read_on_without_upgrade(data[upgrade.args[0] :])
            self._refuse(refusals.MALFORMED)
            return False
        except httptools.HttpParserError:
            self._refuse(self._refusal or refusals.MALFORMED)
            return False
        return True

    def _read_on_without_upgrade(self, rest: bytes) -> bool:
        """Read the same request as if it asked for no other protocol, which servers may ignore.

        The parser assigns all following bytes to the other protocol, the request's body as well;
        and some clients (Java's) ask for HTTP/2 with every first request.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s\r\n" % (method, self.url, version)]
        for name, value in self.headers:
            if name not in _HOP_HEADERS:
                lines.append(b"%s: %s\r\n" % (name, value))
        self._is_upgrading = False
        self._num_begun -= 1
        self.parser = httptools.HttpRequestParser(self)
        return self._feed(b"".join(lines) + b"\r\n" + rest)

    def _outgrown(self, num_bytes: int, *, was_in_headers: bool) -> EdgeRefusal | None:
        """Count more bytes of a message that had begun before; the refusal if they are too many."""
        if self._in_headers:
            return self._size.add_headers(num_bytes, url=self.url)
        if was_in_headers:
            return None
        return self._size.add_body(num_bytes, is_answered=self.cycle.response_complete)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        """Handle a request's first bytes."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._leave(refusals.TOO_MANY_AT_ONCE)
        super().on_message_begin()
        self._num_begun += 1
        self._in_headers = True
        self._size = MessageSize(self._bounds.max_header_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check a header; drop a trailer: trailers come after all checks of headers."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check them all, then start the request."""
        version, method = self.parser.get_http_version(), self.parser.get_method()
        refusal = complaint(
            self.url, self.headers, version, max_bytes=self._bounds.max_header_bytes
        )
        if refusal is not None:
            self._leave(refusal)
        if self.parser.should_upgrade():
            if method == b"CONNECT":
                self._leave(refusals.MALFORMED)
            self._is_upgrading = True
            return
        self._begin(method.decode("ascii"), version)
        self._in_headers = False

    def _begin(self, method: str, version: str) -> None:
        """Start the request, or let it wait for those before it."""
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope |= {
            "method": method,
            "http_version": version,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
        }
        previous: EdgeCycle | None = self.cycle
        self.cycle = EdgeCycle(
            scope=self.scope,
            transport=AnswerTransport(self.transport, self._close_behind_answer, self.loop),
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if previous is None or previous.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        """Handle a part of the content."""
        self._size.num_content_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        if self._is_upgrading:
            return
        self._num_complete += 1
        super().on_message_complete()

    def _leave(self, refusal: EdgeRefusal) -> None:
        self._refusal = refusal
        raise _RefusedError

    # Answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        assert isinstance(cycle, EdgeCycle), "no other is made here"
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next request, or wait for it."""
        if self._running is not None:  # before anything else may be written, or end the connection
            self._running.flush()
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            self._shared.idle[self] = None
        self._abort_unless_taken()

    def _close_behind_answer(self) -> None:
        """Close, or wait until the client, which is still sending, has read its answer."""
        is_sending = self._num_begun > self._num_complete and not self._in_headers
        if self.pipeline or not is_sending or self.transport.is_closing():
            self.transport.close()
            return
        self._is_deaf = True
        self._await(None)
        self._linger()

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _refuse(self, refusal: EdgeRefusal) -> None:
        """Answer a broken bound, after the answers that are still to come, and end."""
        self._is_deaf = True
        self._await(None)
        self._shared.refused(refusal.code, self.client)
        has_cycle = self._num_begun > self._num_complete and not self._in_headers
        if has_cycle and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # it never began
            has_cycle = False
        if not has_cycle and self._is_answering():
            last = self.pipeline[0][0] if self.pipeline else self._running
            assert last is not None
            last.keep_alive = False
            return
        if has_cycle:
            answered = self.cycle.response_started
            self.cycle.leave()
            if answered:
                self.transport.close()
                self._abort_unless_taken()
                return
        self._say(refusal)

    def _turn_away(self) -> None:
        self._is_deaf = True
        self._shared.refused(refusals.TOO_MANY_CONNECTIONS.code, self.client)
        if len(self.connections) > self._bounds.max_connections * 9 // 8 + 8:
            self.transport.abort()  # too many even for an answer
            return
        self._say(refusals.TOO_MANY_CONNECTIONS)

    def _say(self, refusal: EdgeRefusal) -> None:
        self.transport.write(refusal.answer(self.server_state.default_headers))
        self._linger()

    def _linger(self) -> None:
        """Give the client time to read: closing at once would reset the connection on its next
        bytes."""
        self._is_lingering = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    # Time

    def _watch(self, *, has_completed: bool) -> None:
        """Set the timer for the event awaited now."""
        if self._num_begun > self._num_complete:
            self._await("headers" if self._in_headers else "body")
        elif self._is_answering() or self.transport.is_closing():
            self._await(None)
        elif has_completed:
            self._await(None)
            self._wait_idle()  # the answer was there before the request
        else:
            self._await("headers")  # blank lines, which may go before a request

    def _await(self, awaited: Awaited | None) -> None:
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited == "headers":
            self._timer = self.loop.call_later(self._bounds.header_timeout_s, self._headers_late)
        elif awaited == "body":
            self._body_start_s = self._last_part_s
            self._timer = self.loop.call_later(self._bounds.body_timeout_s, self._body_late)

    def _headers_late(self) -> None:
        if self._is_answering():
            self._awaited = None
            self._await("headers")  # it is our turn, not the client's
        elif self._in_headers:
            self._refuse(refusals.LATE_HEADERS)
        else:
            self.transport.close()

    def _body_late(self) -> None:
        """Refuse a body that has stopped, or is sent so slowly as to hold the connection."""
        now_s = self.loop.time()
        timeout_s = self._bounds.body_timeout_s
        if self.flow.read_paused:  # we let it wait
            self._body_start_s = self._last_part_s = now_s
        silent_s = now_s - self._last_part_s
        took_s = now_s - self._body_start_s
        num_bytes = self._size.num_bytes_of_body
        is_slow = num_bytes < _MIN_BODY_BYTES_PER_S * took_s and took_s >= timeout_s
        if silent_s >= timeout_s or is_slow:
            self._refuse(refusals.LATE_BODY)
            return
        self._timer = self.loop.call_later(timeout_s - silent_s, self._body_late)

    def pause_writing(self) -> None:
        """Stop writing: the client does not read its answer."""
        super().pause_writing()
        self._abort_later()

    def resume_writing(self) -> None:
        """Write again: the client reads its answer."""
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def _abort_unless_taken(self) -> None:
        """Abort if the client does not read the rest: a closing transport must not wait forever."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._abort_later()

    def _abort_later(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(
                self._bounds.write_timeout_s, self.transport.abort
            )


def edge_protocol(
    bounds: ConnectionBounds, metrics: EdgeMetrics | None = None
) -> type[asyncio.Protocol]:
    """Return the class for uvicorn's argument `http`, for one server."""
    shared = Connections(bounds=bounds, metrics=metrics)

    class BoundedProtocol(EdgeProtocol):
        """Connections of this server."""

        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, shared=shared)

    return BoundedProtocol
