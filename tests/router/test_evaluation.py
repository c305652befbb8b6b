from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.evaluation import (
    NoGapError,
    apgr,
    choose_threshold,
    cost_quality_curve,
    cpt,
    evaluate,
)

# 10 prompts; the large model wins the first 3, loses the last, the rest are ties.
WEAK = np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=np.float64)
STRONG = np.array([1, 1, 1, 1, 1, 1, 0, 0, 1, 0], dtype=np.float64)
PERFECT = STRONG - WEAK


def test_curve_of_a_perfect_router_by_hand() -> None:
    curve = cost_quality_curve(PERFECT, WEAK, STRONG)
    expected = [0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.7]
    assert curve == pytest.approx(expected)
    area = sum((a + b) / 2 * 0.1 for a, b in pairwise(expected))
    assert apgr(PERFECT, WEAK, STRONG) == pytest.approx((area - 0.5) / 0.2)


def test_cpt_by_hand() -> None:
    # The gap is 0.2: half of it is won by the first prompt, 80 % after 1.6 prompts.
    assert cpt(PERFECT, WEAK, STRONG, 0.5) == pytest.approx(0.1)
    assert cpt(PERFECT, WEAK, STRONG, 0.8) == pytest.approx(0.16)


def test_a_constant_score_is_random() -> None:
    constant = np.zeros(10)
    assert apgr(constant, WEAK, STRONG) == pytest.approx(0.5)
    assert cpt(constant, WEAK, STRONG, 0.5) == pytest.approx(0.5)
    assert cpt(constant, WEAK, STRONG, 0.8) == pytest.approx(0.8)


def test_random_scores_average_to_random() -> None:
    rng = np.random.default_rng(0)
    weak = (rng.random(2000) < 0.6).astype(np.float64)
    strong = (rng.random(2000) < 0.9).astype(np.float64)
    values = [apgr(rng.random(2000), weak, strong) for _ in range(50)]
    assert np.mean(values) == pytest.approx(0.5, abs=0.02)


def test_the_worst_router_is_below_random() -> None:
    assert apgr(-PERFECT, WEAK, STRONG) < 0.0


@given(st.permutations(range(10)), st.lists(st.integers(-2, 2), min_size=10, max_size=10))
@settings(max_examples=100, deadline=None)
def test_order_of_rows_does_not_matter(order: list[int], scores: list[int]) -> None:
    gain, rows = np.array(scores, dtype=np.float64), np.array(order)
    shuffled = apgr(gain[rows], WEAK[rows], STRONG[rows])
    assert shuffled == pytest.approx(apgr(gain, WEAK, STRONG))
    assert apgr(gain, WEAK, STRONG) <= apgr(PERFECT, WEAK, STRONG) + 1e-12


def test_report_sets_the_router_between_its_bounds() -> None:
    rng = np.random.default_rng(1)
    weak = np.tile(WEAK, 40)
    strong = np.tile(STRONG, 40)
    gain = np.tile(PERFECT, 40) + rng.normal(scale=0.8, size=400)
    report = evaluate(gain, weak, strong, threshold=0.5, num_resamples=200)
    assert report.apgr.low < report.apgr.value < report.apgr.high
    assert report.cpt50.low <= report.cpt50.value <= report.cpt50.high
    assert 0.5 < report.apgr.value < report.oracle_apgr
    assert (report.oracle_accuracy, report.oracle_share) == (pytest.approx(0.8), 0.3)
    assert report.best_single_accuracy == pytest.approx(0.7)
    is_strong = gain > 0.5
    assert report.threshold_strong_share == pytest.approx(is_strong.mean())
    assert report.threshold_accuracy == pytest.approx(np.where(is_strong, strong, weak).mean())
    assert evaluate(gain, weak, strong, threshold=0.5, num_resamples=200) == report


def test_without_resamples_the_interval_is_a_point() -> None:
    report = evaluate(PERFECT, WEAK, STRONG, threshold=0.5, num_resamples=0)
    assert report.apgr.low == report.apgr.value == report.apgr.high


def test_no_gap_is_refused_with_the_numbers() -> None:
    for call in (
        lambda: apgr(PERFECT, STRONG, STRONG),
        lambda: cpt(PERFECT, STRONG, WEAK, 0.5),
        lambda: evaluate(PERFECT, STRONG, WEAK, threshold=0.5),
    ):
        with pytest.raises(NoGapError, match=r"0\.700"):
            call()
    with pytest.raises(ValueError, match="no prompts"):
        cost_quality_curve(np.zeros(0), np.zeros(0), np.zeros(0))


@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.95, 1.0])
def test_chosen_threshold_recovers_the_share_at_least_cost(fraction: float) -> None:
    rng = np.random.default_rng(2)
    gain = rng.random(3000)
    weak = np.full(3000, 0.0)
    strong = (rng.random(3000) < gain).astype(np.float64)
    threshold = choose_threshold(gain, weak, strong, fraction)
    is_strong = 1.0 - gain < threshold
    recovered = np.where(is_strong, strong, weak).mean() / strong.mean()
    assert recovered == pytest.approx(fraction, abs=0.005)
    assert is_strong.mean() == pytest.approx(1.0 - np.sqrt(1.0 - fraction), abs=0.05)


def test_no_gap_no_large_model() -> None:
    assert choose_threshold(PERFECT, STRONG, WEAK, 0.95) == 0.0
