"""Predicts a newcomer's time to first token from service times that are learnt online.

The forecast plays the queue forward, start by start (as a list schedule of known jobs): seats and
blocks become free when running answers are expected to end, prompts are computed one after another.
What it says is compared with what happens, and corrected by the ratio.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from outrider.engine.answer_pace import AnswerPace
from outrider.engine.config import EngineConfig
from outrider.engine.sequences.sequence import Sequence
from outrider.verifier.params import Tier

_ROW_WEIGHT: Final = 0.2
_STEP_WEIGHT: Final = 0.1
_ANSWER_WEIGHT: Final = 0.1
# Below this many rows a pass says little about the cost of one more row.
_MIN_ROWS_FOR_COST: Final = 32
# The best pass that was seen counts for less with each later one.
_BEST_FORGOTTEN: Final = 1.0005
# A pass of an unknown machine: enough to learn from, and no long one anywhere.
_FIRST_PREFILL_ROWS: Final = 256
_BEST_ANSWER_FORGOTTEN: Final = 1.01
_FIRST_GUESS_TOKENS: Final = 128.0

_RATIO_WEIGHT: Final = 0.1
_MAX_LOG_RATIO: Final = math.log(4.0)
_RELAXED: Final = 0.97


class ServiceTimes:
    """Times of passes, steps and answers, as running means. Seconds; None before the first.

    `step_s`: a step without prompts of the large tier. `best_row_s`: a prompt row in the fastest
    pass of late, which no bad moment of the machine has made longer; `best_token_s` between two
    tokens of the fastest answer; `pace`: of the large tier's answers, by how many there are.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.step_s: float | None = None
        self.pace = AnswerPace()
        self.best_row_s: dict[Tier, float] = {}
        self.best_token_s: dict[Tier, float] = {}
        self._row_s: dict[Tier, float] = {}
        self._last_row_s: dict[Tier, float] = {}
        self._token_s: dict[Tier, float] = {}
        self._answer_tokens: dict[Tier, float] = {}

    def note_pass(self, tier: Tier, *, num_rows: int, elapsed_s: float) -> None:
        """Learn what a row costs, from a pass with many of them."""
        if num_rows < _MIN_ROWS_FOR_COST:
            return
        cost_s = elapsed_s / num_rows
        self._last_row_s[tier] = cost_s
        known_s = self._row_s.get(tier, cost_s)
        self._row_s[tier] = known_s + _ROW_WEIGHT * (cost_s - known_s)
        self.best_row_s[tier] = min(self.best_row_s.get(tier, cost_s) * _BEST_FORGOTTEN, cost_s)

    def note_step(self, elapsed_s: float) -> None:
        """Learn from a step that had no prompts."""
        known_s = elapsed_s if self.step_s is None else self.step_s
        self.step_s = known_s + _STEP_WEIGHT * (elapsed_s - known_s)

    def note_answer(self, sequence: Sequence, now_s: float) -> None:
        """Learn from an answer that has come to its end by itself."""
        tier, num_tokens = sequence.tier, sequence.num_output_tokens
        mean = self._answer_tokens.get(tier, float(num_tokens))
        self._answer_tokens[tier] = mean + _ANSWER_WEIGHT * (num_tokens - mean)
        num_own = sequence.num_own_tokens
        if num_own > 1 and sequence.first_token_s is not None:
            token_s = max(now_s - sequence.first_token_s, 0.0) / (num_own - 1)
            known_s = self._token_s.get(tier, token_s)
            self._token_s[tier] = known_s + _ANSWER_WEIGHT * (token_s - known_s)
            best_s = self.best_token_s.get(tier, token_s) * _BEST_ANSWER_FORGOTTEN
            self.best_token_s[tier] = min(best_s, token_s)

    def row_s(self, tier: Tier) -> float | None:
        """Return what a row of a pass costs."""
        return self._row_s.get(tier)

    def token_s(self, tier: Tier) -> float:
        """Between two tokens of an answer; a step where no answer has ended yet."""
        return self._token_s.get(tier, self.step_s or 0.0)

    def remaining_tokens(self, sequence: Sequence) -> float:
        """Expected tokens still to write: the same however many it has written (memoryless)."""
        mean = self._answer_tokens.get(sequence.tier, _FIRST_GUESS_TOKENS)
        return min(mean, sequence.num_remaining_tokens)

    def prefill_rows(self, tier: Tier, budget_s: float) -> int:
        """Rows of prompts that a pass may have, for at most about `budget_s`."""
        affordable, cost_s = _FIRST_PREFILL_ROWS, self._row_s.get(tier)
        if cost_s is not None:
            # A prompt's rows get dearer with its context, faster than a mean does.
            affordable = int(budget_s / max(cost_s, self._last_row_s[tier]))
        most = self._config.max_tokens_per_step
        return min(max(affordable, self._config.min_prefill_tokens), most)

    def prefill_row_s(self, tier: Tier, *, is_alone: bool = False) -> float:
        """Seconds for each row of a prompt; not alone, in chunks with all decodes between.

        0 where nothing is known yet.
        """
        cost_s = self._row_s.get(tier)
        if cost_s is None:
            return 0.0
        if is_alone:
            return cost_s
        num_rows = self.prefill_rows(tier, self._config.prefill_chunk_s)
        return cost_s + (self.step_s or 0.0) / num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """The prompt rows, answer tokens and blocks that a sequence still needs (or has)."""

    num_rows: int
    num_tokens: float
    num_blocks: int


