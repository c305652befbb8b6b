"""Means and quantiles: formulas against their papers, coverage while one looks."""

import math

import numpy as np
import pytest

from outrider.gateway.experiments.sketch import QuantileSketch
from outrider.gateway.experiments.statistics.clusters import design_effect
from outrider.gateway.experiments.statistics.means import compare_means, mean_interval
from outrider.gateway.experiments.statistics.mixture import (
    log_beta_binomial,
    prior_requests,
)
from outrider.gateway.experiments.statistics.quantiles import (
    compare_quantiles,
    quantile_interval,
)
from outrider.gateway.experiments.totals import MetricTotals
from tests.gateway.experiments.statistics.arms import metric, sketch_of

ALPHA = 0.05


def drawn(rng, n, scale=1.0):
    values = scale * rng.lognormal(0.0, 0.8, n)
    return values, metric(values, rng.integers(64, size=n))


def test_a_mean_has_the_papers_half_width():
    """Waudby-Smith et al. (2024), theorem 2.2, written as there."""
    values, totals = drawn(np.random.default_rng(1), 4000)
    found = mean_interval(totals, ALPHA, is_independent=True)
    t, rho_squared = 4000, 1.0 / prior_requests(ALPHA)
    expected = values.std(ddof=1) * math.sqrt(
        2 * (t * rho_squared + 1) / (t * t * rho_squared)
        * math.log(math.sqrt(t * rho_squared + 1) / ALPHA)
    )  # fmt: skip
    assert found.estimate == pytest.approx(values.mean())
    assert found.high - found.estimate == pytest.approx(expected, rel=1e-9)
    assert found.estimate - found.low == pytest.approx(expected, rel=1e-9)


def test_too_few_requests_or_units_say_nothing():
    rng = np.random.default_rng(2)
    values, _ = drawn(rng, 49)
    assert math.isinf(mean_interval(metric(values, np.arange(49)), ALPHA).high)
    values, _ = drawn(rng, 5000)
    of_three = metric(values, rng.integers(3, size=5000))
    assert math.isinf(mean_interval(of_three, ALPHA).low)
    assert math.isfinite(mean_interval(of_three, ALPHA, is_independent=True).low)
    assert compare_means(of_three, of_three, ALPHA).p_value == 1.0
    assert compare_means(MetricTotals(), MetricTotals(), ALPHA).p_value == 1.0


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("scale", [0.8, 0.93, 0.97, 1.0, 1.06, 1.4])
def test_difference_lift_and_p_value_agree(scale, is_adaptive):
    rng = np.random.default_rng(3)
    one, two = drawn(rng, 3000)[1], drawn(rng, 3000, scale)[1]
    found = compare_means(one, two, ALPHA, is_adaptive=is_adaptive)
    assert (found.p_value <= ALPHA) == found.difference.excludes(0.0) == found.lift.excludes(0.0)
    assert found.lift.low < found.lift.estimate < found.lift.high


def test_adaptive_weights_cost_some_width():
    rng = np.random.default_rng(4)
    one, two = drawn(rng, 3000)[1], drawn(rng, 3000)[1]
    fixed, adaptive = (
        compare_means(one, two, ALPHA, is_adaptive=each).difference for each in (False, True)
    )
    ratio = (adaptive.high - adaptive.low) / (fixed.high - fixed.low)
    assert 1.05 < ratio < 1.3


def test_a_control_that_may_be_zero_has_any_lift():
    rng = np.random.default_rng(5)
    near_zero = metric(rng.normal(0.0, 1.0, 500), rng.integers(64, size=500))
    found = compare_means(near_zero, drawn(rng, 500)[1], ALPHA)
    assert math.isinf(found.lift.low)
    assert math.isinf(found.lift.high)


def test_users_that_differ_widen_the_interval_by_the_design_effect():
    rng = np.random.default_rng(6)
    users, per_user = 640, 20
    speed = np.repeat(rng.normal(0.0, 1.0, users), per_user)
    values = 10.0 + speed + rng.normal(0.0, 1.0, users * per_user)
    totals = metric(values, np.repeat(rng.integers(64, size=users), per_user))
    # correlation of two requests of a user is 1/2: 1 + 19 / 2, by Kish, and the safety margin
    assert design_effect(totals, ALPHA) == pytest.approx(10.5 * 1.09, rel=0.5)
    assert design_effect(totals, ALPHA, is_independent=True) == 1.0
    independent = metric(rng.permutation(values), rng.integers(64, size=values.size))
    assert 1.0 <= design_effect(independent, ALPHA) < 1.8


