"""Routing without a router: the small model begins every answer, and its own tokens decide.

The score of an answer is a quantile of its first tokens' probabilities, the one that 19 in 20
exceed: one unsure token among many sure ones would not move a mean (Gupta et al., ICLR 2024). It is
stretched near 1, where most tokens are, by the square root that router/answer_features.py has. An
answer is kept from the score on at which the large model agrees often enough. That threshold is
learnt while serving, from the share of the small model's tokens that the large model writes too: it
judges every answer that it takes over, and a few of those that are kept. At temperature 0 such a
token is the large model's own choice; when sampling, it is one with the large model's probability
of it, so the share is that probability without bias.

Which answers are judged depends on their score alone. So the mean agreement at a score is that of
all answers with this score, although those that are judged are mostly weak ones.

Where hardly any answer is kept, beginning one only delays the large model. Then most requests go to
it at once, and a few still begin small, so that a change is seen.
"""

import bisect
import difflib
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.estimates import QualityEstimate
from outrider.router.features import FloatRows
from outrider.router.policy import (
    NO_CONSTRAINTS,
    Route,
    RouteConstraints,
    WatchOptions,
)
from outrider.router.watch import WatchedAnswer, WatchPlan, WatchRules

AGREEMENT: Final = 0.95
"""The share of its tokens that the large model has to agree with, in the mean, at a score."""
EXPLORE_SHARE: Final = 0.015
_RANK: Final = 20
_WINDOW: Final = 512
_LEARN_EVERY: Final = 8
_LATEST: Final = 64
_LEAST_KEPT: Final = 0.05
_LEAST_BEGUN: Final = 1 / 16
_NEAR: Final = 0.1  # an agreement so little below the target may still be learnt to be enough
# Until it is known better, the large model writes a token with the small one's probability of it:
# so many imagined answers, spread over the scores, count beside those that were judged.
_PRIOR_SCORES: Final = np.linspace(0.025, 0.975, 20)
_PRIOR_WEIGHT: Final = 0.5


class AgreementModel:
    """Learns the large model's agreement by score, and the lowest score that is good enough."""

    def __init__(self, target: float = AGREEMENT, strong_share: float | None = None) -> None:
        """Keep answers that agree by `target`, or all but a share `strong_share` of the answers.

        Raises ValueError for numbers outside [0, 1].
        """
        for name, value in (("target", target), ("strong_share", strong_share or 0.0)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value} must be in [0, 1]")
        self._target = target
        self._strong_share = strong_share
        self._judged: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._scores: deque[float] = deque(maxlen=_WINDOW)
        self._fit()

    @property
    def threshold(self) -> float:
        """Return the score from which on answers are kept."""
        if self._strong_share is None:
            return self.threshold_for(self._target)
        if self._strong_share >= 1.0:
            return ALWAYS_LARGE
        if not self._scores:
            return self._strong_share
        return float(np.quantile(np.array(self._scores), self._strong_share))

    def agreement(self, score: float) -> float:
        """Return the expected agreement of an answer with this score."""
        return float(np.interp(score, self._at, self._means))

    def threshold_for(self, target: float) -> float:
        """Return the lowest score whose expected agreement is the target; above 1 if none is."""
        place = bisect.bisect_left(self._means, target)
        if place == len(self._means):
            return ALWAYS_LARGE
        if place == 0:
            return 0.0
        low, high = self._means[place - 1], self._means[place]
        part = (target - low) / (high - low)
        return float(self._at[place - 1] + part * (self._at[place] - self._at[place - 1]))

    def is_vain(self, threshold: float) -> bool:
        """Return whether of the latest answers fewer than one in 20 come near to a threshold.

        False until there are enough of them, and where a share to be kept was set.
        """
        is_share_set = self._strong_share is not None and self._strong_share < 1.0
        if is_share_set or len(self._scores) < _LATEST:
            return False
        latest = itertools.islice(reversed(self._scores), _LATEST)
        near = min(threshold, self.threshold_for(self._target - _NEAR))
        return sum(score >= near for score in latest) < _LEAST_KEPT * _LATEST

    def saw(self, score: float) -> None:
        """Note the score of an answer, whatever became of it."""
        self._scores.append(score)

    def learn(self, score: float, agreement: float) -> None:
        """Note how far the large model agrees with an answer of this score."""
        self._judged.append((score, min(max(agreement, 0.0), 1.0)))
        if len(self._judged) % _LEARN_EVERY == 0 or len(self._judged) == _WINDOW:
            self._fit()

    def _fit(self) -> None:
        """Fit the agreement as a function that does not fall with the score (isotonic regression).

        Robertson, Wright, Dykstra: Order Restricted Statistical Inference, 1988 (pool adjacent
        violators).
        """
        points = [
            (float(score), float(np.exp(-(np.log(score) ** 2))), _PRIOR_WEIGHT)
            for score in _PRIOR_SCORES
        ]
        points += [(score, agreement, 1.0) for score, agreement in self._judged]
        blocks: list[list[float]] = []  # weight, weighted scores, weighted agreements
        for score, agreement, weight in sorted(points):
            blocks.append([weight, weight * score, weight * agreement])
            while len(blocks) > 1 and (
                blocks[-2][2] * blocks[-1][0] >= blocks[-1][2] * blocks[-2][0]
            ):
                last = blocks.pop()
                blocks[-1] = [a + b for a, b in zip(blocks[-1], last, strict=True)]
        self._at = [block[1] / block[0] for block in blocks]
        self._means = [block[2] / block[0] for block in blocks]


