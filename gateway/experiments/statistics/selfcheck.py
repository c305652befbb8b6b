"""A/A self-check on recorded data: arms split against themselves must not differ.

Again and again, the buckets of units of each arm are put into two halves at random. Each pair is
looked at many times while its requests come in, each bucket's successes and failures in random
order. Both halves had the same settings, so every difference declared is a false alarm. That is
done with the units, rates and design effects that the experiment really has.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from outrider.gateway.experiments.statistics.binomial import are_different
from outrider.gateway.experiments.statistics.clusters import design_effects, effective_buckets
from outrider.gateway.experiments.statistics.means import MIN_BUCKETS
from outrider.gateway.experiments.statistics.mismatch import Mismatch, sample_ratio_mismatch
from outrider.gateway.experiments.statistics.mixture import FloatArray, prior_requests
from outrider.gateway.experiments.statistics.plan import SamplePlan
from outrider.gateway.experiments.totals import ArmTotals, MetricTotals

_NUM_LOOKS: Final = 20
_MIN_REQUESTS: Final = 200
_ORDINARY_Z: Final = 1.959963984540054


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSelfCheck:
    """One arm against itself: shares of the splits in which a difference was declared.

    None where there are too few data.
    """

    arm: str
    num_requests: int
    effective_buckets: float
    design_effect: float
    false_alarms: float | None
    """By the intervals here, at any look."""
    ordinary: float | None
    """By the usual z test at 5 %, at any look, for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """The result of the check; `is_sound` if it found nothing against the statistics."""

    plan: SamplePlan
    num_splits: int
    arms: tuple[ArmSelfCheck, ...]
    mismatch: Mismatch | None

    @property
    def is_sound(self) -> bool:
        """Return whether arm sizes are right and false alarms within alpha and their noise."""
        if self.mismatch is not None and self.mismatch.is_mismatch:
            return False
        return all(alarms <= self._most for alarms, _ in self._rates)

    @property
    def text(self) -> str:
        """Return the result in a sentence or two."""
        if self.mismatch is not None and self.mismatch.is_mismatch:
            return (
                "Not sound: the sizes of the arms do not match their weights (p = "
                f"{self.mismatch.p_value:.1g})."
            )
        if not self._rates:
            return f"Too little data to check: an arm needs {_MIN_REQUESTS} requests of many units."
        worst = max(alarms for alarms, _ in self._rates)
        ordinary = max(ordinary for _, ordinary in self._rates)
        told = (
            f"split against itself {self.num_splits} times, no arm differed from itself in more "
            f"than {worst:.1%} of them (allowed: {self.plan.alpha:.1%}); an ordinary test, looked "
            f"at as often, would have been wrong in {ordinary:.1%}"
        )
        return f"{'Sound' if self.is_sound else 'Not sound'}: {told}."

    def document(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            "experiment": self.plan.name,
            "version": self.plan.version,
            "alpha": self.plan.alpha,
            "splits": self.num_splits,
            "is_sound": self.is_sound,
            "text": self.text,
            "mismatch": None if self.mismatch is None else self.mismatch.document(),
            "arms": [
                {
                    "arm": each.arm,
                    "requests": each.num_requests,
                    "effective_buckets": each.effective_buckets,
                    "design_effect": each.design_effect,
                    "false_alarms": each.false_alarms,
                    "ordinary_false_alarms": each.ordinary,
                }
                for each in self.arms
            ],
        }

    @property
    def _rates(self) -> list[tuple[float, float]]:
        """False alarms and those of the ordinary test, of the arms with enough data."""
        return [
            (each.false_alarms, each.ordinary or 0.0)
            for each in self.arms
            if each.false_alarms is not None
        ]

    @property
    def _most(self) -> float:
        alpha = self.plan.alpha
        return alpha + 3.0 * math.sqrt(alpha * (1.0 - alpha) / self.num_splits)


