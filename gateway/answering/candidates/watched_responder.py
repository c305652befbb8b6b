"""A small model behind a server, watched: its answer is held back until the watch has decided.

As a local small answer (gateway/answering/streaming/watched_stream.py): "commit" lets the held text
go, and the stream goes on; "escalate" drops it, and another tier's answer is sent instead.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from outrider.gateway.answering.candidates.upstream_responder import UpstreamResponder
from outrider.gateway.answering.streaming.hold_back import HoldBack
from outrider.gateway.contract.answers.responder import (
    AnswerEscalated,
    AnswerFacts,
    DraftAnswer,
    PartialAnswer,
    StrongAnswer,
    StrongTier,
)
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.gateway.upstream.call import Chunk, WholeAnswer
from outrider.gateway.upstream.logprob_check import LogprobCheck
from outrider.router.answer_text import text_fault
from outrider.router.watch import Judgement, WatchPlan

_REFUSED: Final = "cascade: no other tier could take it, small answer kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallWatch:
    """The watch of one answer, and what follows from it."""

    plan: WatchPlan
    quality: float | None
    strong_tier: StrongTier
    tells_logprobs: bool
    """The server has log-probabilities. Without them the text alone is judged, beside what the
    router knows of the prompt."""
    metrics: GatewayMetrics
    clock: Callable[[], float]
    on_untrusted: Callable[[str], None] = lambda complaint: None
    """Called with the reason why some log-probabilities cannot be used."""


class WatchedResponder(UpstreamResponder):
    """Answers by a server's small model, or passes on the strong tier's answer."""

    def __init__(self, *arguments: Any, watch: SmallWatch, **options: Any) -> None:
        """`arguments` and `options`: those of UpstreamResponder."""
        super().__init__(*arguments, **options)
        self._watch = watch
        self._strong_answer: StrongAnswer | None = None

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield the body. Raises as UpstreamResponder does."""
        try:
            async with aclosing(super().parts()) as own:
                async for part in own:
                    yield part
        except AnswerEscalated as signal:
            self._strong_answer, self.escalated_to = signal.answer, signal.answer.place
            async with aclosing(signal.answer.parts()) as others:
                async for part in others:
                    yield part

    @property
    def facts(self) -> AnswerFacts:
        """The facts of the responder that answers in the end."""
        return super().facts if self._strong_answer is None else self._strong_answer.responder.facts

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the answer's grammar does not enforce, where a local model answers in the end."""
        return () if self._strong_answer is None else self._strong_answer.responder.left_out

    @property
    def unfinished(self) -> PartialAnswer | None:
        """The sent text; None where more than plain text was sent."""
        return (
            super().unfinished
            if self._strong_answer is None
            else self._strong_answer.responder.unfinished
        )

    async def _chunks(self) -> AsyncGenerator[Chunk]:
        """Yield the chunks once the watch has decided to keep them."""
        async with aclosing(_TimedChunks(self._answer.chunks())) as chunks:
            judging = _Judging(self._watch)
            held: list[Chunk] = []
            await self._act(await judging.of_stream(chunks, held), judging)
            for chunk in held:
                yield chunk
            while (following := await chunks.next()) is not None:
                yield following

    async def _judge_whole(self, whole: WholeAnswer) -> None:
        judging = _Judging(self._watch)
        await self._act(await judging.of_whole(whole), judging)

    async def _act(self, judgement: Judgement, judging: "_Judging") -> None:
        """Note the decision, and let another tier answer if that is it: raises AnswerEscalated."""
        watch, tier = self._watch, self._tier.name
        action: str = judgement.action
        reason = judgement.reason
        answer = None
        draft = DraftAnswer(
            text=judging.text,
            num_tokens=judging.num_tokens,
            confidence=judgement.confidence,
            reason=self._origin.explain(reason),
            quality=watch.quality,
            tier=tier,
            on_agreement=watch.plan.on_agreement,
        )
        if action == "commit" and watch.plan.is_explored:
            watch.strong_tier.second_opinion(draft)
        if action == "escalate":
            answer = await watch.strong_tier.escalate(draft)
            if answer is None:
                action, reason = "refuse", f"{reason}; {_REFUSED}"
        watch.metrics.cascade_decided(action, tier, judging.held_s, judging.num_tokens)
        if answer is not None:
            self._answer.discard()  # before its stream is closed, which books it
            raise AnswerEscalated(answer)
        is_refused = action == "refuse"
        self._origin = replace(
            self._origin,
            reason=self._origin.explain(reason),
            quality=watch.quality,
            confidence=judgement.confidence,
            num_held_tokens=judging.num_tokens,
            hand_off="failure" if is_refused else self._origin.hand_off,
            is_degraded=self._origin.is_degraded or is_refused,
        )


