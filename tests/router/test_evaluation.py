from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.router.calibration import CalibrationTarget, StageRows, calibrate
from outrider.router.evaluation import (
    NoGapError,
    _Order,
    apgr,
    calibration_bins,
    cost_quality_curve,
    evaluate,
)
from tests.router.staged import staged_rows

# 10 prompts; the large model wins the first 3, loses the last, the rest are ties.
WEAK = np.array([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=np.float64)
STRONG = np.array([1, 1, 1, 1, 1, 1, 0, 0, 1, 0], dtype=np.float64)
PERFECT = STRONG - WEAK


def cpts_of(gain: np.ndarray) -> tuple[float, float]:
    """CPT(50 %) and CPT(80 %) of a text stage that expects this gain."""
    quality = 1.0 - gain
    rows = StageRows(text=quality, prompt=quality, answer=None, weak=WEAK, strong=STRONG)
    stage = evaluate(rows, threshold=0.5, num_resamples=2).stages["text"]
    return stage.cpt50.value, stage.cpt80.value


def test_curve_of_a_perfect_router_by_hand() -> None:
    curve = cost_quality_curve(PERFECT, WEAK, STRONG)
    expected = [0.5, 0.6, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.7]
    assert curve == pytest.approx(expected)
    area = sum((a + b) / 2 * 0.1 for a, b in pairwise(expected))
    assert apgr(PERFECT, WEAK, STRONG) == pytest.approx((area - 0.5) / 0.2)


def test_cpt_by_hand() -> None:
    # The gap is 0.2: half of it is won by the first prompt, 80 % after 1.6 prompts.
    assert cpts_of(PERFECT) == pytest.approx((0.1, 0.16))


def test_a_constant_score_is_random() -> None:
    constant = np.zeros(10)
    assert apgr(constant, WEAK, STRONG) == pytest.approx(0.5)
    assert cpts_of(constant) == pytest.approx((0.5, 0.8))


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


def test_weights_are_copies() -> None:
    """What the bootstrap does is the same as evaluating the drawn rows themselves."""
    rng = np.random.default_rng(5)
    gain = rng.integers(0, 4, 60) / 4.0
    weak, strong = (rng.integers(0, 2, 60).astype(np.float64) for _ in range(2))
    drawn = rng.integers(0, 60, 60)
    counts = np.bincount(drawn, minlength=60)
    curve = _Order(gain, weak, strong).curve(counts)
    assert curve == pytest.approx(cost_quality_curve(gain[drawn], weak[drawn], strong[drawn]))


def test_report_sets_the_router_between_its_bounds() -> None:
    rows = staged_rows(600)
    chosen = calibrate(rows, CalibrationTarget(recovered_gap=0.9)).chosen
    report = evaluate(rows, threshold=chosen.threshold, band=chosen.band, num_resamples=200)
    assert list(report.stages) == ["text", "prompt", "answer"]
    values = [stage.apgr.value for stage in report.stages.values()]
    assert 0.5 < values[0] < values[1] < values[2] < report.oracle_apgr
    assert report.best_stage is report.stages["answer"]
    for name, stage in report.stages.items():
        gain = 1.0 - rows.quality(name)
        assert stage.apgr.value == pytest.approx(apgr(gain, rows.weak, rows.strong))
        assert stage.apgr.low < stage.apgr.value < stage.apgr.high
        assert stage.cpt50.low <= stage.cpt50.value <= stage.cpt50.high
        assert (stage.curve_low <= stage.curve).all()
        assert (stage.curve <= stage.curve_high).all()
    assert report.setting == chosen
    assert report.setting_accuracy.low < report.setting.accuracy < report.setting_accuracy.high
    assert report.setting_share.low < report.setting.strong_share < report.setting_share.high
    assert report.oracle_accuracy == np.maximum(rows.weak, rows.strong).mean()
    assert report.best_single_accuracy == rows.strong.mean()
    again = evaluate(rows, threshold=chosen.threshold, band=chosen.band, num_resamples=200)
    assert again.best_stage.apgr == report.best_stage.apgr
    assert again.setting_accuracy == report.setting_accuracy


@pytest.mark.slow
def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    truth_rows = staged_rows(60_000, seed=99)
    truth = apgr(1.0 - truth_rows.text, truth_rows.weak, truth_rows.strong)
    hits = 0
    for seed in range(60):
        rows = staged_rows(400, seed=seed, has_prompt=False, has_answer=False)
        report = evaluate(rows, threshold=0.5, num_resamples=100)
        interval = report.stages["text"].apgr
        hits += interval.low <= truth <= interval.high
    assert 52 <= hits <= 60


def test_without_resamples_the_interval_is_a_point() -> None:
    rows = staged_rows(100)
    report = evaluate(rows, threshold=0.5, num_resamples=0)
    figure = report.best_stage.apgr
    assert figure.low == figure.value == figure.high
    assert (report.best_stage.curve_low == report.best_stage.curve).all()


def test_true_qualities_have_no_calibration_error_and_false_ones_do() -> None:
    rows = staged_rows(20_000)
    assert rows.answer is not None
    bins = calibration_bins(rows.answer, rows.weak, rows.strong)
    assert sum(entry.num_prompts for entry in bins) == 20_000
    expected = [entry.expected for entry in bins]
    assert expected == sorted(expected)
    for entry in bins:
        assert entry.observed == pytest.approx(entry.expected, abs=0.04)
    true = evaluate(rows, threshold=0.5, num_resamples=0).best_stage
    assert true.ece < 0.02
    shifted = replace(rows, answer=np.minimum(rows.answer + 0.2, 1.2))
    false = evaluate(shifted, threshold=0.5, num_resamples=0).best_stage
    assert false.ece == pytest.approx(0.2, abs=0.03)


def test_equal_qualities_are_one_bin() -> None:
    bins = calibration_bins(np.full(10, 0.7), WEAK, STRONG)
    (only,) = bins
    assert (only.expected, only.num_prompts) == (pytest.approx(0.7), 10)
    assert only.observed == pytest.approx(0.8)


def test_no_gap_is_refused_with_the_numbers() -> None:
    no_gap = StageRows(text=PERFECT, prompt=PERFECT, answer=None, weak=STRONG, strong=WEAK)
    for call in (
        lambda: apgr(PERFECT, STRONG, STRONG),
        lambda: evaluate(no_gap, threshold=0.5),
    ):
        with pytest.raises(NoGapError, match=r"0\.700"):
            call()
    with pytest.raises(ValueError, match="no prompts"):
        cost_quality_curve(np.zeros(0), np.zeros(0), np.zeros(0))
