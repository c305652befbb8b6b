"""HTTP beneath the endpoints: bodies, disconnects, and an answer's response."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from http import HTTPStatus
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
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    DeadlineExceededError,
    GatewayError,
)
from outrider.gateway.contract.schema.header_text import header_text
from outrider.gateway.http.apis.api import AnswerWriter
from outrider.gateway.http.edge.departure import watch_departure
from outrider.gateway.http.server.veil import Veil
from outrider.gateway.telemetry.capture import Recording
from outrider.gateway.tenancy.metering.meter import MeteredEnding, RequestMeter
from outrider.gateway.upstream.dialects.rewriting import splice

logger = logging.getLogger(__name__)


_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
Work = Callable[[Scope, Receive, Send], Awaitable[None]]


async def until_departure(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it as soon as the client leaves. The request's body must be read already.

    Raises ClientDisconnect when the client left first. `work` runs in this task: a task of its own,
    and waiting for it, would cost each request some hundredths of a millisecond.
    """
    worker = asyncio.current_task()
    assert worker is not None, "it is awaited in a task"
    num_cancels = worker.cancelling()
    has_left = False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        worker.cancel()

    end_watch = watch_departure(scope, receive, leave)
    try:
        await work
    except (Exception, asyncio.CancelledError):
        if not has_left:
            raise
    finally:
        end_watch()
    if has_left:
        if worker.uncancel() > num_cancels:
            raise asyncio.CancelledError  # the request was cancelled as well
        raise ClientDisconnect


class LateResponse(Response):
    """A response whose headers and body are made while it is sent."""

    def __init__(self) -> None:
        """Not Starlette's way, which writes the headers of an empty body."""
        self.status_code = HTTPStatus.OK.value
        self.background = None
        self.raw_headers = []


class WorkResponse(LateResponse):
    """A response that is made while it is sent, so that one context holds what both need."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make and send it. Raises what the work raises."""
        await self._work(scope, receive, send)