class _Judging:
    """Comes to the decision on one answer."""

    def __init__(self, watch: SmallWatch) -> None:
        self._watch = watch
        self._hold = HoldBack(watch.plan, watch.clock)
        self._check = LogprobCheck()
        self._waiting: list[float] = []  # of tokens that are not known to belong to the text
        self._num_parts = 0
        self._has_more_than_text = False
        self.num_tokens = 0
        self.held_s = 0.0

    @property
    def text(self) -> str:
        """Return the text that was judged."""
        return self._check.text

    async def of_stream(self, chunks: "_TimedChunks", held: list[Chunk]) -> Judgement:
        """Read until the watch decides; chunks gather in `held`."""
        await self._hold.until_read()
        judgement = self._hold.judge_prompt()
        is_whole = False
        while judgement is None:
            try:
                chunk = await chunks.next_within(self._hold.remaining_s)
            except TimeoutError:
                judgement = self._must_decide(is_whole=False)
                break
            if chunk is None or chunk.is_done:
                is_whole = True
            if chunk is not None:
                held.append(chunk)
                is_whole = is_whole or chunk.finish_reason is not None
                judgement = self._add(chunk)
            if judgement is None and (is_whole or self._is_enough):
                judgement = self._must_decide(is_whole=is_whole)
        self.held_s = self._hold.held_s
        return self._with_text(judgement, is_whole=is_whole)

    async def of_whole(self, whole: WholeAnswer) -> Judgement:
        """Return the decision on an answer in one piece."""
        self._has_more_than_text = whole.has_calls or any(whole.reasoning)
        await self._hold.until_read()
        judgement = self._hold.judge_prompt()
        if judgement is None:
            text = "" if self._has_more_than_text else "".join(whole.texts[:1])
            self._check.add_text(text, whole.token_logprobs)
            self._waiting = [entry.logprob for entry in whole.token_logprobs]
            self.num_tokens = len(self._waiting)
            judgement = self._judge_waiting() or self._must_decide(is_whole=True)
        return self._with_text(judgement, is_whole=True)

    @property
    def _is_enough(self) -> bool:
        """Return whether as many parts came as may be held; a part is a token or more."""
        plan = self._watch.plan
        return plan.hold_back_s is not None and self._num_parts >= plan.hold_back_tokens

    def _add(self, chunk: Chunk) -> Judgement | None:
        self._check.add(chunk)
        self._has_more_than_text |= chunk.has_calls or bool(chunk.reasoning)
        self._waiting += [entry.logprob for entry in chunk.token_logprobs]
        self._num_parts += chunk.has_text
        self.num_tokens += max(len(chunk.token_logprobs), int(chunk.has_text))
        return self._judge_waiting() if chunk.has_text or chunk.token_logprobs else None

    def _judge_waiting(self) -> Judgement | None:
        """Let the watch see the tokens if they belong to the text; start the time of holding."""
        is_trusted = self._watch.tells_logprobs and self._check.complaint() is None
        seen, self._waiting = (self._waiting, []) if is_trusted else ([], self._waiting)
        return self._hold.judge_tokens(seen)

    def _must_decide(self, *, is_whole: bool) -> Judgement:
        """Return the decision by what can be trusted."""
        complaint = self._check.complaint() if self._watch.tells_logprobs else None
        if complaint is not None:
            self._watch.on_untrusted(complaint)
        is_all_seen = is_whole and self._watch.tells_logprobs and complaint is None
        judgement = self._hold.judge_end() if is_all_seen else self._hold.judge_at_limit()
        if complaint is None:
            return judgement
        reason = f"{judgement.reason}, log-probabilities not used: {complaint}"
        return replace(judgement, reason=reason)

    def _with_text(self, judgement: Judgement, *, is_whole: bool) -> Judgement:
        """Escalate a kept answer that its text alone shows to be of no use."""
        if judgement.action == "escalate" or self._has_more_than_text:
            return judgement
        fault = text_fault(self.text, is_whole=is_whole)
        if fault is None:
            return judgement
        reason = f"cascade: small answer too weak, {fault}"
        return Judgement(action="escalate", confidence=0.0, reason=reason)


class _TimedChunks:
    """Reads a stream, with a limit on a wait that leaves the stream whole.

    Cancelling `anext` of a generator ends the generator; so a read that runs out of time goes on
    in a task, and the next read waits for it.
    """

    def __init__(self, chunks: AsyncGenerator[Chunk]) -> None:
        self._chunks = chunks
        self._pending: asyncio.Task[Chunk | None] | None = None

    async def next(self) -> Chunk | None:
        """Return the next chunk; None at the end."""
        if self._pending is None:
            return await anext(self._chunks, None)  # for each token: no detour
        await asyncio.wait((self._pending,))
        pending, self._pending = self._pending, None
        return pending.result()

    async def next_within(self, timeout_s: float | None) -> Chunk | None:
        """Return the next chunk; None at the end. Raises TimeoutError where it is late."""
        if self._pending is None:
            self._pending = asyncio.create_task(self._pull())
        await asyncio.wait((self._pending,), timeout=timeout_s)
        if not self._pending.done():
            raise TimeoutError
        return await self.next()

    async def aclose(self) -> None:
        """Close the stream."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait((self._pending,))
            if not self._pending.cancelled():
                self._pending.exception()  # retrieved: nothing reads any more
        await self._chunks.aclose()

    async def _pull(self) -> Chunk | None:
        return await anext(self._chunks, None)
