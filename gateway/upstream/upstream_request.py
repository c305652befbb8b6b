"""One request to one replica, from the moment it is sent to the moment it is booked."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from outrider.gateway.contract.errors.tree import (
    DeadlineExceededError,
    FailureKind,
    GatewayError,
    LoopError,
    UpstreamError,
    UpstreamRefusalError,
)
from outrider.gateway.upstream.attempt_record import AttemptRecord
from outrider.gateway.upstream.attempts import AttemptKind, AttemptOutcome
from outrider.gateway.upstream.call import HOPS_HEADER, Chunk, UpstreamCall, WholeAnswer
from outrider.gateway.upstream.credentials.base import CredentialError, SignedRequest
from outrider.gateway.upstream.dialects.base import ReportedError, is_refusal
from outrider.gateway.upstream.replicas import Lease, Replica
from outrider.gateway.upstream.retry_after import asked_wait_s
from outrider.gateway.upstream.tier_parts import TierState
from outrider.gateway.upstream.upstream_usage import UpstreamUsage

if TYPE_CHECKING:  # at run time it would import aiohttp, also where there are no upstream tiers
    from outrider.gateway.upstream.response import UpstreamResponse

DONE_CHUNK: Final = Chunk(raw=b"data: [DONE]\n\n", is_done=True)

_MAX_REFUSAL_BYTES: Final = 65_536
_MAX_HEAD_BYTES: Final = 4 << 20
"""Bytes kept of the events before the first token."""
_CHUNK_BYTES: Final = 256
"""Bytes to keep an event beside its own."""
_LAST_BYTES_S: Final = 1.0
"""Seconds for the end of a response after its answer: its usage, and its connection's reuse."""
_BAD_REQUEST: Final = 400
_NOT_TRUSTED: Final = frozenset({401, 403})
_LOOP_DETECTED: Final = 508


