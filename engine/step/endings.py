"""Ends sequences: finished, held, or failed."""

from outrider.engine.errors import (
    EngineError,
    InvalidGrammarError,
    NotFiniteError,
    PinTooLargeError,
    as_utf8,
)
from outrider.engine.events import AnswerHeld, EngineEvent, Failed, Finished, FinishReason
from outrider.engine.queue.admission import ObjectiveGate
from outrider.engine.queue.preparation import Preparation
from outrider.engine.queue.scheduler import Scheduler
from outrider.engine.sequences.pinned_prompts import PinnedPrompts
from outrider.engine.sequences.sequence import Sequence, SequenceStatus
from outrider.engine.step.snapshot import StepCounts
from outrider.engine.trees.verify_items import cut_at_end


class Endings:
    """Ends the sequences of one engine, and reports how."""

    def __init__(
        self,
        *,
        sequences: dict[str, Sequence],
        events: list[EngineEvent],
        scheduler: Scheduler,
        preparation: Preparation,
        gate: ObjectiveGate,
        pins: PinnedPrompts,
        counts: StepCounts,
    ) -> None:
        """`sequences` and `events` are the engine's own: they are changed here."""
        self._sequences = sequences
        self._events = events
        self._scheduler = scheduler
        self._preparation = preparation
        self._gate = gate
        self._pins = pins
        self._counts = counts

    def end_if_done(self, sequence: Sequence) -> None:
        """End a sequence that has just been queued, and of which nothing is to be computed.

        All of its answer was there before, or it was to bring another engine's blocks only.
        """
        source = sequence.request.source
        if source is not None and source.is_only:
            self.finish(sequence, "length")
        elif sequence.num_resumed_tokens:
            most, stops = sequence.request.sampling.max_tokens, sequence.stop_token_ids
            _, reason = cut_at_end(sequence.output_token_ids, stops, most)
            if reason is not None:
                self.end(sequence, reason)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish an answer that has ended by itself, or hold it where it may be escalated.

        Its prompt is kept, where that is wanted, while the sequence holds it still.
        """
        try:
            self._pins.keep(sequence)
        except PinTooLargeError as error:
            sequence.failure = error
            self.fail(sequence)
            return
        if not sequence.is_watched:
            self.finish(sequence, reason)
            return
        sequence.held_reason = reason
        self._scheduler.hold(sequence)
        self._events.append(AnswerHeld(request_id=sequence.request_id, finish_reason=reason))

    def fail(self, sequence: Sequence) -> None:
        """End a sequence whose own part of the step could not be done."""
        sequence.finish_reason = "abort"
        self._take_out(sequence)
        if isinstance(sequence.failure, InvalidGrammarError | EngineError):
            if isinstance(sequence.failure, NotFiniteError):
                self._counts.note_not_finite(sequence.tier)
            self.forget(sequence, code=sequence.failure.code, message=str(sequence.failure))
            return
        self.forget(
            sequence,
            code="request_failed",
            message=(
                "The grammar or the sampling parameters of this request could not be followed "
                f"({type(sequence.failure).__name__}). The same request would fail again: change "
                "the grammar or the parameters."
            ),
        )

    def forget(self, sequence: Sequence, *, code: str, message: str) -> None:
        """Drop a sequence that the scheduler does not have any more, and say why."""
        self._gate.forget(sequence)
        self._preparation.forget(sequence)
        del self._sequences[sequence.request_id]
        self._events.append(
            Failed(
                request_id=sequence.request_id,
                code=code,
                message=as_utf8(message),
                stats=sequence.stats(),
            )
        )

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End an answer, and report it."""
        sequence.finish_reason = reason
        self._gate.forget(sequence)
        self._take_out(sequence)
        self._preparation.forget(sequence)
        del self._sequences[sequence.request_id]
        self._events.append(
            Finished(
                request_id=sequence.request_id,
                tier=sequence.tier,
                finish_reason=reason,
                stats=sequence.stats(),
            )
        )

    def _take_out(self, sequence: Sequence) -> None:
        """Take a sequence from the queue that has it, and give back what it holds."""
        if self._preparation.discard(sequence.request_id):
            sequence.status = SequenceStatus.FINISHED
        else:
            self._scheduler.remove(sequence)