def self_check(
    plan: SamplePlan,
    totals: Mapping[str, ArmTotals],
    rng: np.random.Generator,
    num_splits: int = 500,
) -> SelfCheck:
    """Check attainment, arm by arm. Raises ValueError for fewer than one split."""
    if num_splits < 1:
        raise ValueError(f"{num_splits} splits check nothing")
    mismatch = None
    live = [name for name in plan.weights if name in totals and name not in plan.stopped]
    if not plan.is_adaptive and len(live) > 1:
        mismatch = sample_ratio_mismatch(
            np.stack([totals[name].requests_by_bucket for name in live]),
            [plan.weights[name] for name in live],
            is_independent=plan.is_independent,
        )
    arms = tuple(
        _check_arm(plan, name, totals[name].metrics["attained"], rng, num_splits)
        for name in plan.weights
        if name in totals
    )
    return SelfCheck(plan=plan, num_splits=num_splits, arms=arms, mismatch=mismatch)


def _check_arm(
    plan: SamplePlan, name: str, metric: MetricTotals, rng: np.random.Generator, num_splits: int
) -> ArmSelfCheck:
    buckets = float(effective_buckets(metric.counts))
    effect = float(design_effects(metric.counts, metric.sums, metric.sums, plan.alpha))
    alarms: float | None = None
    ordinary: float | None = None
    if metric.n >= _MIN_REQUESTS and buckets >= 2.0 * MIN_BUCKETS:
        alarms, ordinary = _split_often(plan, metric, rng, num_splits)
    return ArmSelfCheck(
        arm=name,
        num_requests=metric.n,
        effective_buckets=buckets,
        design_effect=effect,
        false_alarms=alarms,
        ordinary=ordinary,
    )


def _split_often(
    plan: SamplePlan, metric: MetricTotals, rng: np.random.Generator, num_splits: int
) -> tuple[float, float]:
    """Return the shares of splits declared different by our test and by the ordinary one."""
    prior = prior_requests(plan.alpha, num_arms=2)
    won, lost = np.rint(metric.sums).astype(int), np.rint(metric.counts - metric.sums).astype(int)
    even = np.full(_NUM_LOOKS, 1.0 / _NUM_LOOKS)
    num_alarms = num_ordinary = 0
    for _ in range(num_splits):
        # [looks, 64]: the counts of each bucket by each look
        successes = np.cumsum(rng.multinomial(won, even), axis=1).T.astype(np.float64)
        failures = np.cumsum(rng.multinomial(lost, even), axis=1).T.astype(np.float64)
        half = rng.permutation(won.size) < won.size // 2
        counts = _halves(successes + failures, half)  # [looks, 2, 64]
        sums = _halves(successes, half)
        effects = (
            np.ones(counts.shape[:2])
            if plan.is_independent
            else design_effects(counts, sums, sums, plan.alpha)
        )
        n, attained = counts.sum(axis=-1), sums.sum(axis=-1)
        worth, missed = attained / effects, (n - attained) / effects
        pairs = np.stack([worth[:, 0], missed[:, 0], worth[:, 1], missed[:, 1]])
        num_alarms += bool(are_different(pairs, prior, plan.alpha).any())
        num_ordinary += bool(_ordinary(n, attained).any())
    return num_alarms / num_splits, num_ordinary / num_splits


def _halves(values: FloatArray, half: np.ndarray) -> FloatArray:
    return np.stack([np.where(half, values, 0.0), np.where(half, 0.0, values)], axis=1)


def _ordinary(n: FloatArray, attained: FloatArray) -> np.ndarray:
    """Return whether the z test of two shares declares a difference; shape (looks,)."""
    common = attained.sum(axis=-1) / np.maximum(n.sum(axis=-1), 1.0)
    error = np.sqrt(common * (1.0 - common) * (1.0 / np.maximum(n, 1.0)).sum(axis=-1))
    shares = attained / np.maximum(n, 1.0)
    is_usual = (n >= 30.0).all(axis=-1)
    return np.asarray(is_usual & (np.abs(shares[:, 0] - shares[:, 1]) > _ORDINARY_Z * error))
