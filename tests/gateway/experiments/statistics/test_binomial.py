"""Shares: exact against brute force, valid at the ends, and what the formulas must obey."""

import math

import numpy as np
import pytest
from scipy.stats import beta, binom

from outrider.gateway.experiments.statistics.binomial import (
    are_different,
    compare_shares,
    log_evidence,
    share_interval,
)
from outrider.gateway.experiments.statistics.mixture import (
    half_width,
    log_beta_binomial,
    prior_requests,
)
from outrider.gateway.experiments.totals import MetricTotals
from tests.gateway.experiments.statistics.arms import counted

ALPHA = 0.05


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("prior", [1.0, 20.0, 61.0])
def test_the_martingale_is_a_mixture_and_fair(share, prior):
    n = 40
    successes = np.arange(n + 1)
    # by its definition: the likelihood under Beta(prior share, prior (1 - share)) over that under
    # the share itself, integrated numerically
    grid = (np.arange(20000) + 0.5) / 20000
    weights = np.diff(beta.cdf(np.arange(20001) / 20000, prior * share, prior * (1 - share)))
    for s in (5, 20, 33):
        ratio = np.exp(
            s * np.log(grid / share) + (n - s) * np.log((1 - grid) / (1 - share))
        ) @ weights  # fmt: skip
        assert log_beta_binomial(s, n - s, share, prior) == pytest.approx(math.log(ratio), abs=0.02)
    # and its expectation under the share is 1
    expected = binom.pmf(successes, n, share) @ np.exp(
        log_beta_binomial(successes, n - successes, share, prior)
    )
    assert expected == pytest.approx(1.0, rel=1e-9)


def test_the_prior_makes_the_interval_narrowest_where_it_is_tuned_for():
    for num_arms in (1, 2, 3):
        prior = prior_requests(ALPHA, num_arms, 500.0)
        at = half_width(ALPHA, 500.0 / prior, num_arms)
        for factor in (0.9, 1.1):
            assert half_width(ALPHA, 500.0 / (prior * factor), num_arms) > at
    # Waudby-Smith et al. (2024): about 3 standard errors for alpha = 0.05, not 1.96
    assert half_width(ALPHA, 500.0 / prior_requests(ALPHA)) == pytest.approx(3.03, abs=0.01)


@pytest.mark.parametrize("successes", [0, 1, 5, 50, 95, 100])
def test_an_interval_is_all_shares_that_are_not_refused(successes):
    interval = share_interval(counted(successes, 100), ALPHA, is_independent=True)
    shares = np.linspace(1e-5, 1 - 1e-5, 20001)
    logs = log_beta_binomial(successes, 100 - successes, shares, prior_requests(ALPHA))
    kept = shares[logs < math.log(1 / ALPHA)]
    assert interval.low == pytest.approx(kept[0], abs=1e-4)
    assert interval.high == pytest.approx(kept[-1], abs=1e-4)
    assert interval.low <= interval.estimate <= interval.high


def test_nothing_counted_says_nothing():
    interval = share_interval(MetricTotals(), ALPHA)
    assert (interval.low, interval.high) == (0.0, 1.0)
    assert math.isnan(interval.estimate)
    nothing = compare_shares(MetricTotals(), counted(9, 10), ALPHA)
    assert nothing.p_value == 1.0
    assert not nothing.difference.excludes(0.0)
    with pytest.raises(ValueError, match="alpha"):
        share_interval(counted(9, 10), 5.0)


@pytest.mark.parametrize(
    ("one", "two"), [((900, 1000), (950, 1000)), ((40, 50), (30, 300)), ((0, 400), (9, 400))]
)
def test_a_difference_is_the_projection_of_all_pairs_not_refused(one, two):
    found = compare_shares(counted(*one), counted(*two), ALPHA, is_independent=True)
    prior = prior_requests(ALPHA, num_arms=2)
    # brute force around each arm's own share
    grids = []
    for successes, n in (one, two):
        share, reach = successes / n, 8.0 / math.sqrt(n)
        grids.append(np.linspace(max(1e-6, share - reach), min(1 - 1e-6, share + reach), 1500))
    logs = (
        log_beta_binomial(one[0], one[1] - one[0], grids[0], prior)[:, None]
        + log_beta_binomial(two[0], two[1] - two[0], grids[1], prior)[None, :]
    )
    kept = logs < math.log(1 / ALPHA)
    differences = (grids[1][None, :] - grids[0][:, None])[kept]
    assert found.difference.low == pytest.approx(differences.min(), abs=2e-3)
    assert found.difference.high == pytest.approx(differences.max(), abs=2e-3)
    if one[0] > 0:
        lifts = (grids[1][None, :] / grids[0][:, None])[kept] - 1.0
        assert found.lift.low == pytest.approx(lifts.min(), abs=5e-3)
        assert found.lift.high == pytest.approx(lifts.max(), abs=5e-3)
    else:
        assert found.lift.high == math.inf


@pytest.mark.parametrize("successes", [880, 900, 925, 930, 940, 960])
def test_p_value_difference_and_lift_agree(successes):
    found = compare_shares(counted(900, 1000), counted(successes, 1000), ALPHA, is_independent=True)
    assert (found.p_value <= ALPHA) == found.difference.excludes(0.0) == found.lift.excludes(0.0)


def test_evidence_is_the_least_over_common_shares():
    counts = [np.array([each]) for each in (880.0, 120.0, 950.0, 50.0)]
    prior = prior_requests(ALPHA, num_arms=2)
    shares = np.linspace(0.8, 0.99, 20001)
    both = log_beta_binomial(880, 120, shares, prior) + log_beta_binomial(950, 50, shares, prior)
    evidence = log_evidence(*counts, prior)
    assert evidence[0] == pytest.approx(both.min(), abs=1e-5)
    bound = math.exp(-evidence[0])
    assert are_different(np.stack(counts), prior, bound * 1.01)[0]
    assert not are_different(np.stack(counts), prior, bound * 0.99)[0]


def test_requests_of_few_units_count_less():
    """The same counts, but every bucket all or nothing: as few observations as buckets."""
    ones = np.zeros(64)
    ones[:32] = 100.0
    clustered = MetricTotals(counts=np.full(64, 100.0), sums=ones, squares=ones)
    even = counted(3200, 6400)
    wide, narrow = share_interval(clustered, ALPHA), share_interval(even, ALPHA)
    assert wide.high - wide.low > 8.0 * (narrow.high - narrow.low)
    assert wide.estimate == narrow.estimate == 0.5
