"""Sizes of the arms: right and wrong ones, with units that send much."""

import math

import numpy as np
import pytest
from scipy.stats import multinomial

from outrider.gateway.experiments.statistics.mismatch import (
    log_multinomial_evidence,
    sample_ratio_mismatch,
)


def spread(counts):
    """Requests by arm and bucket, evenly."""
    return np.stack([np.full(64, each / 64.0) for each in counts])


def test_the_multinomial_martingale_is_fair():
    shares = np.array([0.5, 0.3, 0.2])
    n = 12
    outcomes = np.array([(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)])
    expected = multinomial.pmf(outcomes, n, shares) @ np.exp(
        log_multinomial_evidence(outcomes.astype(float), shares, 30.0)
    )
    assert expected == pytest.approx(1.0, rel=1e-9)


def test_arms_of_the_right_size_and_of_a_wrong_one():
    right = sample_ratio_mismatch(spread((5050, 4950)), [1, 1], is_independent=True)
    assert not right.is_mismatch
    assert right.chi_square_p == pytest.approx(0.317, abs=1e-3)
    wrong = sample_ratio_mismatch(spread((5400, 4600)), [1, 1], is_independent=True)
    assert wrong.is_mismatch
    assert wrong.observed == (5400, 4600)
    assert sample_ratio_mismatch(spread((5400, 4600)), [54, 46], is_independent=True).p_value == 1.0
    three = sample_ratio_mismatch(spread((900, 1000, 1300)), [1, 1, 1], is_independent=True)
    assert three.is_mismatch
    assert three.expected_shares == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_an_arm_without_requests_is_found():
    for is_independent in (True, False):
        counts = np.random.default_rng(1).poisson(40, (2, 64)).astype(float)
        counts[1] = 0.0
        assert sample_ratio_mismatch(counts, [1, 1], is_independent=is_independent).is_mismatch


def test_a_heavy_user_is_no_mismatch():
    """Independent users with requests between 1 and 1,000: whole users move, not requests."""
    rng = np.random.default_rng(2)
    alarms = naive = 0
    for _ in range(200):
        requests = np.exp(rng.uniform(0.0, np.log(1000.0), 200)).round()
        cell = rng.integers(2, size=200) * 64 + rng.integers(64, size=200)
        counts = np.bincount(cell, requests, 128).reshape(2, 64)
        alarms += sample_ratio_mismatch(counts, [1, 1], is_independent=False).is_mismatch
        naive += sample_ratio_mismatch(counts, [1, 1], is_independent=True).is_mismatch
    assert alarms <= 4
    assert naive > 100
    # but a real one of many users is seen
    users = rng.random(20_000) < 0.55
    cell = users * 64 + rng.integers(64, size=users.size)
    counts = np.bincount(cell, rng.integers(1, 10, users.size), 128).reshape(2, 64)
    for weights in ([1, 1], [1, 1, 1]):
        padded = np.concatenate([counts, counts[:1]])[: len(weights)]
        assert sample_ratio_mismatch(padded, weights, is_independent=False).is_mismatch


def test_too_little_says_nothing_and_wrong_weights_are_told():
    assert sample_ratio_mismatch(spread((0, 0)), [1, 1], is_independent=True).p_value == 1.0
    assert sample_ratio_mismatch(spread((3, 0)), [1, 1], is_independent=False).p_value > 0.01
    document = sample_ratio_mismatch(spread((9, 9)), [1, 1], is_independent=False).document()
    assert document["chi_square_p"] is None
    assert math.isclose(document["p_value"], 1.0)
    for weights in ([1], [1, 0], [1, -1]):
        with pytest.raises(ValueError, match="weights"):
            sample_ratio_mismatch(spread((5, 5)), weights, is_independent=True)