def predict_ttft_s(
    *,
    running: Iterable[RemainingWork],
    ahead: Iterable[RemainingWork],
    newcomer: RemainingWork,
    num_free_sequences: int,
    num_blocks: int,
    row_s: float,
    token_s: float,
) -> float:
    """Seconds until a newcomer's prompt is computed; `num_blocks` are free now.

    `running` are in the order in which their prompts are computed, `ahead` in that of their start.
    A job that needs more blocks than there will ever be starts when all others have ended.
    """
    now_s = prompts_done_s = 0.0
    ends: list[tuple[float, int]] = []  # when a running one ends, and its blocks
    for job in running:
        prompts_done_s += job.num_rows * row_s
        begun_s = prompts_done_s if job.num_rows else 0.0
        ends.append((begun_s + job.num_tokens * token_s, job.num_blocks))
    heapify(ends)
    for job in (*ahead, newcomer):
        while ends and (num_free_sequences < 1 or num_blocks < job.num_blocks):
            end_s, freed = heappop(ends)
            now_s = max(now_s, end_s)
            num_free_sequences += 1
            num_blocks += freed
        num_free_sequences -= 1
        num_blocks -= job.num_blocks
        prompts_done_s = max(prompts_done_s, now_s) + job.num_rows * row_s
        heappush(ends, (prompts_done_s + job.num_tokens * token_s, job.num_blocks))
    return prompts_done_s


class ForecastCorrection:
    """The ratio of what happened to what was foretold, as a running mean of its logarithm."""

    def __init__(self) -> None:
        self._log_ratio = 0.0

    @property
    def ratio(self) -> float:
        """Return what a forecast is multiplied by."""
        return math.exp(self._log_ratio)

    def note(self, *, predicted_s: float, actual_s: float) -> None:
        """Learn from a forecast (before correction) whose outcome is known."""
        if predicted_s <= 0.0 or actual_s <= 0.0:
            return
        found = math.log(actual_s / predicted_s)
        found = min(max(found, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)
        self._log_ratio += _RATIO_WEIGHT * (found - self._log_ratio)

    def relax(self) -> None:
        """Note a forecast whose outcome stays unknown: trust the correction a little less.

        Or a ratio that was learnt in a bad moment could refuse every request, and never be
        corrected.
        """
        self._log_ratio *= _RELAXED
