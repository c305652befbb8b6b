"""An answer's HTTP response: its sending, its form, its end by disconnect, deadline or key."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, nullcontext
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outrider.engine.errors import EngineError
from outrider.gateway.answering.caching.answers import CachedAnswer
from outrider.gateway.answering.candidates.fallback import FallbackChain
from outrider.gateway.answering.streaming import sse
from outrider.gateway.contract.answers.responder import AnswerFacts
from outrider.gateway.contract.errors.http import Problem, problem_of
from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    DeadlineExceededError,
    GatewayError,
)
from outrider.gateway.contract.schema.errors import DeliveredReport
from outrider.gateway.contract.schema.header_text import header_text
from outrider.gateway.http.apis.api import EVENT_STREAM, TranslatedRequest
from outrider.gateway.http.edge.departure import until_departure
from outrider.gateway.http.server.veil import Veil
from outrider.gateway.tenancy.metering.meter import MeteredEnding, RequestMeter
from outrider.gateway.upstream.dialects.rewriting import splice

logger = logging.getLogger(__name__)


_STREAM_HEADERS: Final = {
    "content-type": EVENT_STREAM,
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
Work = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]


class LateResponse(Response):
    """A response whose headers and body are made while it is sent."""

    def __init__(self) -> None:
        """Skip Starlette's way, which writes the headers of an empty body."""
        self.status_code = HTTPStatus.OK.value
        self.background = None
        self.raw_headers = []


class WorkResponse(LateResponse):
    """A response that is made while it is sent, so that one context holds what both need."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Make and send it. Raises what the work raises."""
        return self._work(scope, receive, send)


class OnResponseEnd(Protocol):
    """Receives the end of a request."""

    def __call__(
        self,
        facts: AnswerFacts | None,
        outcome: str,
        status: int | None,
        error: BaseException | None = None,
    ) -> None:
        """Note it. `outcome` is "answered", "cancelled" or "failed"; `status` the one sent."""


class ClientFormat:
    """The format in which a client gets an answer: in its API's words, without what is hidden."""

    def __init__(
        self, veil: Veil | None = None, translated: TranslatedRequest | None = None
    ) -> None:
        self.hides_tiers = None if veil is None else veil.hides_tiers
        """Whether errors name no tiers; None where the key alone decides it."""
        self.stream_headers = _STREAM_HEADERS
        self._veil = veil
        self._writer = None if translated is None else translated.writer
        self._storage = None if translated is None else translated.storage
        if self._writer is not None:
            self.stream_headers = {**_STREAM_HEADERS, "content-type": self._writer.media_type}

    def part(self, part: bytes) -> bytes:
        """Return a part of a stream; may be empty. This runs for each token of each client."""
        if self._veil is not None:
            part = self._veil.event(part)
        return part if self._writer is None else self._writer.part(part)

    def whole(self, body: bytes) -> bytes:
        """Return an answer that is not streamed."""
        if self._veil is not None:
            body = self._veil.body(body)
        return body if self._writer is None else self._writer.whole(body)

    async def stored(self, sent: bytes, *, is_unchecked: bool) -> bytes:
        """Store the answer, if it may be kept, before its last bytes are sent; return these."""
        if self._storage is None:
            return sent
        if is_unchecked:
            self._storage.forbid()
        return await self._storage.store(sent)

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers that may be sent."""
        return headers if self._veil is None else self._veil.headers(headers)

    def ending_badly(self, problem: Problem, facts: AnswerFacts | None) -> bytes:
        """Return the error event that ends a stream, with what is known of its answer."""
        delivered = None if facts is None else _delivered(facts)
        if self._veil is not None:
            problem = self._veil.problem(problem)
            delivered = None if delivered is None else self._veil.delivered(delivered)
        if self._writer is not None:
            return self._writer.ending_badly(problem, delivered)
        body = problem.body()
        if delivered is not None:
            body = splice(body, "outrider", msgspec.json.encode(delivered))
        return sse.event(body)


_PLAIN: Final = ClientFormat()


class TimeLimit:
    """The time in which an answer may be sent: until its deadline, and while its key is valid.

    Entered, it cancels its task when the time is up, and raises TimeoutError. asyncio.timeout takes
    five times its instructions, and every answer has one.
    """

    def __init__(self, left_s: float | None) -> None:
        """`left_s`: seconds until the deadline; None: it has none."""
        self.has_expired = False
        self._left_s = left_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._num_cancels = 0
        self._key_error: AuthenticationError | None = None
        self._is_lifted = False

    def __enter__(self) -> None:
        """Begin."""
        self._task = task = asyncio.current_task()
        assert task is not None, "it is entered in a task"
        self._num_cancels = task.cancelling()
        if self._left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._expire)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End. Raises TimeoutError where the time's end alone has cancelled the task."""
        self._stop_timer()
        if self.has_expired and self._task is not None:
            num_cancels = self._task.uncancel()
            if num_cancels <= self._num_cancels and kind is asyncio.CancelledError:
                raise TimeoutError from error

    @property
    def error(self) -> GatewayError:
        """Return why the time is up, once it is."""
        return self._key_error or DeadlineExceededError(
            "The answer was not complete at the request's deadline."
        )

    def end_key(self, error: AuthenticationError) -> None:
        """End the answer, unless it is about to end by itself: its key is not valid any more."""
        if not self._is_lifted and not self.has_expired:
            self._key_error = error
            self._stop_timer()
            self._expire()

    async def lift(self, *, is_answered: bool) -> None:
        """Give the answer the time that it takes to send the rest: it is about to be paid for."""
        if not self.has_expired:
            self._stop_timer()
        elif is_answered:
            await asyncio.sleep(0)  # raises, where the end has not been seen yet
        self._is_lifted = True

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.has_expired = True
        if self._task is not None:
            self._task.cancel()


