"""Rows of a pass that prompts may have: those of batch requests, and scored ones, counted apart."""

from outrider.engine.config import MAX_SCORED_ROWS, EngineConfig
from outrider.engine.queue.policy import StepThrottle
from outrider.engine.sequences.sequence import Sequence
from outrider.engine.ttft_predictor import ServiceTimes
from outrider.verifier.params import Hypothesis, Tier

# A batch prompt that may be computed at all gets so many rows, or it would never end.
_MIN_BATCH_ROWS = 16
# What judging a row takes, in rows that are scored: it draws the noise of the whole vocabulary.
_JUDGED_ROW = 2
# And where both models have a part: their mixture is torch's, and takes much longer.
_MIXED_ROW = 16


class PrefillRows:
    """Bounds the prompts of a pass, in tokens and in time."""

    def __init__(self, config: EngineConfig, times: ServiceTimes) -> None:
        self.throttle: StepThrottle | None = None
        """Limits batch requests in the current step; None: they are not held back."""
        self._config = config
        self._times = times
        self._num_batch_rows = 0
        self._num_scored_rows = 0

    def begin_pass(self, tier: Tier, *, is_decoding: bool) -> int:
        """Return the rows that a pass may have; fewer where answers wait for their next token."""
        config = self._config
        self._num_scored_rows = MAX_SCORED_ROWS
        budget_s = config.prefill_chunk_s if is_decoding else config.lone_prefill_s
        num_rows = self._times.prefill_rows(tier, budget_s)
        if self.throttle is not None:
            row_s = self._times.row_s(tier)
            affordable = num_rows if row_s is None else self.throttle.batch_prefill_s / row_s
            self._num_batch_rows = int(max(min(affordable, num_rows), _MIN_BATCH_ROWS))
        return num_rows

    def take(self, sequence: Sequence, num_left: int) -> int:
        """Return how many of its uncomputed tokens go into the pass, which has `num_left` rows."""
        num_tokens = min(sequence.num_prefill_tokens, num_left)
        is_batch = self.throttle is not None and sequence.request.objective.is_batch
        if is_batch:
            num_tokens = min(num_tokens, self._num_batch_rows)
        if sequence.num_unscored_tokens:
            num_tokens = self._take_scored(sequence, num_tokens)
        if is_batch:
            self._num_batch_rows -= num_tokens
        return num_tokens

    def _take_scored(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many go into it of a prompt whose tokens' scores are wanted."""
        # Rows that were scored before a pre-emption are computed again, and not scored again.
        num_known = sequence.num_scored_rows - sequence.view.num_computed_tokens
        asked = sequence.request.verification
        cost = 1 if asked is None else sum(map(_judging_cost, asked.hypotheses))
        num_scored = min(sequence.num_unscored_tokens, max(self._num_scored_rows // cost, 1))
        num_tokens = min(num_tokens, num_known + num_scored)
        self._num_scored_rows -= cost * max(num_tokens - num_known, 0)
        return num_tokens

    def leaves_out(self, sequence: Sequence) -> bool:
        """True if it is of a kind that has had its rows of the pass."""
        if sequence.num_unscored_tokens and self._num_scored_rows <= 0:
            return True
        is_full = self.throttle is not None and self._num_batch_rows <= 0
        return is_full and sequence.request.objective.is_batch


def _judging_cost(hypothesis: Hypothesis) -> int:
    """Return what judging a row takes, in rows that are scored."""
    return _JUDGED_ROW if hypothesis.cascade is None else _MIXED_ROW
