"""Settings that keep a quality with a stated probability, and bands around P(small is right).

A calibration says what a setting kept on its prompts: half the time less is kept on others. Here a
setting counts as keeping a share q of the large model's accuracy only where a bet against it fails:
the capital of one who bets that routed - q * strong is above 0 in the mean grows by
1 + rate * (routed - q * strong) a prompt, and reaches 1 / (1 - confidence) with a probability of at
most 1 - confidence if it is not (Ville's inequality; Waudby-Smith and Ramdas, 2023). That needs no
distribution and takes graded labels. Settings are tested from always-large on, and the first one
that fails ends the sequence (Angelopoulos et al., Learn then Test, 2021), so that one confidence
holds for the choice among all of them.

The bands are Mondrian: prompts are grouped by stage and by the estimate that the small answer is
right, and in each group the share of right answers has an interval by Chernoff's bound.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from outrider.router.calibration import (
    ALWAYS_LARGE,
    CalibrationTarget,
    Stage,
    StageRows,
    calibrate,
)
from outrider.router.dial import ScoreBand, Setting
from outrider.router.features import FloatRows
from outrider.router.rows import answered

CONFIDENCE: Final = 0.9
"""The probability with which a quality is kept."""
_STEPS: Final = 200  # qualities are assured in steps of half a percent
_MAX_RATE: Final = 0.9  # of the capital, which a lost answer may cost
_MAX_GROUPS: Final = 10
_MIN_PER_GROUP: Final = 20
_BISECTIONS: Final = 40
_UNROUNDED: Final = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AssuredPoint:
    """A setting, and the share of the large model's accuracy that it is assured to keep."""

    threshold: float
    band: ScoreBand | None
    strong_share: float
    quality: float
    """In [0, 1]; never more than that of a setting with a larger strong share."""

    def __post_init__(self) -> None:
        """Raise ValueError for what no setting can be."""
        Setting(threshold=self.threshold, band=self.band)
        if not 0.0 <= self.quality <= 1.0:
            raise ValueError(f"quality={self.quality} must be in [0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RightGroup:
    """Prompts from an estimate of P(small is right) on, and how often it was right there."""

    start: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AssuredStage:
    """What is assured where this stage is the last to decide; points by falling strong share."""

    stage: Stage
    points: tuple[AssuredPoint, ...]
    groups: tuple[RightGroup, ...]
    """By rising estimates; the first one has all below it too."""

    def __post_init__(self) -> None:
        """Raise ValueError for a stage that says nothing."""
        if not self.points or not self.groups:
            raise ValueError("an assurance needs points and groups")

    def setting(self, min_quality: float) -> Setting:
        """Return the least strong share that is assured to keep this quality."""
        kept = [point for point in self.points if point.quality >= min_quality]
        if not kept:
            return Setting(threshold=ALWAYS_LARGE, strong_share=1.0)
        point = kept[-1]
        return Setting(
            threshold=point.threshold,
            band=point.band,
            strong_share=point.strong_share,
            relative_accuracy=point.quality,
        )

    def small_right(self, estimate: float) -> tuple[float, float]:
        """Return the interval of P(small is right) for prompts of this estimate."""
        starts = [group.start for group in self.groups]
        group = self.groups[max(bisect_right(starts, estimate) - 1, 0)]
        return group.low, group.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Assurance:
    """What a router keeps of the large model's accuracy, with a small model of one width."""

    confidence: float
    num_prompts: int
    small_weights: str | None
    """The type that the small model's products compute with, such as int8; None: not known."""
    stages: tuple[AssuredStage, ...]
    """The text's, and that of the last stage where it is another one."""

    def __post_init__(self) -> None:
        """Raise ValueError for a confidence outside (0, 1), or without a text stage."""
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence={self.confidence} must be between 0 and 1")
        if not self.stages or self.stages[0].stage != "text":
            raise ValueError("the first assured stage must be the text's")

    def stage(self, *, may_watch: bool) -> AssuredStage:
        """Return the last stage to decide on an answer that may be watched, or on the text."""
        return self.stages[-1 if may_watch else 0]


class LiveAssurance:
    """The assurance that holds for the small model that is loaded, once its width is known."""

    def __init__(self, assurances: Sequence[Assurance]) -> None:
        """`assurances`: one for each width, at least one."""
        self._assurances = assurances
        self.current: Assurance | None = assurances[0] if len(assurances) == 1 else None
        """None: nothing is assured for these weights."""

    def setting(self, min_quality: float, *, may_watch: bool) -> Setting:
        """Return the least strong share that is assured to keep this quality."""
        if self.current is None:
            return Setting(threshold=ALWAYS_LARGE, strong_share=1.0)
        return self.current.stage(may_watch=may_watch).setting(min_quality)

    def use(self, small_weights: str) -> str | None:
        """Take the loaded width, empty where unknown; return why nothing is assured for it."""
        if not small_weights:
            return None
        known = {_width(each.small_weights): each for each in self._assurances}
        self.current = known.get(_width(small_weights), known.get(None))
        if self.current is not None:
            return None
        widths = " and ".join(sorted(str(each.small_weights) for each in self._assurances))
        return (
            f"the router's qualities are assured for a small model in {widths}, and this one is in "
            f"{small_weights}: the large model answers where min_quality is asked for. Label with "
            "`outrider router collect` in this width, then `outrider router drift --out`"
        )


def _width(weights: str | None) -> str | None:
    """Return a name that weights have in common whose confidence means the same."""
    name = None if weights is None else weights.partition(",")[0]
    return "unrounded" if name in _UNROUNDED else name


def assure(
    rows: StageRows, small_weights: str | None = None, confidence: float = CONFIDENCE
) -> Assurance:
    """Find what each setting keeps with this confidence, by stage.

    The rows must be ones that no stage was fitted on; they count in a drawn order.
    """
    text_only = replace(rows, prompt=rows.text, answer=None, last_right=rows.text_right)
    stages = [_assured_stage(text_only, confidence)]
    if rows.stages[-1] != "text":
        stages.append(_assured_stage(rows, confidence))
    return Assurance(
        confidence=confidence,
        num_prompts=len(rows.text),
        small_weights=small_weights,
        stages=tuple(stages),
    )


def is_assured(rows: StageRows) -> bool:
    """Return whether labels tell what is kept: of each tier, where there are more than two."""
    return rows.tiers is None or not rows.tiers.ladder.unlabelled


def kept_quality(routed: FloatRows, strong: FloatRows, confidence: float = CONFIDENCE) -> float:
    """Return the share of the large model's accuracy that is kept with this confidence, in [0, 1].

    `routed`, `strong`: scores of the answers given and of the large model's, [num_prompts], in an
    order that says nothing.
    """
    rates = _rates(routed - strong, confidence)
    least_capital = -math.log(1.0 - confidence)
    low, high = 0, _STEPS + 1  # the steps from `high` on are not kept
    while high - low > 1:
        middle = (low + high) // 2
        gained = np.log1p(rates * (routed - middle / _STEPS * strong))
        is_kept = bool(np.cumsum(gained).max() >= least_capital)
        low, high = (middle, high) if is_kept else (low, middle)
    return low / _STEPS


def is_broken(
    routed: FloatRows, strong: FloatRows, quality: float, confidence: float = CONFIDENCE
) -> bool:
    """Return whether less than this share of the large model's accuracy is kept.

    It says so of a share that is kept with a probability of at most 1 - confidence.
    """
    lost = quality * strong - routed
    capital = np.cumsum(np.log1p(_rates(lost, confidence) * lost))
    return bool(capital.max() >= -math.log(1.0 - confidence))


def _rates(differences: FloatRows, confidence: float) -> FloatRows:
    """Return the share of the capital to bet on each prompt, by the variance of those before it.

    It does not depend on the quality that is tested, so that a higher one never wins more.
    """
    counts = np.arange(1, len(differences) + 1)
    means = (0.0 + np.cumsum(differences)) / counts
    squares = (0.25 + np.cumsum((differences - means) ** 2)) / (counts + 1)
    before = np.append(0.25, squares[:-1])
    rates: FloatRows = np.sqrt(-2.0 * math.log(1.0 - confidence) / (len(differences) * before))
    return np.minimum(rates, _MAX_RATE)


def _assured_stage(rows: StageRows, confidence: float) -> AssuredStage:
    stage = rows.stages[-1]
    order = np.random.default_rng(0).permutation(len(rows.text))
    strong = rows.strong[order]
    points: list[AssuredPoint] = []
    least = 1.0
    for point in calibrate(rows, CalibrationTarget(strong_share=1.0)).points:
        scores, shares = answered(rows, point.threshold, point.band)
        if not (shares == 1.0).all():
            least = min(least, kept_quality(scores[order], strong, confidence))
        points.append(
            AssuredPoint(
                threshold=point.threshold,
                band=point.band,
                strong_share=point.strong_share,
                quality=least,
            )
        )
    right = rows.weak if rows.last_right is None else rows.last_right
    return AssuredStage(
        stage=stage, points=tuple(points), groups=_groups(right, rows.weak, confidence)
    )


def _groups(right: FloatRows, weak: FloatRows, confidence: float) -> tuple[RightGroup, ...]:
    """Return groups of equally many prompts; those of one estimate are never parted."""
    count = max(1, min(_MAX_GROUPS, len(right) // _MIN_PER_GROUP))
    cuts = np.quantile(right, np.arange(1, count) / count, method="higher")
    starts = np.unique(np.append(right.min(), cuts))
    places = np.searchsorted(starts, right, side="right") - 1
    return tuple(
        RightGroup(start=float(start), low=low, high=high)
        for index, start in enumerate(starts)
        for low, high in [interval(weak[places == index], confidence)]
    )


def interval(values: FloatRows, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return an interval of the mean of values in [0, 1], by Chernoff's bound on each side."""
    mean, allowed = float(values.mean()), math.log(2.0 / (1.0 - confidence)) / len(values)
    return 1.0 - _upper(1.0 - mean, allowed), _upper(mean, allowed)


def _upper(mean: float, allowed: float) -> float:
    """Return the largest probability whose relative entropy to the mean is allowed."""
    low, high = mean, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _entropy(mean, middle) <= allowed else (low, middle)
    return high


def _entropy(mean: float, other: float) -> float:
    total = 0.0
    for share, of in ((mean, other), (1.0 - mean, 1.0 - other)):
        if share > 0.0:
            total += math.inf if of <= 0.0 else share * math.log(share / of)
    return total
