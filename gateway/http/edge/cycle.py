"""One request and its answer on a connection."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final, cast

from uvicorn._types import ASGISendEvent, HTTPResponseStartEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from outrider.gateway.http.edge.answer_transport import AnswerTransport
from outrider.gateway.http.edge.cors import Header
from outrider.gateway.http.edge.departure import EXTENSION, Departure

_NAME_BYTES: Final = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
"""Names are in lower case, as ASGI wants them (RFC 9110, section 5.6.2)."""
_VALUE_BYTES: Final = bytes([9, *range(32, 127), *range(128, 256)])
"""No control character but the tab (section 5.5): a line break would begin another header."""
_WITHOUT_BODY: Final = frozenset({204, 304})


class EdgeCycle(RequestResponseCycle):
    """uvicorn's, which tells of its client's departure and checks all headers of a head at once."""

    def __init__(self, *, transport: AnswerTransport, **parts: Any) -> None:
        """`parts`: uvicorn's own."""
        super().__init__(transport=cast("asyncio.Transport", transport), **parts)
        self.flush = transport.flush
        """Writes what the transport holds back."""
        self._writes_chunks = False
        """The length of the body is not known before its end."""
        self._departure = Departure(self.flow.resume_reading)
        cast("dict[str, Any]", self.scope)["extensions"] = {EXTENSION: self._departure}

    def leave(self) -> None:
        """Tell the request's work that the client has left."""
        self.disconnected = True
        self.message_event.set()
        self._departure.happen()

    def send(self, message: ASGISendEvent) -> Coroutine[Any, Any, None]:
        """Send a part of the answer; see ASGI. No coroutine of its own: it runs for each chunk."""
        if message["type"] == "http.response.body":
            is_last = self.response_complete or not message.get("more_body")
            if self._writes_chunks and not is_last:
                return self._write_chunk(message.get("body", b""))
        elif message["type"] == "http.response.start" and not (
            self.response_started or self.access_log
        ):
            return self._begin(message)
        return super().send(message)

    async def _write_chunk(self, body: bytes) -> None:
        """Write a part of a body that is not its last."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if body and not self.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    async def _begin(self, message: HTTPResponseStartEvent) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self.response_started = True
            self.waiting_for_100_continue = False
            headers = [*self.default_headers, *message.get("headers", ())]
            self._write_head(message["status"], headers)

    def _write_head(self, status: int, headers: Sequence[Header]) -> None:
        """Write the status line and all headers. Raises RuntimeError for what HTTP forbids."""
        names, values = zip(*headers, strict=True) if headers else ((), ())
        wrong = b"".join(names).translate(None, _NAME_BYTES)
        if wrong or b"".join(values).translate(None, _VALUE_BYTES):
            raise RuntimeError("The answer has a header that HTTP forbids.")
        given = dict(headers)
        if (length := given.get(b"content-length")) is not None:
            self.chunked_encoding = False
            self.expected_content_length = int(length)
        elif given.get(b"transfer-encoding") == b"chunked":
            self.chunked_encoding = True
        is_closed = given.get(b"connection") == b"close"
        self.keep_alive = self.keep_alive and not is_closed
        head = [STATUS_LINE[status]]
        head += [part for name, value in headers for part in (name, b": ", value, b"\r\n")]
        if not (self.keep_alive or is_closed):
            head.append(b"connection: close\r\n")
        has_body = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        if self.chunked_encoding is None and has_body:
            self.chunked_encoding = True
            head.append(b"transfer-encoding: chunked\r\n")
        self._writes_chunks = has_body and bool(self.chunked_encoding)
        head.append(b"\r\n")
        self.transport.write(b"".join(head))
