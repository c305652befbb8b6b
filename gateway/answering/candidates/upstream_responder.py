"""Passes an upstream server's bytes on, and puts the report in at the end."""

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from typing import Any, Final

import msgspec

from outrider.gateway.answering.candidates.failures import CutShortError
from outrider.gateway.answering.streaming.answer_report import rounded
from outrider.gateway.answering.streaming.sse import DONE, event
from outrider.gateway.contract.answers.responder import (
    AnswerEscalated,
    AnswerFacts,
    PartialAnswer,
    Place,
    RouteReason,
)
from outrider.gateway.contract.schema.kinds import FallbackKind
from outrider.gateway.contract.schema.responses import UpstreamReport
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance
from outrider.gateway.upstream.answer import UpstreamAnswer
from outrider.gateway.upstream.attempts import AttemptKind
from outrider.gateway.upstream.call import Chunk, UpstreamCall, WholeAnswer, num_answers
from outrider.gateway.upstream.dialects.rewriting import id_of, splice, with_id
from outrider.gateway.upstream.event_stream import event_data
from outrider.gateway.upstream.redaction import redact
from outrider.gateway.upstream.tally import Tally
from outrider.gateway.upstream.tier import UpstreamTier
from outrider.gateway.upstream.upstream_usage import UpstreamUsage
from outrider.gateway.upstream.usage import cost_usd, usage_object

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode
_CONTEXT_SLACK: Final = 16
"""Tokens that servers leave free at the end of a context."""


