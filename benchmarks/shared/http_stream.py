"""A thin client for streamed chat completions: a library's own work must not count as latency."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

_END = b"data: [DONE]"


class StreamError(Exception):
    """The gateway answered with something other than a stream."""


@dataclass(slots=True, kw_only=True)
class StreamedAnswer:
    """One answer. `arrivals`: when its events arrived, in seconds of time.perf_counter."""

    sent_s: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first event."""
        return self.arrivals[0] - self.sent_s


class ChatConnection:
    """One kept-alive connection: one request at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> "ChatConnection":
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()

    async def chat(self, request: dict[str, Any]) -> StreamedAnswer:
        """Send a request and read its stream. Raises StreamError."""
        assert self._writer is not None
        body = json.dumps(
            request | {"stream": True, "stream_options": {"include_usage": True}}
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        answer = StreamedAnswer(sent_s=time.perf_counter())
        self._writer.write(head.encode() + body)
        events: list[bytes] = []
        async for event in self._events():
            answer.arrivals.append(time.perf_counter())
            events.append(event)
        # Parsed after the clock has stopped.
        for event in events[:-1]:
            document = json.loads(event.removeprefix(b"data: "))
            for choice in document["choices"]:
                answer.text += choice["delta"].get("content") or ""
            if document.get("usage"):
                answer.num_tokens = document["usage"]["completion_tokens"]
        # The usage and [DONE] are no tokens.
        del answer.arrivals[-2:]
        return answer

    async def _events(self) -> AsyncIterator[bytes]:
        """Server-sent events, the final [DONE] included."""
        reader = self._reader
        assert reader is not None
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        if b" 200 " not in lines[0] or b"transfer-encoding: chunked" not in lines:
            raise StreamError(head.decode(errors="replace"))
        pending = b""
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            chunk = await reader.readexactly(size + 2)
            if size == 0:
                return
            *complete, pending = (pending + chunk[:-2]).split(b"\n\n")
            for event in complete:
                yield event
