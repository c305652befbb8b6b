"""One answer of an upstream tier, however many servers it takes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from outrider.gateway.contract.errors.tree import DeadlineExceededError, GatewayError, UpstreamError
from outrider.gateway.upstream.attempts import AttemptKind
from outrider.gateway.upstream.call import Chunk, UpstreamCall, WholeAnswer
from outrider.gateway.upstream.continuing import (
    ContinuationPlan,
    Delivered,
    DivergedError,
    StreamSplicer,
    as_one_answer,
    ending,
    has_reached_limit,
    plan_of,
)
from outrider.gateway.upstream.dialects.openai_request import is_resumable
from outrider.gateway.upstream.opening import Opening
from outrider.gateway.upstream.tier_parts import TierState
from outrider.gateway.upstream.upstream_request import UpstreamRequest
from outrider.gateway.upstream.upstream_usage import UpstreamUsage

_MAX_CONTINUATIONS: Final = 3
_SEED_BITS: Final = 31


class UpstreamAnswer:
    """One answer, streamed or whole. Use it once, in one task at a time, and always `aclose` it.

    Either `begin` and then `chunks`, or `whole`, whichever form the call asked for. When `begin`,
    `chunks` or `whole` raises or is cancelled, no request is left behind.
    """

    def __init__(self, tier: TierState, call: UpstreamCall, *, kind: AttemptKind) -> None:
        self._tier = tier
        self._call = call
        self._kind = kind
        self._started_s = 0.0  # set when it begins
        self._openings: list[Opening] = []
        self._request: UpstreamRequest | None = None
        self._delivered = Delivered()
        self._whole: WholeAnswer | None = None
        self._plan: ContinuationPlan | None = None
        self._broken: UpstreamError | None = None
        self.num_continuations = 0
        """The number of times the answer was continued by another server."""
        self.first_token_s: float | None = None
        """The time of a stream's first token, on the clock."""

    @property
    def num_attempts(self) -> int:
        """Return the number of requests sent for it."""
        return sum(len(opening.requests) for opening in self._openings)

    @property
    def is_hedged(self) -> bool:
        """Return whether a second server was asked because the first one was late."""
        return any(opening.is_hedged for opening in self._openings)

    @property
    def replica(self) -> str:
        """Return host:port of the server that answers, or answered last; empty before there is
        one."""
        return self._request.replica.name if self._request else ""

    @property
    def delivered_text(self) -> str:
        """Return the content of the first choice, as far as it was handed out."""
        if self._whole is not None:
            return self._whole.texts[0] if self._whole.texts else ""
        return self._delivered.content

    @property
    def usage(self) -> UpstreamUsage:
        """Return tokens as if one server had answered; final once the last chunk was handed out."""
        if self._request is None:
            return UpstreamUsage()
        usage = self._request.usage
        # An estimate does not include the longer prompt of a continuation.
        if self._plan is None or not self._plan.num_before:
            return usage
        if usage.source == "estimated":
            return replace(
                usage,
                num_completion_tokens=usage.num_completion_tokens + self._plan.num_before,
            )
        return as_one_answer(usage, self._plan.num_before)

    async def begin(self) -> None:
        """Wait for the first chunk with text: retries, waits and hedging happen here.

        Raises BadRequestError where this server cannot take the call, UpstreamRefusalError
        and LoopError where it refuses, ThrottledError, UnavailableError, UpstreamError and
        DeadlineExceededError where no server answers.
        """
        self._started_s = self._tier.parts.clock()
        self._call = self._with_seed(_with_stream(self._call, is_streamed=True))
        await self._open(self._opening(self._kind, None))
        assert self._request is not None
        self.first_token_s = self._request.first_token_s

    async def whole(self, *, is_kept: bool = True) -> WholeAnswer:
        """Return the answer in one piece. Raises the errors of `begin`.

        It is booked as delivered, unless `is_kept` is false: then `keep` does that.
        """
        self._started_s = self._tier.parts.clock()
        self._call = _with_stream(self._call, is_streamed=False)
        await self._open(self._opening(self._kind, None))
        assert self._request is not None
        self._whole = self._request.whole
        assert self._whole is not None
        if is_kept:
            self.keep()
        return self._whole

    def keep(self) -> None:
        """Book an answer in one piece as delivered."""
        assert self._request is not None, "whole comes first"
        self._request.finish()

    def discard(self) -> None:
        """Have it booked as escalated when it is closed: another tier's answer is delivered."""
        assert self._request is not None, "begin or whole comes first"
        self._request.given_up_as = "escalated"

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Yield all chunks from the very first one; the last one is [DONE].

        A server that fails in the middle is replaced by another one where the rest can be
        requested. Raises UpstreamError where it cannot, and DeadlineExceededError.
        """
        seam: StreamSplicer | None = None
        while True:
            assert self._request is not None, "begin comes first"
            try:
                async with aclosing(self._request.chunks()) as chunks:
                    async for sent in chunks:
                        chunk = sent if seam is None else await self._fitted(seam, sent)
                        if chunk is not None:
                            self._delivered.add(chunk)
                            yield chunk
                return
            except UpstreamError as error:
                seam = await self._continue_after(error)
            if seam is None:
                for chunk in ending(self._call, self._delivered, self.usage):
                    yield chunk
                return

    async def cut_off(self, undelivered: Chunk) -> None:
        """Book and release a stream that a limit of the tenant ends before this chunk."""
        assert self._request is not None, "begin comes first"
        self._request.without(undelivered)
        self._request.given_up_as = "limited"
        await self._request.aclose()

    async def abandon(self) -> None:
        """Book and release an answer of which nothing was delivered, and nothing will be."""
        assert self._request is not None, "begin comes first"
        self._request.given_up_as = "lost"
        await self._request.aclose()

    async def aclose(self) -> None:
        """End the answer, or its client's wait for it. Gives up the running requests."""
        for opening in self._openings:
            await opening.aclose()

    async def _open(self, opening: Opening) -> None:
        self._openings.append(opening)
        self._request = await opening.run()

    def _opening(self, kind: AttemptKind, plan: ContinuationPlan | None) -> Opening:
        num_repeated = 0
        if plan is not None and self._request is not None and not plan.num_before:
            num_repeated = self._request.num_written_tokens
        return Opening(
            self._tier,
            self._call,
            kind=kind,
            started_s=self._started_s,
            resume=plan.resume if plan else None,
            avoid=(self._request.replica,) if self._request else (),
            num_repeated_tokens=num_repeated,
        )

    async def _continue_after(self, error: UpstreamError) -> StreamSplicer | None:
        """Have another server continue the answer; None where nothing is missing but the end.

        Raises `error` where none can, and DeadlineExceededError.
        """
        tier, count_text = self._tier, self._tier.parts.count_text
        strategy = tier.traits.continuation
        plan = plan_of(self._call, self._delivered, strategy, count_text)
        total_s = tier.parts.clock() - self._started_s
        if (
            plan is None
            or error is self._broken
            or error.failure == "total_timeout"
            or total_s >= tier.settings.timeouts.total_s
            or self._kind == "mirror"
            or self.num_continuations == _MAX_CONTINUATIONS
        ):
            raise error
        self._broken = error
        if strategy == "final_message" and has_reached_limit(
            self._call, self._delivered, count_text
        ):
            return None
        try:
            await self._open(self._opening("continuation", plan))
        except DeadlineExceededError:
            raise
        except GatewayError as failure:
            raise error from failure
        self._plan = plan
        self.num_continuations += 1
        return StreamSplicer(plan, self._delivered.sample)

    async def _fitted(self, seam: StreamSplicer, chunk: Chunk) -> Chunk | None:
        """Return the chunk as it continues the delivered text; else raise the error that broke
        it."""
        try:
            return seam.fit(chunk)
        except DivergedError as diverged:
            assert self._request is not None
            assert self._broken is not None
            await self._request.aclose("diverged")
            raise self._broken from diverged

    def _with_seed(self, call: UpstreamCall) -> UpstreamCall:
        """Return the call with a seed if its answer may have to be repeated word for word."""
        document = call.document
        if (
            self._tier.traits.continuation != "replay"
            or document.get("seed") is not None
            or document.get("temperature") == 0
            or not is_resumable(call, "replay")
        ):
            return call
        seed = self._tier.parts.rng.getrandbits(_SEED_BITS)
        return replace(call, document={**document, "seed": seed})


def _with_stream(call: UpstreamCall, *, is_streamed: bool) -> UpstreamCall:
    if call.is_streamed == is_streamed:
        return call
    document: dict[str, Any] = {**call.document, "stream": is_streamed}
    if not is_streamed:
        document.pop("stream_options", None)
    return replace(call, document=document)