class UpstreamResponder:
    """Answers by an upstream tier."""

    escalated_to: Place | None = None

    def __init__(  # noqa: PLR0913 - all but the first three by keyword
        self,
        tier: UpstreamTier,
        call: UpstreamCall,
        origin: RouteReason,
        on_answered: Callable[["UpstreamResponder"], None] = lambda responder: None,
        is_continuable: bool = False,
        secrets: Collection[str] = (),
        allowance: TokenAllowance | None = None,
        is_bounded: bool = False,
        falls_back_on: Collection[FallbackKind] = (),
    ) -> None:
        """`is_continuable`: another tier may continue the answer if it breaks off. A stream ends
        where `allowance` does. `is_bounded`: the client has set the answer's length, so all of
        that is reserved.

        `on_answered` is called once the whole answer was delivered; it must not block. `secrets`
        are redacted in the errors that servers report. `falls_back_on`: why another model is tried;
        an answer that its server ends early for such a reason raises CutShortError.
        """
        self.call = call
        self.texts: tuple[str, ...] = ()  # of the choices, once the answer has ended
        self.no_receipt: str | None = None  # where the request asked for a receipt
        self.arm = ""  # the arms of experiments that the request is in, for the report
        self._tier = tier
        self._origin = origin
        # What it continues is in its prompt, and was charged with the answer that broke off.
        kind: AttemptKind = "answer" if origin.continues is None else "continuation"
        self._answer: UpstreamAnswer = tier.answer(call, kind=kind)
        self._on_answered = on_answered
        self._secrets = secrets
        self._is_continuable = is_continuable
        self._allowance = allowance
        self._is_bounded = is_bounded
        self._falls_back_on = falls_back_on if num_answers(call) == 1 else ()
        self._tally = Tally()
        self._num_credited = 0
        self._num_open = num_answers(call)
        self._ended: set[int] = set()
        self._wants_usage = call.wants_usage_chunk
        self._first: Chunk | None = None
        self._last: Chunk | None = None
        self._has_reported = False
        self._outcome = "abort"
        self._is_over = False
        self._is_cut_by_limit = False

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield the body. Raises as the tier does (UpstreamError; gateway/upstream/tier.py)."""
        answer = self._answer
        try:
            if self.call.is_streamed:
                await answer.begin()
                stream = self._until_cut_short() if self._falls_back_on else self._stream()
                async with aclosing(stream) as stream_parts:
                    async for part in stream_parts:
                        yield part
                self.texts = (answer.delivered_text,)
            else:
                whole = await answer.whole(is_kept=False)
                await self._judge_whole(whole)
                kind = self._cut_short_by(whole, answer.usage) if self._falls_back_on else None
                if kind is None:
                    answer.keep()
                else:
                    await answer.abandon()
                self.texts = whole.texts
                # A whole answer is bounded by what the tenant has left.
                self._is_cut_by_limit = (
                    self._allowance is not None
                    and not self._is_bounded
                    and whole.finish_reason == "length"
                )
                body = self._whole_body(whole)
                if kind is not None:
                    raise CutShortError(kind, body)
                yield body
            self._outcome = "stop"
            self._is_over = True
            self._on_answered(self)
        except CutShortError:
            self._outcome = "stop"
            raise
        except AnswerEscalated:
            self._outcome = "handed_over"
            raise
        except Exception as error:
            self._outcome = "error"
            redact(error, self._secrets)
            raise
        finally:
            await answer.aclose()
            self._is_over = True

    def _chunks(self) -> AsyncGenerator[Chunk]:
        """Return the chunks that may be sent. Raises AnswerEscalated where another tier answers."""
        return self._answer.chunks()

    async def _judge_whole(self, whole: WholeAnswer) -> None:
        """Raise AnswerEscalated where another tier answers instead."""

    async def _stream(self) -> AsyncGenerator[bytes]:
        """Yield the parts of a stream that has begun."""
        answer = self._answer
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                if self._allowance is not None and await self._is_used_up(chunk, self._allowance):
                    # Booked first: the gateway's own [DONE] settles the account.
                    await answer.cut_off(chunk)
                    yield self._cut_off(chunk)
                    break
                if part := self._written(chunk):
                    yield part

    async def _until_cut_short(self) -> AsyncGenerator[bytes]:
        """Yield the parts of a stream that another model continues if its server ends it early.

        What comes before the first text is held back with it, and so is the end. Raises
        CutShortError.
        """
        answer, held, kind = self._answer, b"", None
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                has_sent_text = self._first is not None
                if self._allowance is not None and await self._is_used_up(chunk, self._allowance):
                    await answer.cut_off(chunk)
                    yield held + self._cut_off(chunk)
                    return
                kind = kind or self._early_end(chunk.finish_reason)
                held += self._written(chunk)
                if kind == "content_filter" and not has_sent_text and not chunk.has_text:
                    held += self._ending()
                    await answer.abandon()
                    raise CutShortError(kind, held)
                if held and kind is None and self._first is not None:
                    yield held
                    held = b""
        if kind is not None and self._has_ended_by(kind, answer.usage):
            self.texts = (answer.delivered_text,)
            raise CutShortError(kind, held)
        if held:
            yield held

    def _early_end(self, finish_reason: str | None) -> FallbackKind | None:
        """Return what may have ended the answer early, as the chain asks to know."""
        kind: FallbackKind | None = None
        if finish_reason == "content_filter":
            kind = "content_filter"
        elif finish_reason == "length":
            kind = "context_length"
        return kind if kind in self._falls_back_on else None

    def _has_ended_by(self, kind: FallbackKind, usage: UpstreamUsage) -> bool:
        """Return whether an end by `length` was the context's, not the request's own limit."""
        if kind == "content_filter":
            return True
        limit, most = self.call.token_limit, self._tier.settings.max_context
        if most is None or (limit is not None and usage.num_completion_tokens >= limit):
            return False
        total = usage.num_prompt_tokens + usage.num_completion_tokens
        return usage.source != "estimated" and total + _CONTEXT_SLACK >= most

    def _cut_short_by(self, whole: WholeAnswer, usage: UpstreamUsage) -> FallbackKind | None:
        """Return what ended a whole answer early, so that another model is to give it."""
        kind = self._early_end(whole.finish_reason)
        return kind if kind is not None and self._has_ended_by(kind, usage) else None

    async def _is_used_up(self, chunk: Chunk, allowance: TokenAllowance) -> bool:
        """Return whether the tenant has no token left for this chunk. This runs for each token.

        An answer whose length the client set is ended by the server. It is ended here only if it is
        longer than any answer of that many tokens can be. A bound set by the gateway (the tokens
        that `max_cost_usd` pays for) is not reserved, so it does not count as such a length.
        """
        self._tally.add(chunk)
        total = self._tally.least_tokens if self._is_bounded else self._tally.num_tokens
        num_tokens = total - self._num_credited
        if num_tokens <= 0:
            return False
        self._num_credited = total
        return await allowance.take(num_tokens) < num_tokens

    def _cut_off(self, chunk: Chunk) -> bytes:
        """The end of a stream where the tenant's limit ends, as at max_tokens."""
        self._is_cut_by_limit = True
        self._first = self._first or chunk
        empty: dict[str, Any] = {"delta": {}} if self.call.endpoint == "chat" else {"text": ""}
        choices = [
            {"index": index, **empty, "logprobs": None, "finish_reason": "length"}
            for index in range(num_answers(self.call))
            if index not in self._ended
        ]
        end = {**self._head(self._first), "choices": choices}
        return event(_encode(end)) + self._ending()

    def _whole_body(self, whole: WholeAnswer) -> bytes:
        body, usage = whole.body, self._answer.usage
        if usage.is_corrected or whole.usage is None:
            body = splice(body, "usage", _encode(usage_object(usage)))
        return splice(body, "outrider", _encode(self._report()))

    def _written(self, chunk: Chunk) -> bytes:
        """The chunk as the client gets it; empty for one that the client did not ask for.

        This runs for each token of each client.
        """
        if chunk.is_done:
            return self._ending()  # at once: from here on only the connection is still busy
        says_something = chunk.has_text or chunk.finish_reason is not None
        if self._first is None and says_something:
            self._first = chunk
        if chunk.has_calls or chunk.reasoning or chunk.has_logprobs:
            self._is_continuable = False
        sent = self._origin.continues
        if sent is not None:
            if not (says_something or chunk.usage):
                return b""  # a role, or a comment
            chunk = msgspec.structs.replace(chunk, raw=_behind(chunk, sent.answer_id))
        if chunk.is_usage_only:
            return self._usage_chunk(chunk.raw) if self._wants_usage else self._last_chunk()
        if self._last is not None and says_something:
            # It was not the last one after all: the held chunk goes first, or text would change its
            # order.
            held, self._last = self._last.raw, None
            return held + self._in_turn(chunk)
        if chunk.finish_reason is not None:
            self._num_open -= 1
            self._ended.add(chunk.index)
            if self._num_open <= 0:
                return self._in_turn(chunk)
        return chunk.raw

    def _in_turn(self, chunk: Chunk) -> bytes:
        """Pass on a chunk near the end; one that ends the answer is held until all is read."""
        if chunk.finish_reason is None or self._has_reported:
            return chunk.raw
        if self._wants_usage:
            # Some servers put the usage into this chunk.
            return chunk.raw if chunk.usage is None else self._usage_chunk(chunk.raw)
        self._last = chunk  # the token counts for the report come after it
        return b""

    def _last_chunk(self) -> bytes:
        """The last chunk with a finish reason, with the report; nothing if it was sent already."""
        last, self._last = self._last, None
        return b"" if last is None else self._with_report(last.raw)

    def _with_report(self, raw: bytes) -> bytes:
        self._has_reported = True
        return splice(raw, "outrider", _encode(self._report()))

    def _usage_chunk(self, raw: bytes) -> bytes:
        usage = self._answer.usage
        if usage.is_corrected:
            raw = splice(raw, "usage", _encode(usage_object(usage)))
        return self._with_report(raw)

    def _ending(self) -> bytes:
        """[DONE], after the report and the requested usage if they were not sent yet."""
        last = self._last_chunk()
        if last or self._has_reported or self._first is None:
            return last + DONE
        document = {**self._head(self._first), "choices": []}
        if self._wants_usage:
            document["usage"] = usage_object(self._answer.usage)
        return self._with_report(event(_encode(document))) + DONE

    @staticmethod
    def _head(chunk: Chunk) -> dict[str, Any]:
        """The fields that all chunks of the stream share."""
        try:
            document = _decode(event_data(chunk.raw) or b"{}")
        except (ValueError, RecursionError):  # in a field that nothing has parsed before
            return {}
        return {name: document.get(name) for name in ("id", "object", "created", "model")}

    @property
    def unfinished(self) -> PartialAnswer | None:
        """The sent text; None where more than plain text was sent."""
        if not self._is_continuable or self._first is None:
            return None
        sent, text = self._origin.continues, self._answer.delivered_text
        num_tokens = self._answer.usage.num_completion_tokens
        if sent is not None:
            text, num_tokens = sent.text + text, sent.num_tokens + num_tokens
        answer_id = id_of(self._first.raw) if sent is None else sent.answer_id
        return PartialAnswer(text=text, num_tokens=num_tokens, answer_id=answer_id or "")

    def _report(self) -> UpstreamReport:
        """The `outrider` object."""
        facts, origin, answer = self.facts, self._origin, self._answer
        usage = answer.usage
        return UpstreamReport(
            tier=facts.tier,
            reason=facts.reason,
            route_tier=origin.route_tier or facts.tier,
            escalated=origin.hand_off == "confidence",
            hand_off=origin.hand_off,
            degraded=facts.is_degraded,
            quality=rounded(origin.quality),
            confidence=rounded(origin.confidence),
            held_tokens=origin.num_held_tokens,
            discarded_tokens=origin.num_discarded_tokens,
            ttft_s=rounded(facts.ttft_s),
            attempts=answer.num_attempts,
            hedged=answer.is_hedged,
            continuations=answer.num_continuations,
            usage_source=usage.source,
            usage_corrected=usage.is_corrected,
            cost_usd=rounded(cost_usd(usage, self._tier.settings.price)),
            arm=self.arm or None,
            no_receipt=self.no_receipt,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Nothing that is known: a server enforces what it can."""
        return ()

    @property
    def facts(self) -> AnswerFacts:
        """The facts, as far as they are known."""
        answer, origin = self._answer, self._origin
        first_s = answer.first_token_s
        return AnswerFacts(
            tier=self._tier.name,
            reason=origin.explain("") or "requested",
            job_id=self.call.request_id,
            outcome=self._outcome,
            # Before the end, each read would count the text again.
            num_tokens=answer.usage.num_completion_tokens if self._is_over else 0,
            hand_off=origin.hand_off,
            confidence=origin.confidence,
            is_degraded=origin.is_degraded,
            is_escalated=origin.hand_off == "confidence",
            ttft_s=None if first_s is None else first_s - self.call.arrival_s,
            num_prompt_tokens=answer.usage.num_prompt_tokens if self._is_over else 0,
            is_cut_by_limit=self._is_cut_by_limit,
        )


def _behind(chunk: Chunk, answer_id: str) -> bytes:
    """Fit a chunk to follow another tier's: the answer's id, and no role of its own."""
    try:
        document = _decode(event_data(chunk.raw) or b"null")
    except (ValueError, RecursionError):  # in a field that nothing has parsed before
        return with_id(chunk.raw, answer_id)
    if not isinstance(document, dict):
        return b""
    document["id"] = answer_id
    for choice in document.get("choices") or ():
        if delta := choice.get("delta"):
            delta.pop("role", None)
    return event(_encode(document))
