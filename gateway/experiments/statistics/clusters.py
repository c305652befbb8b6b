"""Design effects: the variance of units relative to independent requests.

Users differ, so requests of one user are no independent observations. Totals are kept by 64 buckets
of the unit's hash; buckets are independent of each other, and their variance is the true variance
of the whole.
"""

import numpy as np

from outrider.gateway.experiments.statistics.mixture import (
    TUNED_FOR,
    FloatArray,
    half_width,
    prior_requests,
)
from outrider.gateway.experiments.statistics.special import ndtr, stdtrit
from outrider.gateway.experiments.totals import ArmTotals, MetricTotals, SketchName


def effective_buckets(counts: FloatArray) -> FloatArray:
    """Return the equivalent number of buckets of equal size (Kish 1965); 0 for no requests.

    `counts`: shape (..., 64), requests by bucket; the result has shape (...).
    """
    squares = np.square(counts).sum(axis=-1)
    found: FloatArray = np.divide(
        np.square(counts.sum(axis=-1)), squares, out=np.zeros_like(squares), where=squares > 0.0
    )
    return found


def design_effects(
    counts: FloatArray, sums: FloatArray, squares: FloatArray, alpha: float
) -> FloatArray:
    """Return the mean's variance over that of independent requests: 1 or more, a safe estimate.

    The ratio estimator's cluster variance, B / (B - 1) sum d^2 with d = sum - mean count of a
    bucket, over the variance of n independent requests (Kish 1965). That estimate is itself noisy.
    It is widened as Student's t is for the normal, at the interval's half-width. The degrees of
    freedom come from the fourth moments of d, so it holds where a few buckets have all events, too.
    At most as if all requests of a bucket were one.

    Arguments: count, sum and sum of squares by bucket, shape (..., 64). The result: shape (...).
    """
    n = counts.sum(axis=-1)
    total = sums.sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = total / n
        independent = n * np.maximum(0.0, squares.sum(axis=-1) - total * mean) / (n - 1.0)
        buckets = effective_buckets(counts)
        most = np.maximum(1.0, n / buckets)
        deviations = np.square(sums - mean[..., None] * counts)
        scatter = deviations.sum(axis=-1)
        occupied = np.count_nonzero(counts, axis=-1)
        noise = np.square(deviations).sum(axis=-1) / np.square(scatter) - 1.0 / occupied
        freedom = np.minimum(buckets - 1.0, np.where(noise > 0.0, 2.0 / noise, np.inf))
        effect = scatter * occupied / (occupied - 1.0) / independent * _widening(freedom, alpha)
    # without any variance clusters cannot be estimated; with some, buckets all alike have none
    worst = np.where(buckets > 0.0, most, 1.0)
    effect = np.where(scatter > 0.0, effect, 1.0)
    known = (occupied > 1) & (independent > 0.0)
    return np.where(known, np.clip(np.where(known, effect, 1.0), 1.0, worst), worst)


def design_effect(metric: MetricTotals, alpha: float, *, is_independent: bool = False) -> float:
    """Return the design effect of one metric; 1 where each request is a unit of its own."""
    if is_independent:
        return 1.0
    return float(design_effects(metric.counts, metric.sums, metric.squares, alpha))


def pair_effects(
    control: MetricTotals, arm: MetricTotals, alpha: float, *, is_independent: bool = False
) -> tuple[float, float]:
    """Return the effects of two arms. An arm without variance gets the other's effect.

    Never more than as if all requests of a bucket were one.
    """
    effects = [design_effect(each, alpha, is_independent=is_independent) for each in (control, arm)]
    for mine, other in ((0, 1), (1, 0)):
        metrics = (control, arm)
        if _is_constant(metrics[mine]) and not _is_constant(metrics[other]):
            effects[mine] = min(effects[mine], effects[other])
    return effects[0], effects[1]


def _is_constant(metric: MetricTotals) -> bool:
    return not metric.variance > 0.0


def latency_design_effect(
    totals: ArmTotals, name: SketchName, alpha: float, *, is_independent: bool = False
) -> float:
    """Return the effect for a latency's quantiles: the greater of its mean's and attainment's.

    An approximation: the quantile's own indicator is not kept by bucket. Attainment is an indicator
    of latency, and the mean reflects the difference between units.
    """
    metrics = (totals.metrics[name], totals.metrics["attained"])
    return max(design_effect(each, alpha, is_independent=is_independent) for each in metrics)


def _widening(freedom: FloatArray, alpha: float) -> FloatArray:
    """Return the square of Student's quantile over the normal's, the normal's as half-width."""
    z = half_width(alpha, TUNED_FOR / prior_requests(alpha))
    widening: FloatArray = np.square(stdtrit(np.maximum(freedom, 1.0), ndtr(-z)) / z)
    return widening
