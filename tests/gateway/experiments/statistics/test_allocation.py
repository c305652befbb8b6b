"""Adaptive weights against the papers' own figures and closed forms."""

import numpy as np
import pytest

from outrider.gateway.experiments.statistics.allocation import (
    bounded_shares,
    thompson_shares,
    track_and_stop_shares,
)

MANY = 10**9


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        # Garivier and Kaufmann (2016), section 6: the two problems of their experiments
        ((0.5, 0.45, 0.43, 0.4), (0.417, 0.390, 0.136, 0.057)),
        ((0.3, 0.21, 0.2, 0.19, 0.18), (0.336, 0.251, 0.177, 0.132, 0.104)),
    ],
)
def test_track_and_stop_has_the_papers_proportions(means, expected):
    shares = track_and_stop_shares([mean * MANY for mean in means], [MANY] * len(means))
    assert shares == pytest.approx(expected, abs=6e-4)


def test_track_and_stop_at_the_edges():
    assert track_and_stop_shares([3], [10]) == [1.0]
    for successes, trials in (([0, 0], [0, 0]), ([10, 10], [10, 10]), ([50, 50, 1], [100] * 3)):
        shares = track_and_stop_shares(successes, trials)
        assert sum(shares) == pytest.approx(1.0)
        assert all(share > 0.0 for share in shares)
    one, two = track_and_stop_shares([900, 900], [1000, 1000])
    assert one == pytest.approx(two, abs=0.02)
    with pytest.raises(ValueError, match="successes"):
        track_and_stop_shares([5], [4])
    with pytest.raises(ValueError, match="one of each"):
        track_and_stop_shares([], [])


def test_thompson_shares_are_the_probabilities_to_be_best():
    rng = np.random.default_rng(1)
    # Beta(2, 1) against Beta(1, 2): P(X > Y) = 5/6
    assert thompson_shares([1, 0], [1, 1], rng, 40_000)[0] == pytest.approx(5 / 6, abs=0.01)
    assert thompson_shares([0, 0, 0], [0, 0, 0], rng) == pytest.approx([1 / 3] * 3, abs=0.02)
    assert thompson_shares([900, 800], [1000, 1000], rng) == [1.0, 0.0]
    with pytest.raises(ValueError, match="not between"):
        thompson_shares([-1, 3], [4, 4], rng)


def test_bounded_shares_leave_each_arm_its_least():
    assert bounded_shares([1.0, 0.0, 0.0], 0.1) == pytest.approx([0.8, 0.1, 0.1])
    assert bounded_shares([2.0, 2.0], 0.5) == pytest.approx([0.5, 0.5])
    with pytest.raises(ValueError, match="cannot each"):
        bounded_shares([0.5, 0.3, 0.2], 0.4)
