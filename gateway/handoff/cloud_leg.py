"""A server elsewhere answers: its bytes are passed on, and the report is put in at the end."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from gateway.handoff.leg import AnswerFacts
from gateway.handoff.origin import Origin, Unfinished
from gateway.sse import DONE, event, rounded
from gateway.upstream.answer import UpstreamAnswer
from gateway.upstream.call import Chunk, UpstreamCall
from gateway.upstream.dialects.rewriting import id_of, splice
from gateway.upstream.event_stream import event_data
from gateway.upstream.tier import UpstreamTier
from gateway.upstream.usage import cost_usd, usage_object

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.decode


class CloudLeg:
    """Answers by an upstream tier."""

    def __init__(
        self,
        tier: UpstreamTier,
        call: UpstreamCall,
        origin: Origin,
        on_answered: Callable[["CloudLeg"], None] = lambda leg: None,
        is_continuable: bool = False,
    ) -> None:
        """is_continuable: others may go on behind what is sent, should it break off.

        `on_answered` is called once where the whole answer was delivered; it must not block.
        """
        self.call = call
        self.texts: tuple[str, ...] = ()  # of the choices, when it is over
        self._tier = tier
        self._origin = origin
        self._answer: UpstreamAnswer = tier.answer(call)
        self._on_answered = on_answered
        self._is_continuable = is_continuable
        self._num_open = call.num_choices
        self._first: Chunk | None = None
        self._has_told_usage = False
        self._last: Chunk | None = None
        self._outcome = "abort"
        self._is_over = False

    async def parts(self) -> AsyncGenerator[bytes]:
        """The body. Raises UpstreamError and what else a tier raises (gateway/upstream/tier.py)."""
        own = self._stream() if self.call.is_streamed else self._whole()
        try:
            async with aclosing(own):
                async for part in own:
                    yield part
            self._outcome = "stop"
            self._is_over = True
            self._on_answered(self)
        except Exception:
            self._outcome = "error"
            raise
        finally:
            await self._answer.aclose()
            self._is_over = True

    async def _whole(self) -> AsyncGenerator[bytes]:
        whole = await self._answer.whole()
        body, usage = whole.body, self._answer.usage
        if usage.is_corrected or whole.usage is None:
            document = _decode(body)
            document["usage"] = usage_object(usage)
            body = _encode(document)
        self.texts = whole.texts
        yield splice(body, "outrider", _encode(self._report()))

    async def _stream(self) -> AsyncGenerator[bytes]:
        await self._answer.begin()
        async with aclosing(self._answer.chunks()) as chunks:
            async for chunk in chunks:
                if self._first is None and not chunk.is_done:
                    self._first = chunk
                if chunk.has_calls or chunk.reasoning or chunk.has_logprobs:
                    self._is_continuable = False
                part = self._written(chunk)
                if part:
                    yield part
        self.texts = (self._answer.delivered_text,)
        yield self._ending()

    def _written(self, chunk: Chunk) -> bytes:
        """The chunk as the client gets it; empty for one that it did not ask for."""
        if chunk.is_done:
            return b""  # the end is written when all has been read
        before = self._origin.continues
        if before is not None:
            if not (chunk.has_text or chunk.finish_reason or chunk.usage):
                return b""  # a role, or a comment
            chunk = replace(chunk, raw=_behind(chunk, before.answer_id))
        wants_usage = self.call.wants_usage_chunk
        if chunk.is_usage_only:
            return self._usage_chunk(chunk.raw) if wants_usage else self._reported()
        if chunk.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open and not wants_usage:
                self._last = chunk  # what the report says of tokens comes behind it
                return b""
        return chunk.raw

    def _reported(self) -> bytes:
        """The last chunk with a finish reason, with the report; nothing where it was sent."""
        last, self._last = self._last, None
        return b"" if last is None else splice(last.raw, "outrider", _encode(self._report()))

    def _usage_chunk(self, raw: bytes) -> bytes:
        self._has_told_usage = True
        usage = self._answer.usage
        if usage.is_corrected:
            document = _decode(event_data(raw) or b"null")
            document["usage"] = usage_object(usage)
            raw = event(_encode(document))
        return splice(raw, "outrider", _encode(self._report()))

    def _ending(self) -> bytes:
        """[DONE], and before it the usage, where it was asked for and the server said nothing."""
        if not self.call.wants_usage_chunk:
            return self._reported() + DONE
        if self._has_told_usage or self._first is None:
            return DONE
        head = self._head(self._first)
        document = {
            **head,
            "choices": [],
            "usage": usage_object(self._answer.usage),
            "outrider": self._report(),
        }
        return event(_encode(document)) + DONE

    @staticmethod
    def _head(chunk: Chunk) -> dict[str, Any]:
        """What all chunks of the stream have in common."""
        try:
            document = _decode(event_data(chunk.raw) or b"{}")
        except msgspec.DecodeError:
            return {}
        return {name: document.get(name) for name in ("id", "object", "created", "model")}

    @property
    def unfinished(self) -> Unfinished | None:
        """What was sent; None where it was more than plain text."""
        if not self._is_continuable or self._first is None:
            return None
        before, text = self._origin.continues, self._answer.delivered_text
        num_tokens = self._answer.usage.num_completion_tokens
        if before is not None:
            text, num_tokens = before.text + text, before.num_tokens + num_tokens
        answer_id = id_of(self._first.raw) if before is None else before.answer_id
        return Unfinished(text=text, num_tokens=num_tokens, answer_id=answer_id or "")

    def _report(self) -> dict[str, Any]:
        """The `outrider` object (gateway/schema/responses.py: UpstreamReport)."""
        facts, origin, answer = self.facts, self._origin, self._answer
        usage = answer.usage
        return {
            "tier": facts.tier,
            "reason": facts.reason,
            "route_tier": origin.route_tier or facts.tier,
            "escalated": origin.hand_off == "confidence",
            "hand_off": origin.hand_off,
            "degraded": facts.is_degraded,
            "quality": rounded(origin.quality),
            "confidence": rounded(origin.confidence),
            "held_tokens": origin.num_held_tokens,
            "discarded_tokens": origin.num_discarded_tokens,
            "ttft_s": rounded(facts.ttft_s),
            "attempts": answer.num_attempts,
            "hedged": answer.is_hedged,
            "continuations": answer.num_continuations,
            "usage_source": usage.source,
            "usage_corrected": usage.is_corrected,
            "cost_usd": rounded(cost_usd(usage, self._tier.settings.price)),
        }

    @property
    def facts(self) -> AnswerFacts:
        """As far as they are known."""
        answer, origin = self._answer, self._origin
        first_s = answer.first_token_s
        return AnswerFacts(
            tier=self._tier.name,
            reason=origin.explain("") or "requested",
            job_id=self.call.request_id,
            outcome=self._outcome,
            # Before the end each look would count the text again.
            num_tokens=answer.usage.num_completion_tokens if self._is_over else 0,
            hand_off=origin.hand_off,
            confidence=origin.confidence,
            ttft_s=None if first_s is None else first_s - self.call.arrival_s,
        )


def _behind(chunk: Chunk, answer_id: str) -> bytes:
    """A chunk as it follows another tier's: with the answer's id, and without a role of its own."""
    document = _decode(event_data(chunk.raw) or b"null")
    if not isinstance(document, dict):
        return b""
    document["id"] = answer_id
    for choice in document.get("choices") or ():
        choice.get("delta", {}).pop("role", None)
    return event(_encode(document))
