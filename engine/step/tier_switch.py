"""Moves a sequence from one tier to another, and decides what is kept of a small answer.

The decision to escalate has looked at the small model's tokens, so the large model answers with a
noise stream of its own. What the small model wrote, and what else it thought likely there, is only
proposed; its keys and values go on as the draft view.
"""

from collections.abc import Mapping

from outrider.engine.errors import InvalidRequestError, TierUnavailableError
from outrider.engine.events import TierSwitched
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import Drafter
from outrider.engine.queue.admission import check_prompt
from outrider.engine.queue.scheduler import Scheduler
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.noise import SequenceNoise
from outrider.verifier.params import Tier


class TierSwitcher:
    """Moves sequences between the tiers of one engine."""

    def __init__(
        self,
        *,
        runners: Mapping[Tier, ModelRunner],
        scheduler: Scheduler,
        drafter: Drafter | None,
    ) -> None:
        self._runners = runners
        self._scheduler = scheduler
        self._drafter = drafter
        self._vocab_size = max(runner.vocab_size for runner in runners.values())

    def noise(self, request: EngineRequest, tier: Tier) -> SequenceNoise:
        """A tier's own noise for a request."""
        return SequenceNoise(request.sampling, tier, vocab_size=self._vocab_size)

    def check(self, sequence: Sequence, tier: Tier, *, keeps_answer: bool) -> None:
        """Raise an EngineError where another tier cannot take a sequence."""
        runner, request = self._runners.get(tier), sequence.request
        if runner is None:
            raise TierUnavailableError(
                f"tier {tier!r} is not loaded; loaded: {', '.join(self._runners)}"
            )
        check_prompt(request, runner)
        if keeps_answer and max(sequence.token_ids) >= runner.vocab_size:
            raise InvalidRequestError(
                f"the answer cannot be continued by tier {tier!r}: it has token id "
                f"{max(sequence.token_ids)}, and that tier's vocabulary ends at {runner.vocab_size}"
            )

    def switch(
        self, sequence: Sequence, tier: Tier, *, keeps_answer: bool, is_queued: bool
    ) -> TierSwitched:
        """Switch a sequence to another tier, which begins anew or goes on behind the answer so far.

        To be called after `check`. `is_queued`: whether the scheduler has the sequence.
        """
        runner, request = self._runners[tier], sequence.request
        old_view = sequence.view
        sequence.view = runner.new_view(request.cache_salt, sequence.adapters.get(tier))
        if is_queued:
            self._scheduler.remove(sequence)
            is_drafted = request.speculation.enabled or request.cascade is not None
            if self._drafter is not None and tier == "large" and is_drafted:
                self._drafter.adopt(sequence, old_view)
            else:
                old_view.release()
        noise = sequence.large_noise if tier == "large" else None
        noise = noise or self.noise(request, tier)
        if keeps_answer:
            sequence.continue_on(tier, noise)
        else:
            self._scheduler.note_retracted(sequence)
            sequence.restart_on(tier, noise)
        if is_queued:
            self._scheduler.add(sequence)
        return TierSwitched(request_id=sequence.request_id, tier=tier, keeps_answer=keeps_answer)

    def rival_noise(self, sequence: Sequence) -> SequenceNoise | None:
        """The noise by which a watched answer's rivals are ranked; None where none are wanted.

        What the small model thinks likeliest is ranked as a drafter would rank it: with the large
        tier's noise.
        """
        is_wanted = (
            self._drafter is not None
            and "large" in self._runners
            and sequence.is_watched
            and sequence.request.speculation.enabled
            # Behind another tier's tokens, which were kept, the places would not be these.
            and len(sequence.rivals) == sequence.num_output_tokens
        )
        if not is_wanted:
            return None
        if sequence.large_noise is None:
            sequence.large_noise = self.noise(sequence.request, "large")
        return sequence.large_noise
