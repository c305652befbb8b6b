"""Answers of the local models, as parts of a response's body."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from outrider.gateway.answering.reading.local_load import LoadTicket
from outrider.gateway.answering.streaming import sse
from outrider.gateway.answering.streaming.delta import Delta
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.contract.answers.responder import (
    AnswerEscalated,
    AnswerFacts,
    PartialAnswer,
    Place,
    RouteReason,
    StrongAnswer,
)
from outrider.verifier.params import record


@record(frozen=True, slots=True, kw_only=True)
class Writing:
    """The form in which an answer is written."""

    is_streamed: bool
    with_usage: bool = False
    with_running_usage: bool = False
    """Only with `with_usage`."""
    begins_with_usage: bool = False
    """The first chunk has the usage, as each has with `with_running_usage`."""
    with_trace: bool = False


class LocalResponder:
    """Answers by the engine's models, or passes on the strong tier's answer."""

    escalated_to: Place | None = None

    def __init__(
        self,
        generation: Generation,
        writing: Writing,
        origin: RouteReason,
        ticket: LoadTicket,
        on_answered: Callable[[tuple[str, ...]], None] | None = None,
        is_continuable: bool = False,
    ) -> None:
        """`ticket` follows the work. `is_continuable`: another tier may continue the answer if it
        breaks off. `on_answered` gets the choices' contents when all was delivered; it must not
        block.
        """
        self._generation = generation
        self._writing = writing
        self._origin = origin
        self._ticket = ticket
        self._on_answered = on_answered
        self._is_continuable = is_continuable
        self._keeps_text = on_answered is not None or is_continuable
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._strong_answer: StrongAnswer | None = None
        self._has_begun = False

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield the body. Raises GatewayError or EngineError."""
        writing = self._writing
        writer = sse.ChunkWriter(
            self._generation,
            self._origin,
            with_usage=writing.with_usage,
            with_running_usage=writing.with_running_usage,
            begins_with_usage=writing.begins_with_usage,
            with_trace=writing.with_trace,
        )
        collected: list[Delta] = []
        try:
            with self._generation as generation:
                async with aclosing(generation.steps()) as steps:
                    async for deltas in steps:  # this runs for each step of each client
                        self._note(deltas)
                        if writing.is_streamed:
                            yield writer.chunks(deltas)
                        else:
                            collected += deltas
        except AnswerEscalated as signal:
            self._end_ticket()
            self._strong_answer, self.escalated_to = signal.answer, signal.answer.place
            async with aclosing(signal.answer.parts()) as others:
                async for part in others:
                    yield part
            return
        finally:
            self._end_ticket()
        if writing.is_streamed:
            yield writer.ending()
        else:
            yield sse.whole_body(self._generation, self._origin, collected)
        if self._on_answered is not None:
            self._on_answered(tuple("".join(self._texts[i]) for i in sorted(self._texts)))

    def _note(self, deltas: Sequence[Delta]) -> None:
        """Note a step's text."""
        if not self._has_begun:
            self._has_begun = True
            self._ticket.first_text()
        if self._keeps_text:
            for delta in deltas:
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
        if self._strong_answer is not None:
            return self._strong_answer.responder.unfinished
        if not self._is_continuable:
            return None
        text = "".join(self._texts[0])
        sent = self._origin.continues
        return PartialAnswer(
            text=text if sent is None else sent.text + text,
            num_tokens=self._num_tokens + (0 if sent is None else sent.num_tokens),
            answer_id=self._generation.job.job_id if sent is None else sent.answer_id,
        )

    @property
    def _num_tokens(self) -> int:
        return sum(choice.usage.num_tokens for choice in self._generation.choices)

    @property
    def facts(self) -> AnswerFacts:
        """The facts of the responder that answers in the end."""
        if self._strong_answer is not None:
            return self._strong_answer.responder.facts
        generation, origin = self._generation, self._origin
        used, is_degraded = generation.usage, generation.is_degraded
        return AnswerFacts(
            tier=generation.tier,
            reason=origin.explain(generation.reason),
            job_id=generation.job.job_id,
            outcome=generation.outcome,
            num_tokens=used.num_tokens,
            hand_off=origin.hand_off or ("failure" if is_degraded else None),
            confidence=generation.confidence,
            is_degraded=origin.is_degraded or is_degraded,
            is_escalated=generation.is_escalated,
            ttft_s=generation.ttft_s(),
            inter_token_s=generation.inter_token_s(),
            num_prompt_tokens=generation.job.num_prompt_tokens,
            num_drafted_tokens=used.num_drafted_tokens,
            num_accepted_tokens=used.num_accepted_tokens,
            is_cut_by_limit=generation.is_cut_by_limit,
            left_out=self.left_out,
        )

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the grammar of the answer does not enforce, as the request's fields."""
        if self._strong_answer is not None:
            return self._strong_answer.responder.left_out
        return tuple(map(_field_of, self._generation.left_out))


def _field_of(left_out: str) -> str:
    """Write `place#pointer` as the path of a field."""
    place, _, pointer = left_out.partition("#")
    return place + pointer.replace("/", ".")