@dataclass(frozen=True, slots=True)
class _TokenQuantile:
    """The stages of a watch that knows nothing but the tokens' log-probabilities."""

    def estimate_prompt(
        self,
        text_estimate: QualityEstimate,
        hidden_state: Sequence[float] | None,
        shares: FloatRows | None = None,
    ) -> QualityEstimate:
        del hidden_state, shares
        return text_estimate

    def estimate_answer(
        self, prompt_estimate: QualityEstimate, logprobs: Sequence[float], *, is_whole: bool
    ) -> QualityEstimate:
        del prompt_estimate, is_whole
        return QualityEstimate(small=token_quantile(logprobs))


def token_quantile(logprobs: Sequence[float]) -> float:
    """Return the score of tokens, at least one: exp(-sqrt(-logprob)) where 19 in 20 are above."""
    return math.exp(-math.sqrt(max(-sorted(logprobs)[len(logprobs) // _RANK], 0.0)))


def text_agreement(small: str, large: str) -> float:
    """Return the share of the small answer's words that the large one has too, in their order.

    For a large model whose tokens' probabilities are not known. Of the large answer as many words
    are compared as would fit twice into the small one, which may be only a beginning.
    """
    words = small.split()
    if not words:
        return 0.0
    matcher = difflib.SequenceMatcher(None, words, large.split()[: 2 * len(words)], autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks()) / len(words)


_UNKNOWN: Final = QualityEstimate(small=1.0)
"""Of a server that tells no log-probabilities: its text alone can show that it is too weak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFreePolicy:
    """Lets the small model begin under a watch whose threshold is learnt while serving.

    Requests that cannot be watched go to the large model; so do most of them while the small one's
    answers are hardly ever kept.
    """

    model: AgreementModel = field(default_factory=AgreementModel)
    watch: WatchOptions = field(default_factory=WatchOptions)
    explore_share: float = EXPLORE_SHARE
    """The share of kept answers that the large model judges as well."""
    fixed_threshold: float | None = None
    """Replaces the learnt threshold."""
    draw: Callable[[], float] = random.random
    why: str = "no router"
    """The reason for being without a router."""

    def route(self, text: str, constraints: RouteConstraints = NO_CONSTRAINTS) -> Route:
        """Return the small model under a watch, or the large one; whatever the text."""
        del text
        threshold = self._threshold(constraints)
        why_large = self._why_large(constraints, threshold)
        if why_large is not None:
            return Route(tier="large", reason=f"router: {why_large}")
        options = self.watch
        is_whole = constraints.is_whole and options.judge_whole
        rules = WatchRules(
            threshold=threshold,
            hold_back_tokens=constraints.hold_back_tokens or options.hold_back_tokens,
            is_whole=is_whole,
            goes_on=options.mid_stream,
        )

        def saw(score: float, is_escalated: bool) -> None:
            del is_escalated
            self.model.saw(score)

        return Route(
            tier="small",
            reason=f"router: {self.why}, small model begins under watch",
            threshold=threshold,
            stage="answer",
            watch=WatchPlan(
                new_watch=lambda: WatchedAnswer(_TokenQuantile(), rules, _UNKNOWN, saw),
                hold_back_s=None if is_whole else constraints.hold_back_s or options.hold_back_s,
                hold_back_tokens=rules.hold_back_tokens,
                mid_stream=options.mid_stream,
                wants_hidden_state=False,
                on_agreement=self.model.learn,
                is_explored=self.draw() < self.explore_share,
            ),
        )

    def _threshold(self, constraints: RouteConstraints) -> float:
        """Return the score from which on a request's answer is kept."""
        if constraints.threshold is not None:
            return constraints.threshold
        if constraints.min_quality is not None:
            return self.model.threshold_for(constraints.min_quality)
        return self.model.threshold if self.fixed_threshold is None else self.fixed_threshold

    def _why_large(self, constraints: RouteConstraints, threshold: float) -> str | None:
        """Return why the large model answers at once; None where the small one begins."""
        if not constraints.may_watch:
            return f"{self.why}, the answer cannot be watched, large answers"
        if constraints.gain_factor == 0.0 and constraints.current == "large":
            return "conversation stays on large, it has it in its cache"
        may_skip = self.watch.mode != "always" and self.model.is_vain(threshold)
        if may_skip and self.draw() >= _LEAST_BEGUN:
            return f"{self.why}, few small answers reach {threshold:.2f}, large answers"
        return None