class OutcomeObserver(Protocol):
    """Receives the outcome of a request."""

    def observe_end(
        self,
        facts: AnswerFacts | None,
        outcome: str,
        status: int | None,
        error: BaseException | None = None,
    ) -> None:
        """Note it. `outcome` is "answered", "cancelled" or "failed"; `status` the one sent."""


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
        writer: AnswerWriter | None = None,
        outcome: OutcomeObserver | None = None,
        recording: Recording | None = None,
        veil: Veil | None = None,
    ) -> None:
        """`meter` and `outcome` get the ending. `writer` translates to another API's format.

        `recording` gets every part, as chat or completion. `veil` hides what the client may not
        see.
        """
        super().__init__()
        self.has_failed = False
        """True if a stream has ended by an error."""
        self._answering = answering
        self._meter = meter
        self._writer = writer
        self._outcome = outcome
        self._recording = recording
        self._veil = veil
        self._error: Exception | None = None
        self._ending: MeteredEnding = "failed"
        self._clock = clock
        self._arrival_s = clock()
        self._has_started = False
        self._is_finishing = False
        self._facts: AnswerFacts | None = None
        self._key_error: AuthenticationError | None = None
        self._limit: asyncio.Timeout | None = None

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
            self._error = error
            await self._finish("failed", error)
            if self._veil is not None:
                scope.setdefault("state", {})["hides_tiers"] = self._veil.hides_tiers
            raise
        finally:
            if self._meter is not None:
                self._meter.end(self._ending)
            facts = self._facts or self._answering.facts
            self._report_outcome(facts)
            if facts is not None and logger.isEnabledFor(logging.INFO):
                self._log_end(request_id, facts)

    async def _send_in_time(self, send: Send) -> None:
        """Send until the request's deadline, if it has one, and while its key is valid."""
        deadline_s = self._answering.deadline_s
        left_s = None if deadline_s is None else max(deadline_s - self._clock(), 0.0)
        try:
            with self._while_key_lasts():
                async with asyncio.timeout(left_s) as limit:
                    self._limit = limit
                    await self._send(send)
        except TimeoutError:
            if not limit.expired():
                raise
            error = self._key_error or DeadlineExceededError(
                "The answer was not complete at the request's deadline."
            )
            if not self._has_started:
                raise error from None
            # The request's deadline or its key ends it: the tokens that it got are paid for.
            await self._end_badly(send, error, "cancelled")
        finally:
            self._limit = None

    def _while_key_lasts(self) -> AbstractContextManager[None]:
        return nullcontext() if self._meter is None else self._meter.while_key_lasts(self._end_key)

    def _end_key(self, error: AuthenticationError) -> None:
        """End the answer, unless it is about to end by itself: its key is not valid any more."""
        if self._limit is not None and not self._is_finishing and not self._limit.expired():
            self._key_error = error
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def _send(self, send: Send) -> None:
        if self._answering.is_streamed:
            await self._send_stream(send)
        else:
            await self._send_whole(send)

    async def _send_whole(self, send: Send) -> None:
        async with aclosing(self._answering.parts()) as parts:
            body = b"".join([part async for part in parts])
        if self._recording is not None:
            self._recording.add(body)
        if self._veil is not None:
            body = self._veil.body(body)
        if self._writer is not None:
            body = self._writer.whole(body)
        await self._finish("answered")
        self._facts = self._answering.facts
        await self._start(
            send,
            {"content-type": "application/json", "content-length": str(len(body))},
        )
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        """Send a stream. Its work is over before the account is settled, whatever ends it."""
        try:
            async with aclosing(self._answering.parts()) as parts:
                # Headers wait for the first text, so that what fails until then has its own status.
                first = await anext(parts)
                await self._start(send, _STREAM_HEADERS)
                await self._send_part(send, first)
                async for part in parts:
                    await self._send_part(send, part)
        except Exception as error:
            if not self._has_started:
                raise
            is_late = isinstance(error, DeadlineExceededError)
            await self._end_badly(send, error, "cancelled" if is_late else "failed")
            if not isinstance(error, GatewayError | EngineError):
                raise
            return
        await self._finish("answered")
        await send({"type": "http.response.body", "body": b""})

    async def _finish(self, ending: MeteredEnding, error: Exception | None = None) -> None:
        """Settle the account before the last byte is sent: the next request may follow at once.

        From here on the deadline cannot end a whole answer: it is paid for, so it is sent.
        """
        if self._limit is not None:
            if not self._limit.expired():
                self._limit.reschedule(None)
            elif ending == "answered":
                await asyncio.sleep(0)  # raises, where the end has not been seen yet
        self._is_finishing = True
        self._ending = ending
        if self._meter is not None:
            if error is not None:
                self._meter.failed_by(error)
            await self._meter.finish(ending)

    async def _send_part(self, send: Send, part: bytes) -> None:
        """Send a part, recorded and translated. This runs for each token of each client."""
        if part.endswith(sse.DONE) and sse.is_end(part):
            await self._finish("answered")
        if self._recording is not None:
            self._recording.add(part)
        if self._veil is not None:
            part = self._veil.event(part)
        if self._writer is not None:
            part = self._writer.part(part)
            if not part:
                return
        await send({"type": "http.response.body", "body": part, "more_body": True})

    async def _end_badly(
        self, send: Send, error: Exception, ending: MeteredEnding = "failed"
    ) -> None:
        """Send an error event instead of [DONE]; what was sent stands, and no more follows."""
        await self._finish(ending, error)
        self.has_failed = True
        self._error = error
        problem = problem_of(error)
        if self._veil is not None:
            problem = self._veil.problem(problem)
        facts = self._answering.facts
        logger.error(
            "stream failed job=%s code=%s error=%s",
            facts and facts.job_id,
            problem.code,
            type(error).__name__,
        )
        delivered = None if facts is None else _delivered(facts)
        if delivered is not None and self._veil is not None:
            delivered = self._veil.report(delivered)
        if self._writer is not None:
            await send(_last_body(self._writer.ending_badly(problem, delivered)))
            return
        body = problem.body()
        if delivered is not None:
            body = splice(body, "outrider", msgspec.json.encode(delivered))
        await send(_last_body(sse.event(body)))

    async def _start(self, send: Send, form: Mapping[str, str]) -> None:
        """Send the headers, which name the tier: of a stream, the one that gives the first text."""
        headers = dict(form)
        if facts := self._facts or self._answering.facts:
            headers |= _headers(facts)
        headers |= self._answering.headers
        if self._answering.arm:
            headers["x-outrider-arm"] = self._answering.arm
        if self._meter is not None:
            headers |= self._meter.headers
        if self._veil is not None:
            headers = self._veil.headers(headers)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": [(n.encode(), header_text(v).encode()) for n, v in headers.items()],
            }
        )
        self._has_started = True

    def _report_outcome(self, facts: AnswerFacts | None) -> None:
        if self._outcome is not None:
            status = self.status_code if self._has_started else None
            self._outcome.observe_end(facts, self._ending, status, self._error)

    def _log_end(self, request_id: str | None, facts: AnswerFacts) -> None:
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
            self._clock() - self._arrival_s,
        )


def _delivered(facts: AnswerFacts) -> dict[str, Any]:
    """Describe the answer that an error event ends."""
    return {
        "tier": facts.tier,
        "reason": facts.reason,
        "hand_off": facts.hand_off,
        "degraded": facts.is_degraded,
        "completion_tokens": facts.num_tokens,
    }


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