class AnswerResponse(LateResponse):
    """Sends a request's answer, as a stream or whole.

    Whatever fails before the first byte is raised, and becomes an HTTP error. After it, a stream
    ends with an error event and without [DONE]. When the client leaves, all work on the request is
    ended at once; so it is at its deadline, and when its key is revoked, expires or is removed.
    """

    def __init__(
        self,
        answering: FallbackChain | CachedAnswer,
        *,
        clock: Callable[[], float],
        meter: RequestMeter | None = None,
        format_: ClientFormat = _PLAIN,
        on_part: Sequence[Callable[[bytes], None]] = (),
        on_end: Sequence[OnResponseEnd] = (),
    ) -> None:
        """`on_part` get every part, as chat or completion. `meter` is settled before the last."""
        super().__init__()
        self.has_failed = False
        """True if a stream has ended by an error."""
        self._answering = answering
        self._meter = meter
        self._format = format_
        self._on_part = on_part
        self._on_end = on_end
        self._clock = clock
        self._arrival_s = clock()
        self._ending: MeteredEnding = "failed"
        self._error: Exception | None = None
        self._status: int | None = None
        self._facts: AnswerFacts | None = None

    @property
    def may_be_kept(self) -> bool:
        """Whether the answer may be sent again: no error ended it, and no check was skipped."""
        return not self.has_failed and not self._answering.is_unchecked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Raises GatewayError or EngineError before the first byte only."""
        request_id = scope.get("state", {}).get("request_id")
        try:
            await until_departure(scope, receive, self._send_in_time(send))
        except (ClientDisconnect, OSError):
            self._ending = "cancelled"
            logger.info("client left request_id=%s", request_id)
        except asyncio.CancelledError:
            self._ending = "cancelled"
            raise
        except Exception as error:
            await self._close_account("failed", error)
            if self._format.hides_tiers is not None:
                scope.setdefault("state", {})["hides_tiers"] = self._format.hides_tiers
            raise
        finally:
            if self._meter is not None:
                self._meter.end_in_background(self._ending)
            facts = self._facts or self._answering.facts
            for on_end in self._on_end:
                on_end(facts, self._ending, self._status, self._error)
            if facts is not None and logger.isEnabledFor(logging.INFO):
                _log_end(request_id, facts, self._clock() - self._arrival_s)

    async def _send_in_time(self, send: Send) -> None:
        """Send until the request's deadline, if it has one, and while its key is valid."""
        deadline_s = self._answering.deadline_s
        limit = TimeLimit(None if deadline_s is None else max(deadline_s - self._clock(), 0.0))
        meter = self._meter
        key = nullcontext() if meter is None else meter.while_key_lasts(limit.end_key)
        send_all = self._send_stream if self._answering.is_streamed else self._send_whole
        try:
            with key, limit:
                await send_all(send, limit)
        except TimeoutError:
            if not limit.has_expired:
                raise
            if self._status is None:
                raise limit.error from None
            # The request's deadline or its key ends it: the tokens that it got are paid for.
            await self._end_badly(send, limit.error, "cancelled")

    async def _send_whole(self, send: Send, limit: TimeLimit) -> None:
        async with aclosing(self._answering.parts()) as parts:
            body = b"".join([part async for part in parts])
        for on_part in self._on_part:
            on_part(body)
        body = self._format.whole(body)
        await self._finish(limit)
        body = await self._format.stored(body, is_unchecked=self._answering.is_unchecked)
        self._facts = self._answering.facts
        head = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(send, head)
        await send(_last_body(body))

    async def _send_stream(self, send: Send, limit: TimeLimit) -> None:
        """Send a stream. Its work is over before the account is settled, whatever ends it."""
        try:
            async with aclosing(self._answering.parts()) as parts:
                async for part in parts:  # this runs for each token of each client
                    if self._status is None:
                        # What fails before the first text has its own status.
                        await self._start(send, self._format.stream_headers)
                    is_last = part.endswith(sse.DONE) and sse.is_end(part)
                    if is_last:
                        await self._finish(limit)
                    for on_part in self._on_part:
                        on_part(part)
                    if sent := self._format.part(part):
                        if is_last:
                            is_unchecked = self._answering.is_unchecked
                            sent = await self._format.stored(sent, is_unchecked=is_unchecked)
                        await send({"type": "http.response.body", "body": sent, "more_body": True})
        except Exception as error:
            if self._status is None:
                raise
            is_late = isinstance(error, DeadlineExceededError)
            await limit.lift(is_answered=False)
            await self._end_badly(send, error, "cancelled" if is_late else "failed")
            if not isinstance(error, GatewayError | EngineError):
                raise
            return
        await self._finish(limit)
        await send(_last_body(b""))

    async def _finish(self, limit: TimeLimit) -> None:
        """Settle the account before the last byte is sent: the next request may follow at once.

        From here on the deadline cannot end a whole answer: it is paid for, so it is sent.
        """
        await limit.lift(is_answered=True)
        await self._close_account("answered")

    async def _close_account(self, ending: MeteredEnding, error: Exception | None = None) -> None:
        self._ending, self._error = ending, error
        if self._meter is not None:
            if error is not None:
                self._meter.note_error(error)
            await self._meter.end_and_wait(ending)

    async def _end_badly(self, send: Send, error: Exception, ending: MeteredEnding) -> None:
        """Send an error event instead of [DONE]; what was sent stands, and no more follows."""
        await self._close_account(ending, error)
        self.has_failed = True
        facts, problem = self._answering.facts, problem_of(error)
        logger.error(
            "stream failed job=%s code=%s error=%s",
            facts and facts.job_id,
            problem.code,
            type(error).__name__,
        )
        await send(_last_body(self._format.ending_badly(problem, facts)))

    async def _start(self, send: Send, head: Mapping[str, str]) -> None:
        """Send the headers, which name the tier: of a stream, the one that gives the first text."""
        facts = self._facts or self._answering.facts
        told = {} if facts is None else _headers(facts)
        told |= self._answering.headers
        if self._answering.arm:
            told["x-outrider-arm"] = self._answering.arm
        # Only these have words of requests and servers.
        headers = {**head, **{name: header_text(value) for name, value in told.items()}}
        if self._meter is not None:
            headers |= self._meter.headers
        sent = self._format.headers(headers)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            }
        )
        self._status = self.status_code


