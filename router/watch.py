"""The watch of a small answer: is what the small model writes good enough to be sent?

The gateway holds the first tokens of a small answer back and asks an `AnswerWatch` after each step;
it is pure arithmetic on numbers that the engine computes anyway.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.encoder.reader import PendingShares, without_shares
from outrider.router.estimates import QualityEstimate
from outrider.router.features import FloatRows

Action = Literal["hold", "commit", "escalate"]

_LEAST_LOGPROB: Final = -100.0
_WINDOW_TOKENS: Final = 64  # as long as the longest prefix that answer stages are trained on
_FAILED: Final = 0.5  # of the threshold, where no band says what is surely bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Decision about the tokens held back, and its reason."""

    action: Action
    confidence: float
    """A quality as in `Route`, in [0, 1]: how safe it is to keep the small model's answer."""
    reason: str
    """One ASCII line, fit for a header."""


class AnswerWatch(Protocol):
    """Watches one answer of the small model. Never raises for any numbers; must not block.

    Once it has said commit, later calls may say commit or, for a continuation in mid-stream,
    escalate; once it has said escalate it is not asked again.
    """

    def on_prompt(self, hidden_state: Sequence[float] | None) -> Judgement:
        """The prompt is read; the hidden state of its last token, [hidden_size], where known."""

    def on_tokens(self, logprobs: Sequence[float]) -> Judgement:
        """More tokens were written, with these log-probabilities (temperature 1)."""

    def on_time(self) -> Judgement:
        """Commit or escalate: nothing may be held any longer."""

    def on_end(self) -> Judgement:
        """The answer is whole: commit or escalate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    """Rules for watching a request's small answers."""

    new_watch: Callable[[], AnswerWatch]
    """Makes one watch for each of the n choices."""
    hold_back_s: float | None = None
    """The longest time that text is held, counted from the first token. None for no limit (whole
    answers)."""
    hold_back_tokens: int = 16
    """The same in tokens, for text without log-probabilities, which the watches do not see."""
    mid_stream: bool = False
    """The large model may continue text that was sent already."""
    wants_hidden_state: bool = True
    """The watches use the prompt's hidden state."""
    read_prompt: Callable[[], PendingShares] | None = None
    """Begins what the watches want to have read when they judge the prompt; the same each time."""
    on_agreement: Callable[[float, float], None] | None = None
    """Called for answers that the large model has judged: the watch's confidence, and the share of
    the held tokens that the large model wrote too."""
    is_explored: bool = False
    """The large model judges this answer even if it is kept."""


class Stages(Protocol):
    """The stages of a trained router that a watch uses: `RouterScorer` implements them."""

    def estimate_prompt(
        self,
        text_estimate: QualityEstimate,
        hidden_state: Sequence[float] | None,
        shares: FloatRows | None = None,
    ) -> QualityEstimate:
        """Refine the estimate by what is known of the prompt; without it, return it unchanged."""

    def estimate_answer(
        self, prompt_estimate: QualityEstimate, logprobs: Sequence[float], *, is_whole: bool
    ) -> QualityEstimate:
        """Refine the estimate by the log-probabilities of the tokens so far, at least one."""


