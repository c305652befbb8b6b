"""Answers a request by the local models: a generation, written as the response's body."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from gateway.answers.responder import (
    AnswerFacts,
    HandedOverError,
    PartialAnswer,
    Responder,
    RouteReason,
)
from gateway.generation import sse
from gateway.generation.choice import Delta
from gateway.generation.generation import Generation
from gateway.handoff.local_load import LoadTicket


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """The form of the answer. `with_running_usage` goes with `with_usage`."""

    is_streamed: bool
    with_usage: bool = False
    with_running_usage: bool = False
    with_trace: bool = False


class LocalResponder:
    """Answers by the engine's models, or passes on the answer of the tier that took over."""

    def __init__(
        self,
        generation: Generation,
        form: sse.Format,
        writing: Writing,
        origin: RouteReason,
        ticket: LoadTicket,
        on_answered: Callable[[tuple[str, ...]], None] | None = None,
        is_continuable: bool = False,
    ) -> None:
        """`ticket` follows the work. is_continuable: another tier may continue the answer if it
        breaks off. `on_answered` gets the choices' contents when all was delivered; it must not
        block.
        """
        self._generation = generation
        self._form = form
        self._writing = writing
        self._origin = origin
        self._ticket = ticket
        self._on_answered = on_answered
        self._is_continuable = is_continuable
        self._keeps_text = on_answered is not None or is_continuable
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._taken_over_by: Responder | None = None
        self._has_begun = False

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield the body. Raises GatewayError or EngineError."""
        writing = self._writing
        writer = sse.ChunkWriter(
            self._generation,
            self._form,
            self._origin,
            with_usage=writing.with_usage,
            with_running_usage=writing.with_running_usage,
            with_trace=writing.with_trace,
        )
        collected: list[Delta] = []
        try:
            async with aclosing(self._generation.deltas()) as deltas:
                async for delta in deltas:
                    self._note(delta)
                    if writing.is_streamed:
                        yield writer.chunk(delta)
                    else:
                        collected.append(delta)
        except HandedOverError as handed:
            self._end_ticket()
            self._taken_over_by = handed.taken.responder
            async with aclosing(handed.taken.parts()) as others:
                async for part in others:
                    yield part
            return
        finally:
            self._end_ticket()
        if writing.is_streamed:
            yield writer.ending()
        else:
            yield sse.whole_body(self._generation, self._form, self._origin, collected)
        if self._on_answered is not None:
            self._on_answered(tuple("".join(self._texts[i]) for i in sorted(self._texts)))

    def _note(self, delta: Delta) -> None:
        """Count one more delta. This runs for each token of each client."""
        if not self._has_begun:
            self._has_begun = True
            self._ticket.first_text()
        if self._keeps_text:
            self._keep(delta)

    def _end_ticket(self) -> None:
        """End the ticket: the models are done with the request. A second call does nothing."""
        counts = [choice.usage.num_tokens for choice in self._generation.choices]
        self._ticket.ended(max(counts, default=0))

    def _keep(self, delta: Delta) -> None:
        if delta.kind == "content":
            self._texts[delta.index].append(delta.text)
        else:  # thinking and calls cannot be begun by another model
            self._is_continuable = False

    @property
    def unfinished(self) -> PartialAnswer | None:
        """The sent text; None where more than plain text was sent."""
        if self._taken_over_by is not None:
            return self._taken_over_by.unfinished
        if not self._is_continuable:
            return None
        text = "".join(self._texts[0])
        before = self._origin.continues
        return PartialAnswer(
            text=text if before is None else before.text + text,
            num_tokens=self._num_tokens + (0 if before is None else before.num_tokens),
            answer_id=self._generation.job.job_id if before is None else before.answer_id,
        )

    @property
    def _num_tokens(self) -> int:
        return sum(choice.usage.num_tokens for choice in self._generation.choices)

    @property
    def facts(self) -> AnswerFacts:
        """The facts of the responder that answers in the end."""
        if self._taken_over_by is not None:
            return self._taken_over_by.facts
        generation, origin = self._generation, self._origin
        used = [choice.usage for choice in generation.choices]
        return AnswerFacts(
            tier=generation.tier,
            reason=origin.explain(generation.reason),
            job_id=generation.job.job_id,
            outcome=generation.outcome,
            num_tokens=self._num_tokens,
            hand_off=origin.hand_off or ("failure" if generation.is_degraded else None),
            confidence=generation.confidence,
            is_degraded=origin.is_degraded or generation.is_degraded,
            is_escalated=any(usage.escalated for usage in generation.cascades),
            ttft_s=generation.ttft_s(),
            inter_token_s=generation.inter_token_s(),
            num_prompt_tokens=generation.job.num_prompt_tokens,
            num_drafted_tokens=sum(usage.num_drafted_tokens for usage in used),
            num_accepted_tokens=sum(usage.num_accepted_tokens for usage in used),
        )
