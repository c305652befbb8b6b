"""Means (latency, cost, scores): normal mixture confidence sequences with the running variance.

Robbins (1970); as a sequential test the mixture SPRT of Johari et al. (2017); that the variance may
be estimated and values need not be normal: the asymptotic confidence sequences of Waudby-Smith et
al. (2024), theorem 2.2. Requests of a unit are alike: the variance is that of bucket totals
(clusters.py). Valid for many requests of many units; with too few there is no interval.
"""

import math
from dataclasses import dataclass
from typing import Final

from outrider.gateway.experiments.statistics.clusters import design_effect, effective_buckets
from outrider.gateway.experiments.statistics.comparison import Comparison
from outrider.gateway.experiments.statistics.interval import UNKNOWN, Interval, check_alpha
from outrider.gateway.experiments.statistics.mixture import TUNED_FOR, half_width, prior_requests
from outrider.gateway.experiments.totals import MetricTotals

MIN_REQUESTS: Final = 50
"""Below this number no interval of a mean is given: the approximation would be poor."""
MIN_BUCKETS: Final = 8.0
"""Nor below this number of buckets of units: their variance would be a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mean:
    """A mean, its squared standard error, and its effective number of requests."""

    mean: float
    squared_error: float
    num_effective: float

    @classmethod
    def of(cls, metric: MetricTotals, alpha: float, *, is_independent: bool) -> "_Mean | None":
        if metric.n < MIN_REQUESTS:
            return None
        if not is_independent and float(effective_buckets(metric.counts)) < MIN_BUCKETS:
            return None
        effect = design_effect(metric, alpha, is_independent=is_independent)
        return cls(
            mean=metric.mean,
            squared_error=metric.variance * effect / metric.n,
            num_effective=metric.n / effect,
        )


def mean_interval(metric: MetricTotals, alpha: float, *, is_independent: bool = False) -> Interval:
    """Return the mean of a request. Raises ValueError for alpha not in (0, 1).

    Unbounded below MIN_REQUESTS requests or MIN_BUCKETS effective buckets.
    """
    check_alpha(alpha)
    known = _Mean.of(metric, alpha, is_independent=is_independent)
    if known is None:
        return Interval(estimate=metric.mean, low=-math.inf, high=math.inf)
    eta = known.num_effective / prior_requests(alpha)
    reach = half_width(alpha, eta) * math.sqrt(known.squared_error)
    return Interval(estimate=known.mean, low=known.mean - reach, high=known.mean + reach)


def compare_means(
    control: MetricTotals,
    arm: MetricTotals,
    alpha: float,
    *,
    is_independent: bool = False,
    is_adaptive: bool = False,
) -> Comparison:
    """Compare the arm's mean with the control's. Raises ValueError for alpha not in (0, 1).

    With fixed weights the difference of means has one mixture. `is_adaptive`: weights follow the
    results so far; then each arm has its own, and their product is used, which is somewhat wider.
    The lift's interval is Fieller's (1954), with the same mixtures.
    """
    check_alpha(alpha)
    one = _Mean.of(control, alpha, is_independent=is_independent)
    two = _Mean.of(arm, alpha, is_independent=is_independent)
    difference = arm.mean - control.mean
    if one is None or two is None:
        unknown = Interval(estimate=difference, low=-math.inf, high=math.inf)
        return Comparison(difference=unknown, lift=UNKNOWN, p_value=1.0)
    spread = _spread_adaptive(one, two, alpha) if is_adaptive else _spread(one, two, alpha)
    reach = math.sqrt(spread.threshold * (spread.variance_1 + spread.variance_2))
    return Comparison(
        difference=Interval(estimate=difference, low=difference - reach, high=difference + reach),
        lift=_lift(one.mean, two.mean, spread),
        p_value=spread.p_value(difference),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """Differences d with d^2 <= threshold (variance_1 + variance_2) are within the interval."""

    variance_1: float
    variance_2: float
    threshold: float
    cost: float
    """Log of the mixture's cost. The log martingale against no difference is d^2 / (2 (variance_1 +
    variance_2)) - cost."""

    def p_value(self, difference: float) -> float:
        variance = self.variance_1 + self.variance_2
        if not variance > 0.0:
            return 1.0 if difference == 0.0 else 0.0
        return math.exp(min(0.0, self.cost - difference * difference / (2.0 * variance)))


def reach_of_difference(squared_error: float, num_effective: float, alpha: float) -> float:
    """Return the half-width of a difference's interval with fixed weights.

    `squared_error` of the difference, `num_effective` requests of both arms together.
    """
    eta = num_effective / prior_requests(alpha, tuned_for=2.0 * TUNED_FOR)
    threshold = 2.0 * math.log(1.0 / alpha) + math.log1p(eta)
    return math.sqrt(threshold * squared_error * (1.0 + eta) / eta)


def _spread(one: _Mean, two: _Mean, alpha: float) -> _Spread:
    effective = one.num_effective + two.num_effective
    eta = effective / prior_requests(alpha, tuned_for=2.0 * TUNED_FOR)
    shrink = eta / (1.0 + eta)
    return _Spread(
        variance_1=one.squared_error / shrink,
        variance_2=two.squared_error / shrink,
        threshold=2.0 * math.log(1.0 / alpha) + math.log1p(eta),
        cost=math.log1p(eta) / 2.0,
    )


def _spread_adaptive(one: _Mean, two: _Mean, alpha: float) -> _Spread:
    prior = prior_requests(alpha, num_arms=2)
    eta_1, eta_2 = one.num_effective / prior, two.num_effective / prior
    cost = (math.log1p(eta_1) + math.log1p(eta_2)) / 2.0
    return _Spread(
        variance_1=one.squared_error * (1.0 + eta_1) / eta_1,
        variance_2=two.squared_error * (1.0 + eta_2) / eta_2,
        threshold=2.0 * (math.log(1.0 / alpha) + cost),
        cost=cost,
    )


def _lift(mean_1: float, mean_2: float, spread: _Spread) -> Interval:
    """Return r with (mean_2 - r mean_1)^2 <= threshold (variance_2 + r^2 variance_1), minus 1."""
    if mean_1 == 0.0:
        return UNKNOWN
    square = mean_1 * mean_1 - spread.threshold * spread.variance_1
    estimate = mean_2 / mean_1 - 1.0
    if square <= 0.0:  # the control's mean may be zero: any ratio is possible
        return Interval(estimate=estimate, low=-math.inf, high=math.inf)
    cross = mean_1 * mean_2
    constant = mean_2 * mean_2 - spread.threshold * spread.variance_2
    root = math.sqrt(max(0.0, cross * cross - square * constant))
    return Interval(
        estimate=estimate, low=(cross - root) / square - 1.0, high=(cross + root) / square - 1.0
    )
