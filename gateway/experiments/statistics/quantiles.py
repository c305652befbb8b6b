"""Quantiles of latencies: confidence sequences of Howard and Ramdas (2022), from a sketch.

The number of values at or below the true q-quantile is a sum of Bernoulli variables with share q:
its beta-binomial mixture martingale (their theorem 1) gives the ranks that the quantile may have,
at all times together. The bounds are the outer edges of the sketch's bins that hold these ranks, so
the sketch's error is within the interval. Two arms: the product of both martingales, as for shares.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.gateway.experiments.sketch import QuantileSketch
from outrider.gateway.experiments.statistics.comparison import Comparison
from outrider.gateway.experiments.statistics.interval import UNKNOWN, Interval, check_alpha
from outrider.gateway.experiments.statistics.mixture import (
    FloatArray,
    log_beta_binomial,
    prior_requests,
)

_NUM_HALVINGS: Final = 60


def quantile_interval(
    sketch: QuantileSketch, q: float, alpha: float, *, design_effect: float = 1.0
) -> Interval:
    """Return the q-quantile in the sketch's unit. Raises ValueError for q, alpha not in (0, 1).

    `design_effect`: of clusters.py; ranks are counted in effective values. The lower bound is 0
    and the upper one infinite as long as the data allow any.
    """
    check_alpha(alpha)
    _check_quantile(q)
    n = sketch.count
    if n == 0:
        return Interval(estimate=math.nan, low=0.0, high=math.inf)
    lowest, highest = _ranks(n / design_effect, q, alpha)
    first = math.ceil(lowest * design_effect)
    last = math.floor(highest * design_effect) + 1
    return Interval(
        estimate=sketch.quantile(q),
        low=sketch.edges_at_rank(first)[0] if first >= 1 else 0.0,
        high=sketch.edges_at_rank(last)[1] if last <= n else math.inf,
    )


def compare_quantiles(
    control: QuantileSketch,
    arm: QuantileSketch,
    q: float,
    alpha: float,
    *,
    design_effects: tuple[float, float] = (1.0, 1.0),
) -> Comparison:
    """Compare an arm's q-quantile with the control's. Raises ValueError for q, alpha not in (0, 1).

    `design_effects`: the control's and the arm's.
    """
    check_alpha(alpha)
    _check_quantile(q)
    if control.count == 0 or arm.count == 0:
        return Comparison(difference=UNKNOWN, lift=UNKNOWN, p_value=1.0)
    prior = prior_requests(alpha, num_arms=2)
    one = _Places.of(control, q, prior, design_effects[0])
    two = _Places.of(arm, q, prior, design_effects[1])
    budget = -math.log(alpha)
    both = one.logs[:, None] + two.logs[None, :]
    is_within = both < budget
    with np.errstate(divide="ignore", invalid="ignore"):
        least = two.lower[None, :] - one.upper[:, None]
        most = two.upper[None, :] - one.lower[:, None]
        least_ratio = two.lower[None, :] / one.upper[:, None]
        most_ratio = two.upper[None, :] / one.lower[:, None]
    meets = (one.lower[:, None] <= two.upper[None, :]) & (two.lower[None, :] <= one.upper[:, None])
    first, second = control.quantile(q), arm.quantile(q)
    return Comparison(
        difference=Interval(
            estimate=second - first,
            low=_least(least, is_within, -math.inf),
            high=-_least(-most, is_within, -math.inf),
        ),
        lift=Interval(
            estimate=second / first - 1.0 if first > 0.0 else math.nan,
            low=_least(least_ratio, is_within, 0.0) - 1.0,
            high=-_least(-most_ratio, is_within, -math.inf) - 1.0,
        ),
        p_value=math.exp(-max(0.0, float(both[meets].min()))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """The range of an arm's quantile: places (lower, upper], each with its log martingale.

    The first place is below all values, the last above them. Within a bin the number of values at
    or below a point is not known, so the martingale's least value counts.
    """

    lower: FloatArray
    upper: FloatArray
    logs: FloatArray

    @classmethod
    def of(cls, sketch: QuantileSketch, q: float, prior: float, effect: float) -> "_Places":
        lower, upper, cumulative = sketch.cdf()
        n = sketch.count / effect
        after = np.concatenate([[0.0], cumulative / effect, [n]])
        before = np.concatenate([[0.0], after[:-1]])
        counts = np.clip(q * n, before, after)
        return cls(
            lower=np.concatenate([[0.0], lower, upper[-1:]]),
            upper=np.concatenate([lower[:1], upper, [np.inf]]),
            logs=log_beta_binomial(counts, n - counts, q, prior),
        )


def _least(values: FloatArray, is_within: np.ndarray, otherwise: float) -> float:
    """Return the least of the values within; `otherwise` if none is a number (0 / 0)."""
    chosen = values[is_within]
    if chosen.size == 0 or bool(np.isnan(chosen).any()):
        return otherwise
    return float(chosen.min())


def _ranks(n: float, q: float, alpha: float) -> tuple[float, float]:
    """Return the least and greatest number of n values at or below the q-quantile."""
    prior = prior_requests(alpha)
    budget = -math.log(alpha)

    def furthest(end: float) -> float:
        inside, outside = q * n, end
        if log_beta_binomial(outside, n - outside, q, prior) < budget:
            return end
        for _ in range(_NUM_HALVINGS):
            middle = (inside + outside) / 2.0
            if log_beta_binomial(middle, n - middle, q, prior) < budget:
                inside = middle
            else:
                outside = middle
        return inside

    return furthest(0.0), furthest(n)


def _check_quantile(q: float) -> None:
    if not 0.0 < q < 1.0:
        raise ValueError(f"a quantile is between 0 and 1, not {q}")
