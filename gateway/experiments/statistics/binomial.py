"""Shares (attainment, errors, ...): beta-binomial mixture confidence sequences, exact at any size.

One arm: the mixture martingale of mixture.py, inverted (Robbins 1970; Howard et al. 2021; Howard
and Ramdas 2022). Two arms: the product of both arms' martingales against the pair of shares is a
martingale too. That holds for any order and proportion of requests, also if the proportion follows
the results. The pairs at which it is below 1 / alpha are a confidence sequence. So are their
differences and ratios, for the difference and the ratio.

Where requests of a unit are alike, counts are divided by their design effect (clusters.py): then
validity is asymptotic, in the number of units.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.experiments.statistics.clusters import design_effect, pair_effects
from outrider.gateway.experiments.statistics.comparison import Comparison
from outrider.gateway.experiments.statistics.interval import Interval, check_alpha
from outrider.gateway.experiments.statistics.mixture import (
    FloatArray,
    log_beta_binomial,
    prior_requests,
)
from outrider.gateway.experiments.totals import MetricTotals

_EDGE: Final = 1e-12
"""Shares are looked for between this and one minus this."""
_NUM_HALVINGS: Final = 42
_NUM_POINTS: Final = 41
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Effective successes and failures of an arm."""

    successes: float
    failures: float

    @property
    def share(self) -> float:
        """Return the share, inside (0, 1) even with only successes or only failures."""
        share = self.successes / (self.successes + self.failures)
        return min(1.0 - _EDGE, max(_EDGE, share))

    @classmethod
    def of(cls, metric: MetricTotals, effect: float) -> "_Counts":
        return cls(successes=metric.sum / effect, failures=(metric.n - metric.sum) / effect)

    def log(self, share: FloatArray, prior: float) -> FloatArray:
        return log_beta_binomial(self.successes, self.failures, share, prior)


def share_interval(metric: MetricTotals, alpha: float, *, is_independent: bool = False) -> Interval:
    """Return the share of ones in a metric of zeros and ones.

    Raises ValueError for alpha not in (0, 1). `is_independent`: each request is a unit of its own,
    and the interval is exact.
    """
    check_alpha(alpha)
    if metric.n == 0:
        return Interval(estimate=math.nan, low=0.0, high=1.0)
    effect = design_effect(metric, alpha, is_independent=is_independent)
    counts = _Counts.of(metric, effect)
    prior = prior_requests(alpha)
    budget = np.array([-math.log(alpha)])
    return Interval(
        estimate=metric.mean,
        low=_settled(float(_bound(counts, budget, prior, _EDGE)[0])),
        high=_settled(float(_bound(counts, budget, prior, 1.0 - _EDGE)[0])),
    )


def compare_shares(
    control: MetricTotals, arm: MetricTotals, alpha: float, *, is_independent: bool = False
) -> Comparison:
    """Compare the arm's share with the control's. Raises ValueError for alpha not in (0, 1)."""
    check_alpha(alpha)
    if control.n == 0 or arm.n == 0:
        nothing = Interval(estimate=math.nan, low=-1.0, high=1.0)
        lift = Interval(estimate=math.nan, low=-1.0, high=math.inf)
        return Comparison(difference=nothing, lift=lift, p_value=1.0)
    prior = prior_requests(alpha, num_arms=2)
    effects = pair_effects(control, arm, alpha, is_independent=is_independent)
    one, two = _Counts.of(control, effects[0]), _Counts.of(arm, effects[1])
    budget = -math.log(alpha)
    evidence = float(
        log_evidence(
            np.array(one.successes), np.array(one.failures),
            np.array(two.successes), np.array(two.failures), prior,
        )
    )  # fmt: skip
    low, high = _extent(one, two, budget, prior, lambda first, second: second - first)
    least, most = _extent(one, two, budget, prior, lambda first, second: second / first)
    ratio = arm.mean / control.mean if control.mean > 0.0 else math.nan
    return Comparison(
        difference=Interval(estimate=arm.mean - control.mean, low=low, high=high),
        lift=Interval(
            estimate=ratio - 1.0,
            low=least - 1.0,
            high=most - 1.0 if most < _UNBOUNDED else math.inf,
        ),
        p_value=min(1.0, math.exp(-evidence)),
    )