@dataclass(frozen=True, slots=True)
class UntrainedAnswers:
    """Stands in for an answer stage that was not trained, where a watch is wanted all the same.

    The confidence is the geometric mean of the quality so far and the probability that nine in ten
    of the tokens exceed. It orders answers; it is not calibrated.
    """

    stages: Stages

    def estimate_prompt(
        self,
        text_estimate: QualityEstimate,
        hidden_state: Sequence[float] | None,
        shares: FloatRows | None = None,
    ) -> QualityEstimate:
        """The router's own."""
        return self.stages.estimate_prompt(text_estimate, hidden_state, shares)

    def estimate_answer(
        self, prompt_estimate: QualityEstimate, logprobs: Sequence[float], *, is_whole: bool
    ) -> QualityEstimate:
        """The geometric mean."""
        del is_whole
        low = sorted(logprobs)[len(logprobs) // 10]
        return QualityEstimate(small=math.sqrt(prompt_estimate.quality * math.exp(low)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRules:
    """Rules of a watch's decision."""

    threshold: float
    """An answer is kept from this quality on."""
    sure: tuple[float, float] = (0.0, ALWAYS_LARGE)
    """Qualities (low, high) outside of which a stage's estimate is final before the last one ran.
    They are the calibrated band of the text stage. Outside it the last stage overrules the text for
    fewer than 2 % of the prompts. Every later stage knows more and is overruled less."""
    last_stage: Literal["prompt", "answer"] = "answer"
    """The one that the threshold was calibrated for."""
    hold_back_tokens: int = 16
    is_whole: bool = False
    """Decide when the answer is complete (or surely bad)."""
    goes_on: bool = False
    """Keep watching answers that were committed."""


OnVerdict = Callable[[float, bool], None]
"""Told once for each answer: the confidence, and whether it is escalated."""


class WatchedAnswer:
    """An `AnswerWatch` over a router's stages: text, then prompt, then what is written.

    The answer stage is asked when the tokens have doubled, not after each: microseconds a request.
    """

    def __init__(
        self,
        stages: Stages,
        rules: WatchRules,
        text_estimate: QualityEstimate,
        on_verdict: OnVerdict | None = None,
        reading: PendingShares | None = None,
    ) -> None:
        """`reading`: of the prompt; what is not there when the prompt is judged is done without."""
        self._stages = stages
        self._rules = rules
        self._estimate = text_estimate
        self._on_verdict = on_verdict
        self._reading = reading or without_shares()
        self._logprobs: list[float] = []
        self._next_check = 1
        self._verdict: Judgement | None = None

    def on_prompt(self, hidden_state: Sequence[float] | None) -> Judgement:
        """Decide where the prompt alone leaves no doubt, or where nothing more will be known."""
        shares = self._reading.result() if self._reading.done() else None
        self._estimate = self._stages.estimate_prompt(self._estimate, hidden_state, shares)
        if self._rules.last_stage == "prompt":
            return self._decide(self._estimate.quality, "from the prompt")
        return self._unless_sure(self._estimate.quality, "from the prompt")

    def on_tokens(self, logprobs: Sequence[float]) -> Judgement:
        """Decide at the hold-back's end, or before it where there is no doubt."""
        self._logprobs += map(_cleaned, logprobs)
        num_tokens = len(self._logprobs)
        if self._verdict is not None:
            return self._on_committed(self._verdict, num_tokens)
        after = f"after {_tokens(num_tokens)}"
        if self._rules.last_stage == "prompt":  # and the prompt's score is missing
            return self._decide(self._estimate.quality, after)
        if num_tokens >= self._rules.hold_back_tokens and not self._rules.is_whole:
            return self._decide(self._quality(), after)
        if num_tokens < self._next_check:
            return _held(self._estimate.quality)
        self._next_check = 2 * num_tokens
        return self._unless_sure(self._quality(), after)

    def on_time(self) -> Judgement:
        """Decide by what is known."""
        num_tokens = len(self._logprobs)
        after = f"after {_tokens(num_tokens)}, time is up" if num_tokens else "from the prompt"
        return self._verdict or self._decide(self._quality(), after)

    def on_end(self) -> Judgement:
        """Decide by the whole answer."""
        after = f"all {_tokens(len(self._logprobs))} read"
        return self._verdict or self._decide(self._quality(is_whole=True), after)

    def _quality(self, *, is_whole: bool = False) -> float:
        """Return the quality by the last stage that has an input."""
        if not self._logprobs or self._rules.last_stage == "prompt":
            return self._estimate.quality
        return self._stages.estimate_answer(
            self._estimate, self._logprobs, is_whole=is_whole
        ).quality

    def _unless_sure(self, quality: float, after: str) -> Judgement:
        low, high = self._rules.sure
        threshold = self._rules.threshold
        is_bad = quality < min(low, threshold)
        is_good = quality >= max(high, threshold) and not self._rules.is_whole
        return self._decide(quality, after) if is_bad or is_good else _held(quality)

    def _decide(self, quality: float, after: str) -> Judgement:
        is_kept = quality >= self._rules.threshold
        what, relation = ("kept", ">=") if is_kept else ("too weak", "<")
        self._verdict = Judgement(
            action="commit" if is_kept else "escalate",
            confidence=quality,
            reason=f"cascade: small answer {what} "
            f"({quality:.2f} {relation} {self._rules.threshold:.2f}) {after}",
        )
        self._next_check = len(self._logprobs) + _WINDOW_TOKENS // 2
        if self._on_verdict is not None:
            self._on_verdict(quality, not is_kept)
        return self._verdict

    def _on_committed(self, verdict: Judgement, num_tokens: int) -> Judgement:
        """Decide in mid-stream whether the latest tokens are surely bad."""
        if not self._rules.goes_on or num_tokens < self._next_check:
            return verdict
        self._next_check = num_tokens + _WINDOW_TOKENS // 2
        latest = self._logprobs[-_WINDOW_TOKENS:]
        quality = self._stages.estimate_answer(self._estimate, latest, is_whole=False).quality
        # What was sent stays: only a clear failure is worth a seam in the text.
        low = min(self._rules.sure[0] or _FAILED * self._rules.threshold, self._rules.threshold)
        if quality >= low:
            return verdict
        return Judgement(
            action="escalate",
            confidence=quality,
            reason=f"cascade: small answer went astray ({quality:.2f} < {low:.2f}) "
            f"after {_tokens(num_tokens)}",
        )


def _held(quality: float) -> Judgement:
    return Judgement(action="hold", confidence=quality, reason="cascade: held")


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _cleaned(logprob: float) -> float:
    """A log-probability as the stages were trained on: finite, not above 0."""
    return min(max(logprob, _LEAST_LOGPROB), 0.0) if logprob == logprob else _LEAST_LOGPROB
