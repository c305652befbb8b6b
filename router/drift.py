"""Does a router still keep on newer labelled prompts what it promised on those it learnt from?"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from outrider.router.assurance import is_broken
from outrider.router.calibration import CalibrationError, OperatingPoint, StageRows, measure, split
from outrider.router.dataset import LabelledPrompts
from outrider.router.guard import MAX_SHIFT, GuardNumbers, GuardOutcome, RouteGuard
from outrider.router.policy import own_setting
from outrider.router.rows import answered
from outrider.router.scorer import RouterScorer

MAX_UNLIKE: Final = 0.05
"""Of the training's prompts one in a hundred is unlike the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A router's own setting on newer prompts, beside what was expected of it."""

    num_prompts: int
    unlike_share: float | None
    """Prompts that are unlike the training's; None for routers that cannot tell."""
    numbers: GuardNumbers
    """As the gateway's guard counts them: the large model's share, the shift of the qualities."""
    found: OperatingPoint
    """What the setting gives on these prompts."""
    promised_quality: float
    """The share of the large model's accuracy that the setting was to keep."""
    is_broken: bool
    """It keeps less, with the confidence of the assurance."""

    def reasons(self) -> Iterator[str]:
        """Yield what has drifted."""
        chance = 3.0 * math.sqrt(MAX_UNLIKE * (1.0 - MAX_UNLIKE) / self.num_prompts)
        if self.unlike_share is not None and self.unlike_share > MAX_UNLIKE + chance:
            yield f"{self.unlike_share:.1%} of the prompts are unlike those of the training"
        if self.numbers.is_drifting and (self.numbers.quality_shift or 0.0) > MAX_SHIFT:
            yield f"the prompts' qualities have shifted (by {self.numbers.quality_shift:.2f})"
        elif self.numbers.is_drifting:
            yield "the large model's share is not the expected one"
        if self.is_broken:
            yield f"less than {self.promised_quality:.1%} of the large model's accuracy is kept"


def find_drift(scorer: RouterScorer, data: LabelledPrompts, rows: StageRows) -> Drift:
    """Compare labelled prompts, and their rows by this router, with what it was calibrated to.

    Raises CalibrationError for a router without a calibration.
    """
    if scorer.calibration is None:
        raise CalibrationError("the router has no calibration: nothing was promised")
    chosen = scorer.calibration.chosen
    is_strong, _ = split(rows, chosen.threshold, chosen.band)
    setting = own_setting(scorer)
    if rows.tiers is not None:  # its share is one of costs, not of requests
        setting = replace(setting, strong_share=None)
    guard = RouteGuard(
        current_setting=lambda: setting,
        deciles=scorer.calibration.quality_deciles,
        window=len(rows.text),
    )
    qualities = np.clip(rows.text, 0.0, 1.0).tolist()
    guard.saw_all(
        GuardOutcome(quality=quality, is_strong=strong)
        for quality, strong in zip(qualities, is_strong.tolist(), strict=True)
    )
    order = np.random.default_rng(0).permutation(len(rows.text))
    routed, _ = answered(rows, chosen.threshold, chosen.band)
    promised = promised_quality(scorer, data.small_weights)
    is_unlike = [scorer.estimate_familiar(prompt) is None for prompt in data.prompts]
    return Drift(
        num_prompts=len(data.prompts),
        unlike_share=None if scorer.familiarity is None else float(np.mean(is_unlike)),
        numbers=guard.numbers(),
        found=measure(rows, chosen.threshold, chosen.band),
        promised_quality=promised,
        is_broken=is_broken(routed[order], rows.strong[order], promised),
    )


def promised_quality(scorer: RouterScorer, small_weights: str | None) -> float:
    """Return what the router's own setting is assured to keep; else what it kept in calibration.

    Raises CalibrationError for a router without a calibration.
    """
    if scorer.calibration is None:
        raise CalibrationError("the router has no calibration: nothing was promised")
    assured = assured_quality(scorer, small_weights)
    return scorer.calibration.chosen.relative_accuracy if assured is None else assured


def assured_quality(scorer: RouterScorer, small_weights: str | None) -> float | None:
    """Return what the router's own setting is assured to keep; None where it was not tested.

    Assured settings count requests, so that of a router that weighs costs is none of them.
    """
    if scorer.worth is not None:
        return None
    for assurance in scorer.assurances:
        if assurance.small_weights in (small_weights, None):
            for point in assurance.stage(may_watch=True).points:
                if point.threshold == scorer.threshold:
                    return point.quality
    return None