def test_a_quantile_is_the_ranks_not_refused_with_the_sketches_error():
    rng = np.random.default_rng(7)
    values = np.sort(rng.lognormal(0.0, 1.0, 2000))
    sketch = sketch_of(values)
    for q in (0.5, 0.95, 0.99):
        found = quantile_interval(sketch, q, ALPHA)
        counts = np.arange(2001)
        logs = log_beta_binomial(counts, 2000 - counts, q, prior_requests(ALPHA))
        kept = counts[logs < math.log(1 / ALPHA)]
        low, high = values[kept[0] - 1], values[kept[-1]]  # ranks kept[0] and kept[-1] + 1
        assert low * 0.979 <= found.low < low
        assert high <= found.high <= high * 1.021
        assert found.low < found.estimate < found.high


def test_too_few_values_for_a_high_quantile_have_no_upper_bound():
    found = quantile_interval(sketch_of(np.linspace(1.0, 2.0, 60)), 0.99, ALPHA)
    assert math.isinf(found.high)
    nothing = quantile_interval(QuantileSketch(), 0.5, ALPHA)
    assert (nothing.low, nothing.high) == (0.0, math.inf)
    assert compare_quantiles(QuantileSketch(), QuantileSketch(), 0.5, ALPHA).p_value == 1.0
    with pytest.raises(ValueError, match="quantile"):
        quantile_interval(QuantileSketch(), 1.0, ALPHA)


def test_quantiles_of_two_arms():
    rng = np.random.default_rng(8)
    slow, fast = rng.lognormal(0.0, 0.7, 6000), 0.8 * rng.lognormal(0.0, 0.7, 6000)
    for q, factor in ((0.5, 1.0), (0.95, math.exp(0.7 * 1.645))):
        found = compare_quantiles(sketch_of(slow), sketch_of(fast), q, ALPHA)
        assert found.difference.low < -0.2 * factor < found.difference.high < 0.0
        assert found.lift.low < -0.2 < found.lift.high < 0.0
        assert found.p_value <= ALPHA
        same = compare_quantiles(sketch_of(slow), sketch_of(slow), q, ALPHA)
        assert same.difference.low < 0.0 < same.difference.high
        assert same.p_value == 1.0
        wider = compare_quantiles(
            sketch_of(slow), sketch_of(fast), q, ALPHA, design_effects=(4.0, 4.0)
        )
        assert wider.difference.low < found.difference.low
        assert wider.difference.high > found.difference.high
    # zeros have a bin of their own
    zeros = compare_quantiles(sketch_of(np.zeros(900)), sketch_of(slow), 0.5, ALPHA)
    assert zeros.difference.low > 0.0


def test_quantiles_and_means_of_users_that_differ():
    """50 runs of 100 users, ten looks: within alpha by the design effect, far from it without."""
    rng = np.random.default_rng(10)
    truth, limit = math.exp(0.5 * math.sqrt(2) * 1.6448536), 3.0
    mean, prior, bound = math.exp(0.25), prior_requests(ALPHA), math.log(1 / ALPHA)
    missed = missed_means = naive = 0
    for _ in range(50):
        speed, bucket = rng.normal(0.0, 0.5, 100), rng.integers(64, size=100)
        user = rng.integers(100, size=3000)
        values = np.exp(speed[user] + rng.normal(0.0, 0.5, 3000))
        is_missed = is_missed_mean = is_naive = False
        for n in range(300, 3001, 300):
            seen, buckets = values[:n], bucket[user[:n]]
            times = metric(seen, buckets)
            effect = max(
                design_effect(times, ALPHA),
                design_effect(metric((seen < limit).astype(float), buckets), ALPHA),
            )
            below = float((seen <= truth).sum())
            for worth in (effect, 1.0):
                log = log_beta_binomial(below / worth, (n - below) / worth, 0.95, prior)
                is_missed |= bool(worth == effect and log >= bound)
                is_naive |= bool(worth == 1.0 and log >= bound)
            is_missed_mean |= mean_interval(times, ALPHA).excludes(mean)
        missed += is_missed
        missed_means += is_missed_mean
        naive += is_naive
    assert missed <= 2
    assert missed_means <= 2
    assert naive >= 7


def test_a_quantile_is_missed_by_no_more_than_alpha_of_the_runs_while_one_looks():
    """400 runs, looked at after each 25 of 1,500 values; the truth is known."""
    rng = np.random.default_rng(9)
    runs, q = 400, 0.95
    truth = math.exp(1.6448536269514722)
    below = np.zeros(runs)
    missed = np.zeros(runs, dtype=bool)
    prior = prior_requests(ALPHA)
    for n in range(25, 1501, 25):
        below += (rng.lognormal(0.0, 1.0, (runs, 25)) <= truth).sum(axis=1)
        missed |= log_beta_binomial(below, n - below, q, prior) >= math.log(1 / ALPHA)
    assert missed.mean() <= ALPHA
    # and the interval says so too, through the sketch
    for run in range(20):
        sketch = sketch_of(np.random.default_rng(run).lognormal(0.0, 1.0, 700))
        found = quantile_interval(sketch, q, ALPHA)
        assert found.low < truth < found.high
