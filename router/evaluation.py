"""How good is a router? Accuracy over the share of prompts that the large model answers.

Definitions as in RouteLLM (Ong et al., 2024): the curve has 11 points, at the deciles of the score;
APGR is the area under it, above always-small, as a share of what always-large adds; CPT(x) is the
least share of large-model answers that recovers x of that gap, linearly interpolated. Equal scores
count as if they were ordered at random, so a router that says the same of all prompts is a random
one. Everything here sorts by *gain*: what the large model is expected to add.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from router.features import Floats

NUM_POINTS: Final = 11
_NUM_FINE_POINTS: Final = 1001


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and its bootstrap interval (95 %)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """A router's figures on labelled prompts, beside what bounds them.

    Accuracies and shares are in [0, 1]. `threshold_*`: what the router's own threshold gives.
    `random_*` are expectations. `oracle_share` is what an oracle needs for `oracle_accuracy`.
    """

    num_prompts: int
    weak_accuracy: float
    strong_accuracy: float
    apgr: Interval
    cpt50: Interval
    cpt80: Interval
    oracle_apgr: float
    oracle_accuracy: float
    oracle_share: float
    random_apgr: float
    random_cpt50: float
    random_cpt80: float
    threshold_accuracy: float
    threshold_strong_share: float

    @property
    def best_single_accuracy(self) -> float:
        """The better of always-small and always-large."""
        return max(self.weak_accuracy, self.strong_accuracy)


class NoGapError(ValueError):
    """The large model is no better than the small one on these prompts: nothing to recover."""

    def __init__(self, *, weak_accuracy: float, strong_accuracy: float) -> None:
        super().__init__(
            f"the large model's accuracy ({strong_accuracy:.3f}) is not above the small one's "
            f"({weak_accuracy:.3f}): APGR and CPT are not defined"
        )


def cost_quality_curve(gain: Floats, weak: Floats, strong: Floats) -> Floats:
    """Accuracy at strong shares 0, 0.1, ..., 1, prompts with the highest gain first: [11]."""
    return _curve(gain, weak, strong, NUM_POINTS)


def apgr(gain: Floats, weak: Floats, strong: Floats) -> float:
    """Average performance gap recovered; random is 0.5. Raises NoGapError."""
    curve = cost_quality_curve(gain, weak, strong)
    low, gap = _gap(weak, strong)
    area = float((curve[1:] + curve[:-1]).mean() / 2)  # trapezoids of equal width
    return (area - low) / gap


def cpt(gain: Floats, weak: Floats, strong: Floats, fraction: float) -> float:
    """Least strong share, in [0, 1], that recovers `fraction` of the gap. Raises NoGapError."""
    curve = cost_quality_curve(gain, weak, strong)
    low, gap = _gap(weak, strong)
    return _first_crossing(curve, low + fraction * gap)


def choose_threshold(gain: Floats, weak: Floats, strong: Floats, fraction: float) -> float:
    """The quality (1 - gain) from which on the small model may answer, in [0, 1].

    It recovers `fraction` of the gap at the least strong share on these prompts; 0.0 (the small
    model answers all) if there is no gap.
    """
    try:
        low, gap = _gap(weak, strong)
    except NoGapError:
        return 0.0
    curve = _curve(gain, weak, strong, _NUM_FINE_POINTS)
    share = _first_crossing(curve, low + fraction * gap)
    return float(np.clip(1.0 - np.quantile(gain, 1.0 - share), 0.0, 1.0))


def evaluate(
    gain: Floats,
    weak: Floats,
    strong: Floats,
    *,
    threshold: float,
    num_resamples: int = 1000,
    seed: int = 0,
) -> RouterReport:
    """All figures of a router; raises NoGapError. Resamples without a gap are left out."""
    low, _ = _gap(weak, strong)
    rng = np.random.default_rng(seed)
    figures: list[tuple[float, float, float]] = []
    for _ in range(num_resamples):
        rows = rng.integers(0, len(weak), size=len(weak))
        try:
            figures.append(_figures(gain[rows], weak[rows], strong[rows]))
        except NoGapError:
            continue
    samples = np.array(figures).reshape(-1, 3)
    point = _figures(gain, weak, strong)
    intervals = [_interval(value, samples[:, column]) for column, value in enumerate(point)]
    is_strong = 1.0 - gain < threshold
    return RouterReport(
        num_prompts=len(weak),
        weak_accuracy=low,
        strong_accuracy=float(strong.mean()),
        apgr=intervals[0],
        cpt50=intervals[1],
        cpt80=intervals[2],
        oracle_apgr=apgr(strong - weak, weak, strong),
        oracle_accuracy=float(np.maximum(weak, strong).mean()),
        oracle_share=float((strong > weak).mean()),
        random_apgr=0.5,
        random_cpt50=0.5,
        random_cpt80=0.8,
        threshold_accuracy=float(np.where(is_strong, strong, weak).mean()),
        threshold_strong_share=float(is_strong.mean()),
    )


def _figures(gain: Floats, weak: Floats, strong: Floats) -> tuple[float, float, float]:
    curve = cost_quality_curve(gain, weak, strong)
    low, gap = _gap(weak, strong)
    area = float((curve[1:] + curve[:-1]).mean() / 2)
    half, most = (_first_crossing(curve, low + part * gap) for part in (0.5, 0.8))
    return (area - low) / gap, half, most


def _interval(value: float, samples: Floats) -> Interval:
    if not len(samples):
        return Interval(value=value, low=value, high=value)
    low, high = np.quantile(samples, (0.025, 0.975)).tolist()
    return Interval(value=value, low=low, high=high)


def _gap(weak: Floats, strong: Floats) -> tuple[float, float]:
    """Always-small's accuracy and what always-large adds to it."""
    low, high = float(weak.mean()), float(strong.mean())
    if high <= low:
        raise NoGapError(weak_accuracy=low, strong_accuracy=high)
    return low, high - low


def _curve(gain: Floats, weak: Floats, strong: Floats, num_points: int) -> Floats:
    """Accuracy at `num_points` evenly spaced strong shares from 0 to 1, ties shared out evenly."""
    if not len(gain):
        raise ValueError("no prompts to evaluate")
    order = np.argsort(-gain, kind="stable")
    ordered = gain[order]
    added = np.cumsum((strong - weak)[order])
    is_last = np.append(ordered[1:] != ordered[:-1], True)  # of its group of equal scores
    shares = np.append(0.0, np.flatnonzero(is_last) + 1.0) / len(gain)
    heights = np.append(0.0, added[is_last]) / len(gain)
    curve: Floats = weak.mean() + np.interp(np.linspace(0.0, 1.0, num_points), shares, heights)
    return curve


def _first_crossing(curve: Floats, level: float) -> float:
    """Where a curve over [0, 1] first reaches a level, linearly interpolated; 1.0 at the latest."""
    reached = np.flatnonzero(curve >= level - 1e-12)
    if not len(reached):
        return 1.0
    index = int(reached[0])
    if index == 0:
        return 0.0
    below, above = float(curve[index - 1]), float(curve[index])
    step = 1.0 if above <= below else min(1.0, (level - below) / (above - below))
    return (index - 1 + step) / (len(curve) - 1)
