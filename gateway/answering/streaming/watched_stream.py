"""One choice's stream of text, from the tier that answers it in the end.

A choice that is watched is held back first: its deltas wait until the watch has decided. "commit"
lets them go, and the stream goes on. "escalate" drops them, and the large tier's answer is streamed
instead. So the client gets one tier's answer, exactly; the one exception is requested: in
`mid_stream` the large tier may go on behind text that was sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from outrider.engine.errors import CrashSuspectError, EngineDiedError, EngineError
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.gateway.answering.jobs.job import EscalationTarget, Job
from outrider.gateway.answering.jobs.second_looks import SecondLooks
from outrider.gateway.answering.streaming.choice import Choice
from outrider.gateway.answering.streaming.choice_stream import ChoiceStream, WatchUsage
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.answering.streaming.hold_back import HoldBack
from outrider.gateway.answering.streaming.second_look import shared_tokens
from outrider.gateway.answering.streaming.trace import as_reused
from outrider.gateway.contract.answers.responder import (
    AnswerEscalated,
    DraftAnswer,
    StrongAnswer,
    StrongTier,
)
from outrider.gateway.contract.errors.tree import EngineLostError
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.tenancy.metering.gateway_metrics import GatewayMetrics
from outrider.router.watch import Judgement, WatchPlan
from outrider.verifier.params import Tier

_ENGINE_DIED = frozenset({EngineDiedError.code, CrashSuspectError.code})
_REFUSED = "cascade: the large tier could not take it, small answer kept"
_REFUSED_ELSEWHERE = "cascade: the upstream tier could not take it, local answer kept"


@dataclass(frozen=True, slots=True)
class _SmallAnswer:
    """A whole answer that was given up, and can still be sent should the large tier fail."""

    choice: Choice
    deltas: list[Delta]
    watch: WatchUsage


class WatchedStream(ChoiceStream):
    """One choice of the small tier whose watch may give it to another tier."""

    def __init__(
        self,
        index: int,
        job: Job,
        engine: EngineClient,
        metrics: GatewayMetrics,
        clock: Callable[[], float],
        watch: WatchPlan,
    ) -> None:
        """`watch`: the job's."""
        super().__init__(index, job, engine, metrics, clock)
        self._index = index
        self._hold_back = HoldBack(watch, clock)
        # With different tokenizers, no tier can continue in the middle of a text.
        self._may_continue = bool(
            watch.mid_stream and not job.choices[index].escalated and not job.strong_tier
        )
        self._is_continued = False
        self._num_continued = 0  # tokens in front of the other tier's continuation
        self._held: list[Delta] = []
        self._held_reason: Literal["stop", "length"] | None = None
        self._small_ids: list[int] = []
        self._small: _SmallAnswer | None = None
        self._prompt: list[Delta] = []
        self._predicts_small = False
        self._is_over = False
        self._strong_answer: StrongAnswer | None = None

    @property
    def written(self) -> tuple[tuple[Tier, int], ...]:
        """The number of tokens, of the choice as it stands, that each tier has written."""
        if not self._is_continued:
            return super().written
        num_tokens = self.choice.usage.num_tokens
        return (
            (self._job.tier, self._num_continued),
            (self.tier, num_tokens - self._num_continued),
        )

    async def _begin(self) -> list[Delta]:
        """Hold the answer until the watch has decided; return the deltas that may be sent."""
        await super()._begin()
        await self._decide(self._hold_back)
        held, self._held = self._held, []
        return held

    # ---- held text ----------------------------------------------------------------------------

    async def _decide(self, hold_back: HoldBack) -> None:
        """Hold the small answer until the watch has decided, and act on the decision.

        Leaves in `_held` the deltas that may be sent at once.
        """
        judgement = await self._judgement(hold_back)
        self._note(judgement)
        self.watch.num_held_tokens = self.choice.usage.num_tokens
        held_s = hold_back.held_s
        action: str = judgement.action
        if action == "escalate" and self._job.strong_tier is not None:
            self._strong_answer = await self._escalate_to(self._job.strong_tier, judgement)
            if self._strong_answer is not None:
                self._metrics.cascade_decided(action, self.tier, held_s, self.watch.num_held_tokens)
                raise AnswerEscalated(self._strong_answer)
            action = "refuse"
        elif action == "escalate" and not await self._escalate():
            action = "refuse"
            self.watch.reason = f"{judgement.reason}; {_REFUSED}"
        self._metrics.cascade_decided(action, self.tier, held_s, self.watch.num_held_tokens)
        if action == "escalate":
            self._may_continue = False
            return
        if action == "commit" and self._job.second_looks is not None and self._small_ids:
            self._explore(self._job.second_looks, judgement)
        if self.choice.finish_reason is None:
            await self._engine.keep_on_tier(self._request.request_id)
        if self.choice.usage.num_tokens:
            self._observe(self.choice.usage.num_tokens)

    async def _judgement(self, hold_back: HoldBack) -> Judgement:
        """Read until the watch decides; deltas gather in `_held`."""
        while True:
            remaining_s = hold_back.remaining_s
            if remaining_s == 0.0:
                return hold_back.judge_at_limit()
            event = await self._reader.next_within(remaining_s)
            if event is None:
                continue
            self._held += self._receive(event)
            if isinstance(event, TokensEmitted):
                self._small_ids += event.token_ids
            await hold_back.until_read()
            judgement = hold_back.judge(event, is_whole=self._is_whole)
            if judgement is not None:
                return judgement

    @property
    def _is_whole(self) -> bool:
        """True if the answer has ended, by itself or at a stop string."""
        return self.choice.finish_reason is not None or self._held_reason is not None

    def _note(self, judgement: Judgement) -> None:
        self.watch.confidence = judgement.confidence
        self.watch.reason = judgement.reason

    # ---- to an upstream tier ------------------------------------------------------------------

    async def _escalate_to(
        self, strong_tier: StrongTier, judgement: Judgement
    ) -> StrongAnswer | None:
        """Return the strong tier's answer; None where it has none, and the small one is kept.

        Meanwhile the engine goes on with the small answer.
        """
        watch = self.watch
        answer = await strong_tier.escalate(self._draft(judgement))
        if answer is None:
            self.is_degraded = True
            watch.reason = f"{judgement.reason}; {_REFUSED_ELSEWHERE}"
        else:
            watch.escalated = True
            watch.num_retracted_tokens = self.choice.usage.num_tokens
        return answer

    def _draft(self, judgement: Judgement) -> DraftAnswer:
        assert self._job.watch is not None, "it has judged"
        return DraftAnswer(
            text=self._job.tokenizer.decode(self._small_ids),
            num_tokens=self.watch.num_held_tokens,
            confidence=judgement.confidence,
            reason=judgement.reason,
            quality=self._job.quality,
            on_agreement=self._job.watch.on_agreement,
        )

    def _explore(self, looks: SecondLooks, judgement: Judgement) -> None:
        """Have the large model judge what was held, though it is kept."""
        job, draft = self._job, self._draft(judgement)
        if job.strong_tier is not None:
            job.strong_tier.second_opinion(draft)
            return
        target, other = job.escalation, job.choices[self._index].escalated
        assert target is not None, "a job with a watch has one"

        async def look() -> None:
            request, token_ids = self._request, tuple(self._small_ids)
            if other is not None:
                request = other
                token_ids = await target.tokenizer.encode_answer(draft.text, len(token_ids) + 8)
            share = await shared_tokens(self._engine, request, token_ids) if token_ids else None
            if share is not None:
                draft.agrees(share)

        looks.offer(look)

    async def _close(self) -> None:
        try:
            await super()._close()
        except BaseException:
            if self._strong_answer is not None:  # the client left while the local one was ended
                await self._strong_answer.aclose()
            raise

    # ---- to the large tier --------------------------------------------------------------------

    async def _escalate(self) -> bool:
        """Give the small answer up for the large tier's; return whether that tier took it."""
        target = self._job.escalation
        assert target is not None, "a job with a watch has one"
        escalated = self._job.choices[self._index].escalated
        if escalated is None:
            return await self._switch(target)
        return await self._submit_to_other_tier(target, escalated)

    async def _switch(self, target: EscalationTarget) -> bool:
        """Move the sequence. A tier refuses by letting the small answer go on."""
        await self._engine.switch_tier(self._request.request_id, target.tier)
        while not self._is_over:
            event = await self._reader.next()
            if isinstance(event, TierSwitched):
                self._note_switch()
                self._restart_on(target)
                return True
            self._held += self._receive(event)
        return False

    async def _submit_to_other_tier(self, target: EscalationTarget, request: EngineRequest) -> bool:
        """Start a request for another tokenizer, with the small answer's text as its prediction.

        The small one is aborted when the large one has begun to answer.
        """
        if not request.prediction_token_ids:  # the client's own guess is counted for it
            self._predicts_small = True
            text = self._job.tokenizer.decode(self._small_ids)
            prediction = await target.tokenizer.encode_answer(text, request.sampling.max_tokens)
            request = replace(request, prediction_token_ids=prediction)
        events: list[EngineEvent] = []
        try:
            reader = self._open(request)
            while not any(isinstance(event, TokensEmitted | Finished) for event in events):
                events.append(await reader.next())
                if isinstance(events[-1], Failed):
                    return False
        except (EngineError, EngineLostError):
            return False
        await self._reader.aclose()
        if self._job.allowance is not None:
            self._job.allowance.give_back(self.choice.usage.num_tokens)
        self._reader, self._request = reader, request
        self._restart_on(target)
        for event in events:
            self._held += self._answer_with(event)
        return True

    def _note_switch(self) -> None:
        if self._job.work is not None:
            self._job.work.switched(self._request.request_id)

    def _restart_on(self, target: EscalationTarget) -> None:
        """Read the large tier's events from here on."""
        small = self.choice
        if self._held_reason is not None and small.finish_reason is None:
            self._held += small.end(self._held_reason)
        if small.finish_reason is not None:
            self._small = _SmallAnswer(small, self._held, replace(self.watch))
        self.watch.escalated = True
        self.watch.num_retracted_tokens = small.usage.num_tokens
        self.tier = target.tier
        self._held = []
        self._held_reason = None
        self.choice = Choice(
            self._index, self._job, opens_thinking=target.opens_thinking, target=target
        )
        self.choice.usage.queue_s = small.usage.queue_s

    def _keep_small(self, small: _SmallAnswer) -> list[Delta]:
        """Send the small answer after all: the large tier failed before its first text."""
        self.choice, self.watch, self.tier = small.choice, small.watch, self._job.tier
        self.watch.reason = f"{self.watch.reason}; {_REFUSED}"
        self._observe(self.choice.usage.num_tokens)
        return small.deltas

    # ---- sent text ----------------------------------------------------------------------------

    async def _next_deltas(self) -> list[Delta]:
        """Return the deltas of the next event, of an answer that is not held back."""
        event = await self._reader.next()
        deltas = self._answer_with(event)
        if isinstance(event, TokensEmitted):
            if self._may_continue:
                await self._watch_on(event)
        elif isinstance(event, AnswerHeld):
            await self._engine.keep_on_tier(self._request.request_id)
        return deltas

    def _answer_with(self, event: EngineEvent) -> list[Delta]:
        small = self._small
        if isinstance(event, Failed) and small is not None and event.code not in _ENGINE_DIED:
            return self._keep_small(small)
        deltas = super()._answer_with(event)
        if small is not None and isinstance(event, PrefillDone):
            self._prompt = deltas  # may be taken back until there is text
            return []
        if deltas:
            deltas, self._prompt = [*self._prompt, *deltas], []
        if deltas and isinstance(event, TokensEmitted):
            self._small = None
        return deltas

    async def _watch_on(self, event: TokensEmitted) -> None:
        """Let the large tier continue in mid-stream where the watch trusts the answer no more."""
        judgement = self._hold_back.wants_continuation(event)
        if judgement is not None and self.choice.finish_reason is None:
            self._may_continue = False
            self._note(judgement)
            assert self._job.escalation is not None
            await self._engine.switch_tier(
                self._request.request_id, self._job.escalation.tier, keeps_answer=True
            )

    def _receive(self, event: EngineEvent) -> list[Delta]:
        match event:
            case AnswerHeld(finish_reason="stop" | "length" as reason):
                self._held_reason = reason
                return []
            case TierSwitched(keeps_answer=True):
                self._continue_in(event.tier)
                return []
            case Finished():
                self._is_over = True
        return super()._receive(event)

    def _note_prefill(self, event: PrefillDone) -> list[Delta]:
        # A continuation's own prompt is neither counted nor told of.
        return [] if self._is_continued else super()._note_prefill(event)

    def _add_tokens(self, event: TokensEmitted) -> list[Delta]:
        """Add tokens; drop those behind a stop string, which come only during a move."""
        if self.choice.finish_reason is not None:
            return []
        if self._predicts_small and self.watch.escalated:
            # The prediction was the small answer, not the client's guess.
            event = replace(
                event,
                num_predicted_tokens=0,
                num_reused_tokens=event.num_predicted_tokens,
                trace=event.trace and as_reused(event.trace),
            )
        return super()._add_tokens(event)

    def _continue_in(self, tier: Tier) -> None:
        """Continue on the other tier behind the sent text; its first gap is not counted."""
        self._note_switch()
        self.tier = tier
        self.watch.escalated = True
        self._is_continued = True
        self._num_continued = self.choice.usage.num_tokens
        self._last_token_s = None
        self._metrics.cascade_continued(tier)
