"""Routers whose word is known: a scorer of one bias, stages that say what a test wants."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.router.assurance import Assurance, AssuredPoint, AssuredStage, RightGroup
from outrider.router.calibration import ALWAYS_LARGE, Calibration, OperatingPoint, Stage
from outrider.router.estimates import LinearStage, QualityEstimate
from outrider.router.features import FeatureConfig, FloatRows
from outrider.router.scorer import RouterScorer
from outrider.router.worth import CostModel, CostRates, PairRates, Worth

SMALL = FeatureConfig(num_char_features=64, num_word_features=64)


def scorer_that_says(
    probability: float,
    calibration: Calibration | None = None,
    *,
    threshold: float = 0.5,
    pair: str | None = None,
    answer: LinearStage | None = None,
) -> RouterScorer:
    """The same quality for every prompt."""
    return RouterScorer(
        features=SMALL,
        weight=np.zeros((1, SMALL.num_features)),
        bias=np.array([np.log(probability / (1 - probability))]),
        threshold=threshold if calibration is None else calibration.chosen.threshold,
        calibration=calibration,
        pair=pair,
        answer=answer,
    )


def seconds_worth(reference: float = 5.0) -> Worth:
    """A character is a token and costs the large model a second more; no answer costs anything."""
    return Worth(
        model=CostModel(
            unit="second",
            seconds=PairRates(
                small=CostRates(request=0.0, prompt_token=0.1, answer_token=0.0),
                large=CostRates(request=0.0, prompt_token=1.1, answer_token=0.0),
            ),
            dollars=None,
            tokens_at_start=0.0,
            tokens_per_char=1.0,
            reference=reference,
        ),
        length_weight=np.zeros((2, SMALL.num_features)),
        length_bias=np.log1p([30.0, 40.0]),
    )


def point(share: float, *, banded: bool = True) -> OperatingPoint:
    """A family of settings: threshold = share, a band of 0.2 around it, accuracy rising."""
    return OperatingPoint(
        threshold=share,
        band=(max(share - 0.2, 0.0), min(share + 0.2, ALWAYS_LARGE)) if banded else None,
        strong_share=share,
        watched_share=0.4,
        accuracy=0.6 + 0.3 * share,
        relative_accuracy=(0.6 + 0.3 * share) / 0.9,
    )


def table(chosen: float = 0.5, stage: Stage = "answer") -> Calibration:
    """Eleven points; text qualities were uniform in [0, 1]."""
    shares = [1.0 - i / 10 for i in range(11)]
    points = tuple(point(share, banded=stage != "text") for share in shares)
    return Calibration(
        chosen=point(chosen, banded=stage != "text"),
        points=points,
        stage=stage,
        quality_deciles=tuple(i / 10 for i in range(11)),
    )


def assurance_of(quality: float, weights: str | None = None) -> Assurance:
    """Half of the prompts to the small model keep this quality."""
    large = AssuredPoint(threshold=ALWAYS_LARGE, band=None, strong_share=1.0, quality=1.0)
    half = AssuredPoint(threshold=0.5, band=None, strong_share=0.5, quality=quality)
    groups = (RightGroup(start=0.0, low=0.2, high=0.4), RightGroup(start=0.5, low=0.6, high=0.9))
    stage = AssuredStage(stage="text", points=(large, half), groups=groups)
    return Assurance(confidence=0.9, num_prompts=100, small_weights=weights, stages=(stage,))


@dataclass
class ScriptedStages:
    """Says the qualities that it was given, and remembers what it was asked."""

    prompt: float = 0.5
    answers: dict[int, float] = field(default_factory=dict)
    whole: float = 0.5
    asked: list[tuple[int, bool]] = field(default_factory=list)

    def estimate_prompt(
        self,
        text_estimate: QualityEstimate,
        hidden_state: Sequence[float] | None,
        shares: FloatRows | None = None,
    ) -> QualityEstimate:
        del text_estimate
        if shares is not None:
            return QualityEstimate(small=float(shares[0]))
        return QualityEstimate(small=self.prompt if hidden_state else 0.5)

    def estimate_answer(
        self, prompt_estimate: QualityEstimate, logprobs: Sequence[float], *, is_whole: bool
    ) -> QualityEstimate:
        del prompt_estimate
        self.asked.append((len(logprobs), is_whole))
        default = self.whole if is_whole else 0.5
        return QualityEstimate(small=self.answers.get(len(logprobs), default))
