"""The time that a sequence has left for its objectives."""

import math
from dataclasses import dataclass
from typing import Final

from outrider.engine.sequences.sequence import Sequence, SequenceStatus
from outrider.engine.ttft_predictor import ServiceTimes

# A prompt may take so much longer than expected before its deadline counts as out of reach.
_PREFILL_MARGIN: Final = 1.2
# With less than this share of its time left, a prompt is computed without batch beside it.
_GUARDED_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SloQueueConfig:
    """Bounds on the effect of objectives."""

    unstated_ttft_s: float = 10.0
    """The objective assumed for a request without one."""
    late_aging_s: float = 20.0
    """A request that is so much over its time counts as passed over."""
    batch_aging_s: float = 120.0
    """A batch request that has waited so long counts as passed over."""
    aged_every: int = 4
    """One of so many starts of a tier is for requests that were passed over."""
    batch_share: float = 0.5
    """Share of seats that batch requests may hold while other requests are there."""
    pace: float = 0.8
    """Share of the requested time between tokens that is aimed at."""
    max_pause_s: float = 2.0
    """A batch answer that stood still for so long gets a step."""
    max_displacements: int = 2
    """Times that a batch answer may lose its seat to a request that is short of time."""
    max_lead_tokens: float = 2048.0
    """A tenant that has had so many more tokens (over its weight) than the one whose turn it is
    takes no seat from others."""


class Deadlines:
    """Compares objectives with the measured times of passes and answers."""

    def __init__(self, config: SloQueueConfig) -> None:
        self._slo = config
        self.times: ServiceTimes | None = None  # until the scheduler measures

    def start_by_s(self, sequence: Sequence) -> float:
        """Return the latest time to begin its prompt for its first token to come in time.

        Batch has until it counts as passed over, so within a pass no prompt waits for ever.
        """
        objective = sequence.request.objective
        if objective.is_batch:
            return sequence.arrival_s + self._slo.batch_aging_s
        ttft_s = objective.ttft_s
        if ttft_s is None:
            return sequence.arrival_s + self._slo.unstated_ttft_s
        return sequence.arrival_s + ttft_s - self._lead_s(sequence)

    def _lead_s(self, sequence: Sequence) -> float:
        """Return how long it takes from the start of its prompt to its first token."""
        times = self.times
        if times is None:
            return 0.0
        row_s = times.prefill_row_s(sequence.tier)
        return _PREFILL_MARGIN * sequence.num_uncomputed_tokens * row_s + (times.step_s or 0.0)

    @property
    def _step_s(self) -> float:
        return 0.0 if self.times is None else self.times.step_s or 0.0

    def is_late(self, sequence: Sequence, now_s: float) -> bool:
        """True if its first token cannot come in time any more."""
        return (
            sequence.first_token_s is None
            and sequence.request.objective.ttft_s is not None
            and not sequence.request.objective.is_batch
            and now_s > self.start_by_s(sequence)
        )

    def is_aged(self, sequence: Sequence, now_s: float) -> bool:
        """True if it was passed over for long enough."""
        objective, waited_s = sequence.request.objective, now_s - sequence.arrival_s
        if objective.is_batch:
            return waited_s >= self._slo.batch_aging_s
        if objective.ttft_s is None or sequence.first_token_s is not None:
            return False
        return waited_s >= objective.ttft_s + self._slo.late_aging_s

    def has_time(self, sequence: Sequence, now_s: float) -> bool:
        """True if it can wait until no running sequence is short of time."""
        ttft_s = sequence.request.objective.ttft_s
        if ttft_s is None or sequence.first_token_s is not None:
            return False
        left_s = self.start_by_s(sequence) - now_s - self._step_s
        return left_s > _GUARDED_SHARE * ttft_s

    def spare_s(self, sequence: Sequence, now_s: float) -> float:
        """Seconds that a sequence could give to others now; infinite where it has no objective.

        Until the next token is due or the prompt has to be begun, less the step that begins.
        """
        objective = sequence.request.objective
        if sequence.first_token_s is None:
            if objective.ttft_s is None or self.is_late(sequence, now_s):
                return math.inf
            left_s = self.start_by_s(sequence) - now_s
            return left_s - self._step_s - _GUARDED_SHARE * objective.ttft_s
        if objective.inter_token_s is None or sequence.status is not SequenceStatus.RUNNING:
            return math.inf
        inter_token_s = objective.inter_token_s
        if self.is_behind(sequence, inter_token_s, now_s + self._step_s):
            return math.inf
        begun_s = sequence.first_token_s - now_s - self._step_s
        return begun_s + sequence.num_own_tokens * inter_token_s * self._slo.pace

    def is_behind(self, sequence: Sequence, inter_token_s: float, now_s: float) -> bool:
        """True if it is too far behind its pace for the rest of its answer to make it good."""
        if sequence.first_token_s is None:
            return False
        due_s = sequence.first_token_s + sequence.num_own_tokens * inter_token_s
        return due_s + self._gain_s(sequence, inter_token_s) < now_s

    def _gain_s(self, sequence: Sequence, inter_token_s: float) -> float:
        """Seconds behind that the rest of an answer could make good, at the best pace."""
        if self.times is None:
            return 0.0
        best_s = self.times.best_token_s.get(sequence.tier, 0.0)
        return self.times.remaining_tokens(sequence) * (inter_token_s - best_s)
