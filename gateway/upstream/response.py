"""The answer of a server, read as it arrives and never waited for longer than allowed."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Final

import aiohttp

from outrider.gateway.contract.errors.tree import FailureKind, UpstreamError
from outrider.gateway.upstream.connection_errors import error_of
from outrider.gateway.upstream.event_stream import EventSplitter
from outrider.gateway.upstream.waits import ExchangeLimits, WaitTimer

MAX_EVENT_BYTES: Final = 4 << 20
MAX_BODY_BYTES: Final = 32 << 20
MAX_STREAM_BYTES: Final = 512 << 20
_EVENTS_IN_A_ROW: Final = 64
_EVENT_STREAM: Final = "text/event-stream"
_COMMENT: Final = b":"


class UpstreamResponse:
    """Status and headers that have come, and a body that can be read once.

    Header names are lower-case. Reading to the end gives the connection back to the pool; closing
    early cuts it, which tells the server to stop. `aclose` must be called if the body is not read.
    """

    def __init__(self, answer: aiohttp.ClientResponse, exchange: ExchangeLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer = answer
        self._exchange = exchange
        self._end_s = exchange.end_s
        self._timer = WaitTimer(self._loop, self._stop_waiting)
        self._due_s = math.inf
        self._failure: FailureKind = "first_token_timeout"
        self.status: int = answer.status
        self.headers: Mapping[str, str] = {
            name.lower(): value for name, value in answer.headers.items()
        }
        self.replica: str = exchange.replica

    async def read(self, *, limit_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the whole body.

        Raises UpstreamError (first_token_timeout until it begins, then between_tokens_timeout, for
        what has begun comes at once; total_timeout, too_large, reset, garbage) and
        DeadlineExceededError.
        """
        pieces = []
        num_bytes = 0
        failure: FailureKind = "first_token_timeout"
        due_s = self._exchange.first_token_s
        between_s = self._exchange.timeouts.between_tokens_s
        try:
            while data := await self._next(due_s, failure):
                num_bytes += len(data)
                if num_bytes > limit_bytes:
                    raise self._too_large("a body", limit_bytes)
                pieces.append(data)
                failure = "between_tokens_timeout"
                due_s = self._loop.time() + between_s
        finally:
            self._close()
        return b"".join(pieces)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield whole server-sent events as they came, each with its blank line; comments too.

        Raises UpstreamError (content_type; first_token_timeout until the first event that is no
        comment, then between_tokens_timeout; total_timeout, too_large, reset, garbage) and
        DeadlineExceededError. Time in which no reader waits for an event does not count as the
        server's silence. A body that ends cleanly just ends.
        """
        splitter = EventSplitter()
        num_bytes = 0
        has_begun = False
        failure: FailureKind = "first_token_timeout"
        due_s = self._exchange.first_token_s
        between_s = self._exchange.timeouts.between_tokens_s
        try:
            self._check_content_type()
            while data := await self._next(due_s, failure):
                # A comment shows that the connection lives, not that an answer is written.
                has_token = False
                num_bytes += len(data)
                for number, event in enumerate(splitter.push(data), 1):
                    has_token = has_token or not event.startswith(_COMMENT)
                    yield event
                    if not number % _EVENTS_IN_A_ROW:
                        await asyncio.sleep(0)  # others have a turn
                has_begun = has_begun or has_token
                if splitter.num_held_bytes > MAX_EVENT_BYTES:
                    raise self._too_large("an event", MAX_EVENT_BYTES)
                if not has_begun and num_bytes > MAX_EVENT_BYTES:
                    raise self._too_large("comments", MAX_EVENT_BYTES)
                if num_bytes > MAX_STREAM_BYTES:
                    raise self._too_large("a stream", MAX_STREAM_BYTES)
                if has_token:
                    failure = "between_tokens_timeout"
                    due_s = self._loop.time() + between_s
            for event in splitter.finish():
                yield event
        finally:
            self._close()

    def give_up(self) -> None:
        """End also a wait that is under way, by an UpstreamError (reset)."""
        self._answer.content.set_exception(self._exchange.given_up())

    async def aclose(self) -> None:
        """Cut the connection if the body was not read to its end; may be called again."""
        self._close()

    async def _next(self, due_s: float, failure: FailureKind) -> bytes:
        """Return the bytes that have come, at least one; none at the end of the body."""
        end_s = self._end_s
        if self._loop.time() >= end_s:
            raise self._exchange.late(end_s, failure)
        self._due_s, self._failure = min(due_s, end_s), failure
        self._timer.wait_until(self._due_s)
        content = self._answer.content
        try:
            return await content.readany()
        except (aiohttp.ClientError, OSError) as error:
            # Bytes that came before the connection broke are still unread: first things first. The
            # next call meets the error again. The public way to them raises it before.
            if received := content._read_nowait(-1):
                return received
            raise error_of(error, self._exchange) from error
        finally:
            self._timer.rest()

    def _stop_waiting(self) -> None:
        """End the wait of `_next` by an exception: the server is too late."""
        self._answer.content.set_exception(self._exchange.late(self._due_s, self._failure))

    def _check_content_type(self) -> None:
        kind = self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != _EVENT_STREAM:
            raise self._exchange.error(
                "content_type",
                f"answered a request for an event stream with {kind[:64] or 'no content type'!r}",
                status=self.status,
            )

    def _too_large(self, what: str, limit_bytes: int) -> UpstreamError:
        return self._exchange.error("too_large", f"sent {what} of more than {limit_bytes} bytes")

    def _close(self) -> None:
        self._timer.close()
        # A connection that is back in the pool already is left alone.
        self._answer.close()