class UpstreamRequest:
    """One request to one replica. It is booked exactly once, however it ends.

    To be made right after `ReplicaSet.pick`, without an await between: it counts as in flight from
    here. Then `start`, and for a stream `chunks`, else `finish`. Its creator calls `aclose`
    in the end.
    """

    __slots__ = (
        "_body",
        "_call",
        "_events",
        "_head",
        "_lease",
        "_reader",
        "_record",
        "_response",
        "_tier",
        "given_up_as",
        "whole",
    )

    def __init__(
        self,
        tier: TierState,
        call: UpstreamCall,
        replica: Replica,
        *,
        kind: AttemptKind,
        body: bytes,
        num_repeated_tokens: int = 0,
    ) -> None:
        """Store the arguments. `num_repeated_tokens` at the start are of the attempt before."""
        self._tier = tier
        self._call = call
        self._body = body
        self.given_up_as: AttemptOutcome = "cancelled"
        """The outcome if it is given up before its end."""
        self.whole: WholeAnswer | None = None
        """The answer, if it is not streamed."""
        self._response: UpstreamResponse | None = None
        self._events: AsyncGenerator[bytes] | None = None
        self._head: list[Chunk] = []
        self._reader = tier.parts.dialect.chunk_reader(call)
        self._lease: Lease = replica.begin(is_streamed=call.is_streamed)
        self._record = AttemptRecord(
            tier, call, self._lease, kind=kind, num_repeated_tokens=num_repeated_tokens
        )

    @property
    def replica(self) -> Replica:
        """Return the replica of the request."""
        return self._lease.replica

    @property
    def first_token_s(self) -> float | None:
        """Return the time of a stream's first token, on the clock."""
        return self._lease.first_token_s

    @property
    def num_written_tokens(self) -> int:
        """Return the whole answer's tokens so far, by this attempt or by the one it repeats."""
        return max(self.usage.num_completion_tokens, self._record.num_repeated_tokens)

    @property
    def usage(self) -> UpstreamUsage:
        """Return the usage so far. Counts the text again until it is booked."""
        return self._record.usage

    async def start(self) -> None:
        """Send it; wait for the first chunk with text, or for all of an unstreamed answer.

        Raises UpstreamError, UpstreamRefusalError, LoopError or DeadlineExceededError; then it is
        over and booked.
        """
        try:
            response = await self._post()
            if self._call.is_streamed:
                await self._read_head(response)
            else:
                body = await response.read()
                self.whole = self._tier.parts.dialect.whole(self._call, body)
                self._record.add_whole(self.whole)
        except BaseException as error:
            told = self._reported_error(error)
            await self._end_by(told)
            if told is error:
                raise
            raise told from error

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Yield the chunks from the first to [DONE], which is added where the server omits it.

        Raises UpstreamError or DeadlineExceededError; then, and when it is closed early, it is over
        and booked.
        """
        assert self._events is not None, "start comes first"
        read, add = self._reader.read, self._record.meter.add
        done = None
        try:
            for chunk in self._head:
                yield chunk
            async for event in self._events:
                chunk = read(event)
                add(chunk)
                if chunk.is_done:
                    done = chunk
                    break
                yield chunk
        except (UpstreamError, DeadlineExceededError) as error:
            # A stream that breaks after the last word is complete.
            if not self._reader.is_complete:
                await self._end_by(error)
                raise
        except BaseException as error:
            await self._end_by(error)
            raise
        if done is None and not self._reader.is_complete:
            early = self._error("ended_early", "broke off in the middle of its answer")
            await self._end_by(early)
            raise early
        self.finish()
        try:
            yield done or DONE_CHUNK
        finally:
            await self.aclose()

    def finish(self) -> None:
        """End a complete answer, the one that is delivered."""
        if self._record.is_booked:
            return
        total_s = self._tier.parts.clock() - self._lease.started_s
        self._tier.total.add(total_s)
        if not self._call.is_streamed:
            self._tier.whole.add(total_s)
        self._lease.succeeded()
        self._record.book("answered")

    async def aclose(self, failure: str | None = None) -> None:
        """Release it, at any time and also more than once.

        An unfinished request is booked as `given_up_as`, or as failed by `failure`.
        """
        is_lost = self.given_up_as in ("lost", "escalated")
        is_whole = self._reader.is_complete and not is_lost and failure is None
        try:
            if is_whole:
                await self._read_usage()
        finally:  # also where this is cancelled in turn: every request must be booked
            if is_whole:
                self.finish()
            self._give_up("failed" if failure is not None else self.given_up_as, failure)
            await self._release()

    def _give_up(self, outcome: AttemptOutcome, failure: str | None) -> None:
        """Book it, unless it has come to its end."""
        is_lost = self.given_up_as == "lost"
        if is_lost and self.first_token_s is None and not self._lease.is_ended:
            # Otherwise only the winners' times would be known, and ever shorter ones would count as
            # late.
            learned = self._tier.first_token if self._call.is_streamed else self._tier.whole
            learned.add_at_least(self._tier.parts.clock() - self._lease.started_s)
        self._lease.cancelled()
        self._record.book(outcome, failure)

    def without(self, chunk: Chunk) -> None:
        """Take back the last chunk: it was read and not delivered, so the client does not pay for
        it."""
        self._record.meter.take_back(chunk)

    async def _read_usage(self) -> None:
        """Read the usage that the server reports after a complete answer."""
        if self._record.is_booked or self._events is None:
            return
        # A cancelled task that has not left the events yet still reads them.
        with suppress(TimeoutError, UpstreamError, DeadlineExceededError, RuntimeError):
            async with asyncio.timeout(_LAST_BYTES_S):
                async for event in self._events:
                    self._record.meter.add(self._reader.read(event))

    async def _post(self) -> "UpstreamResponse":
        """Send it, and wait for the headers of a successful answer."""
        tier, call = self._tier, self._call
        url = self.replica.url + tier.parts.dialect.path(call.endpoint)
        headers = dict(tier.headers)
        if tier.traits.takes_request_id:
            headers["x-request-id"] = call.request_id
        if call.hops:
            headers[HOPS_HEADER] = ", ".join(call.hops)
        headers.update(self._record.span.headers())
        response, signature = await self._signed(url, headers)
        if response.status in _NOT_TRUSTED and await tier.credential.renew(signature):
            await self._release()  # the key was changed: once more, with the new one
            response, _ = await self._signed(url, headers)
        if not 200 <= response.status < 300:
            raise await self._complaint(response)
        return response

    async def _signed(
        self, url: str, headers: Mapping[str, str]
    ) -> tuple["UpstreamResponse", Mapping[str, str]]:
        """Sign it and send it; return the response and the signature's headers."""
        tier = self._tier
        request = SignedRequest(method="POST", url=url, headers=headers, body=self._body)
        try:
            signature = await tier.credential.headers(request)
        except CredentialError as error:
            raise self._error("no_credential", f"cannot be signed in to: {error}") from error
        response = await tier.parts.transport.post(
            url, {**headers, **signature}, self._body, deadline_s=self._call.deadline_s
        )
        self._response = response
        self._record.status = response.status
        return response, signature

    async def _complaint(self, response: "UpstreamResponse") -> GatewayError:
        """Return the error for a status that is no success."""
        status = response.status
        if status == _LOOP_DETECTED:
            return LoopError(f"The {self._tier.name} tier leads back to this gateway.")
        if is_refusal(status):
            body = b""
            with suppress(UpstreamError):  # its status alone says enough
                body = await response.read(limit_bytes=_MAX_REFUSAL_BYTES)
            refusal = self._tier.parts.dialect.refusal(status, body)
            return UpstreamRefusalError(
                refusal.message,
                status=status,
                body=refusal.body,
                tier=self._tier.name,
                replica=self.replica.name,
            )
        if status in (401, 403):
            return self._error("not_trusted", f"rejects the key of this gateway (status {status})")
        if status == 429:
            return self._error("throttled", "limits the rate of requests (status 429)")
        return self._error("status", f"answered with status {status}")

    def _error(self, failure: FailureKind, what: str) -> UpstreamError:
        """Return a failure of this request; `what` continues the sentence "The cloud tier"."""
        return UpstreamError(
            f"The {self._tier.name} tier {what}.",
            failure=failure,
            replica=self.replica.name,
            status=self._record.status,
            retry_after_s=asked_wait_s(self._response.headers) if self._response else None,
        )

    async def _read_head(self, response: "UpstreamResponse") -> None:
        """Read until the first chunk with text, or the end of an answer without any."""
        clock = self._tier.parts.clock
        allowed_s = self._tier.settings.timeouts.first_token_s
        self._events = response.events()
        num_bytes = 0
        async for event in self._events:
            chunk = self._reader.read(event)
            if chunk.is_done:
                break  # that alone is no answer
            self._record.meter.add(chunk)
            self._head.append(chunk)
            if chunk.has_text or chunk.finish_reason is not None:
                self._lease.got_first_token()
                assert self._lease.first_token_s is not None
                waited_s = self._lease.first_token_s - self._lease.started_s
                self._tier.first_token.add(waited_s)
                return
            num_bytes += len(event) + _CHUNK_BYTES
            if num_bytes > _MAX_HEAD_BYTES:
                raise self._error("too_large", f"sent {len(self._head)} events and no token")
            # Comments and a role without text keep the connection alive, but are no answer.
            if clock() - self._lease.started_s > allowed_s:
                raise self._error("first_token_timeout", f"sent no token within {allowed_s:g} s")
        raise self._error("ended_early", "ended its answer before it had begun")

    async def _end_by(self, error: BaseException) -> None:
        """Book the error that ended it, and release the connection."""
        failure: str | None = None
        outcome: AttemptOutcome = "failed"
        match error:
            case UpstreamRefusalError() | LoopError():
                self._lease.succeeded()
                outcome = "refused"
            case ReportedError() if error.refusal is not None:
                error.replica = error.replica or self.replica.name
                failure, outcome = error.failure, "refused"
            case UpstreamError():
                error.replica = error.replica or self.replica.name
                failure = error.failure
                if error.blames_server or failure == "throttled":
                    self._lease.failed(error.failure, error.asked_wait_s)
            case DeadlineExceededError():
                outcome, failure = "cancelled", error.code
            case asyncio.CancelledError() | GeneratorExit():
                await self.aclose()
        self._lease.cancelled()
        self._record.book(outcome, failure)
        await self._release()

    def _reported_error(self, error: BaseException) -> BaseException:
        """Return the error as callers see it."""
        if isinstance(error, ReportedError) and error.refusal is not None:
            return UpstreamRefusalError(
                error.refusal.message,
                status=error.status or _BAD_REQUEST,
                body=error.refusal.body,
                tier=self._tier.name,
                replica=self.replica.name,
            )
        return error

    async def _release(self) -> None:
        """Give the connection back if the answer was read, else cut it."""
        response, events = self._response, self._events
        self._response = self._events = None
        if response is None:
            return
        try:
            if events is not None and self._reader.is_complete:
                await _drain(events)
        finally:
            if events is not None:
                # A cancelled task that has not left it yet will close it.
                with suppress(RuntimeError):
                    await events.aclose()
            await response.aclose()


async def _drain(events: AsyncGenerator[bytes]) -> None:
    """Read the short rest of a response, so that its connection can be used again."""
    with suppress(TimeoutError, UpstreamError, DeadlineExceededError):
        async with asyncio.timeout(_LAST_BYTES_S):
            async for _ in events:
                pass