def log_evidence(
    successes_1: FloatArray,
    failures_1: FloatArray,
    successes_2: FloatArray,
    failures_2: FloatArray,
    prior: float,
) -> FloatArray:
    """Log of the evidence that two shares differ: the product's least value over equal shares.

    At log(1 / alpha) or more, equality is refused at level alpha. Any equal shapes. Least by
    golden section: the martingales fall towards each arm's own share, so it lies between these.
    """
    share_1 = successes_1 / np.maximum(successes_1 + failures_1, _EDGE)
    share_2 = successes_2 / np.maximum(successes_2 + failures_2, _EDGE)

    def both(share: FloatArray) -> FloatArray:
        return log_beta_binomial(successes_1, failures_1, share, prior) + log_beta_binomial(
            successes_2, failures_2, share, prior
        )

    low = np.clip(np.minimum(share_1, share_2), _EDGE, 1.0 - _EDGE)
    high = np.clip(np.maximum(share_1, share_2), _EDGE, 1.0 - _EDGE)
    for _ in range(40):
        inner = _GOLDEN * (high - low)
        left, right = high - inner, low + inner
        is_left = both(left) < both(right)
        low, high = np.where(is_left, low, left), np.where(is_left, right, high)
    return both((low + high) / 2.0)


def are_different(counts: FloatArray, prior: float, alpha: float) -> NDArray[np.bool_]:
    """Return whether equal shares are rejected at level alpha; for many pairs of arms at once.

    `counts`: shape (4, n), successes and failures of one arm, then of the other. The product at the
    common share is above its least value: most pairs need no closer look.
    """
    bound = -math.log(alpha)
    common = (counts[0] + counts[2]) / np.maximum(counts.sum(axis=0), _EDGE)
    common = np.clip(common, 1e-9, 1.0 - 1e-9)
    rough = log_beta_binomial(counts[0], counts[1], common, prior) + log_beta_binomial(
        counts[2], counts[3], common, prior
    )
    found = np.asarray(rough >= bound)
    near = np.flatnonzero(found)
    if near.size:
        one_won, one_lost, two_won, two_lost = counts[:, near]
        found[near] = log_evidence(one_won, one_lost, two_won, two_lost, prior) >= bound
    return found


_UNBOUNDED: Final = 1e6


def _settled(share: float) -> float:
    """Return 0 or 1 where the bound is the end of the range searched."""
    return 0.0 if share <= 2 * _EDGE else 1.0 if share >= 1.0 - 2 * _EDGE else share


def _bound(
    counts: _Counts, budget: FloatArray, prior: float, end: float, num_halvings: int = _NUM_HALVINGS
) -> FloatArray:
    """Return the share furthest towards `end` with the arm's log martingale within `budget`."""
    inside = np.full(budget.shape, counts.share)
    outside = np.full(budget.shape, end)
    is_free = counts.log(outside, prior) < budget
    for _ in range(num_halvings):
        middle = (inside + outside) / 2.0
        is_inside = counts.log(middle, prior) < budget
        inside = np.where(is_inside, middle, inside)
        outside = np.where(is_inside, outside, middle)
    return np.where(is_free, end, outside)


def _extent(
    one: _Counts,
    two: _Counts,
    budget: float,
    prior: float,
    contrast: Callable[[FloatArray, FloatArray], FloatArray],
) -> tuple[float, float]:
    """Return the least and greatest contrast of pairs of shares with product within `budget`.

    It walks the first arm's shares, takes the second's furthest at each, and looks again more
    closely around the extreme ones.
    """
    left = budget - float(two.log(np.array(two.share), prior))
    ends = [float(_bound(one, np.array([left]), prior, end)[0]) for end in (_EDGE, 1.0 - _EDGE)]
    found = []
    for end, sign in ((_EDGE, 1.0), (1.0 - _EDGE, -1.0)):
        low, high = ends
        # the place of the extreme is found roughly, its value exactly in the last round
        for num_halvings in (14, 20, _NUM_HALVINGS):
            # dense near the ends, where the boundary is steep
            angles = np.linspace(0.0, np.pi, _NUM_POINTS)
            shares = low + (high - low) * (1.0 - np.cos(angles)) / 2.0
            rest = np.maximum(budget - one.log(shares, prior), budget - left)
            values = sign * contrast(shares, _bound(two, rest, prior, end, num_halvings))
            best = int(np.argmin(values))
            low, high = shares[max(0, best - 1)], shares[min(_NUM_POINTS - 1, best + 1)]
        found.append(sign * float(values[best]))
    return found[0], found[1]