def _log_end(request_id: str | None, facts: AnswerFacts, duration_s: float) -> None:
    """Log one line a request, without any of its text."""
    logger.info(
        "answered request_id=%s job=%s tier=%s reason=%r hand_off=%s outcome=%s tokens=%d "
        "ttft_s=%s duration_s=%.3f",
        request_id,
        facts.job_id,
        facts.tier,
        facts.reason,
        facts.hand_off or "-",
        facts.outcome,
        facts.num_tokens,
        "-" if facts.ttft_s is None else f"{facts.ttft_s:.3f}",
        duration_s,
    )


def _delivered(facts: AnswerFacts) -> DeliveredReport:
    """Describe the answer that an error event ends."""
    return DeliveredReport(
        tier=facts.tier,
        reason=facts.reason,
        hand_off=facts.hand_off,
        degraded=facts.is_degraded,
        completion_tokens=facts.num_tokens,
    )


def _headers(facts: AnswerFacts) -> dict[str, str]:
    """Name the answering tier and the reason in headers."""
    headers = {"x-outrider-tier": facts.tier, "x-outrider-reason": facts.reason}
    if facts.hand_off is not None:
        headers["x-outrider-hand-off"] = facts.hand_off
    if facts.confidence is not None:
        headers["x-outrider-confidence"] = f"{facts.confidence:.4f}"
    if facts.is_degraded:
        headers["x-outrider-degraded"] = "true"
    return headers


def _last_body(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body}
