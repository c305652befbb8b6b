from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.router.calibration import (
    ALWAYS_LARGE,
    CalibrationError,
    CalibrationTarget,
    OperatingPoint,
    StageRows,
    calibrate,
    measure,
    request_costs,
    request_seconds,
    split,
)
from outrider.router.costs import TokenPrices
from outrider.verifier.params import Tier
from tests.router.staged import staged_rows

GAP = CalibrationTarget(recovered_gap=0.95)
PRICES: dict[Tier, TokenPrices] = {
    "small": TokenPrices(prompt=1.0, cached_prompt=0.0, completion=2.0),
    "large": TokenPrices(prompt=10.0, cached_prompt=0.0, completion=20.0),
}
# Coarse values, so that ties and equal stages happen.
QUALITIES = st.lists(
    st.tuples(*(st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0, 1.3]) for _ in range(2))),
    min_size=1,
    max_size=300,
)


def rows_of(text: list[float], answer: list[float] | None, seed: int = 0) -> StageRows:
    rng = np.random.default_rng(seed)
    num_rows = len(text)
    return StageRows(
        text=np.array(text),
        prompt=np.array(text),
        answer=None if answer is None else np.array(answer),
        weak=rng.integers(0, 2, num_rows).astype(np.float64),
        strong=rng.integers(0, 2, num_rows).astype(np.float64),
    )


@given(QUALITIES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_family_goes_from_always_small_to_always_large_and_is_nested(
    qualities: list[tuple[float, float]], has_answer: bool
) -> None:
    text, answer = ([row[place] for row in qualities] for place in (0, 1))
    rows = rows_of(text, answer if has_answer else None)
    points = calibrate(rows, GAP).points
    assert (points[0].strong_share, points[-1].strong_share) == (1.0, 0.0)
    assert points[0].accuracy == rows.strong.mean()
    assert points[-1].accuracy == rows.weak.mean()
    before = np.ones(len(rows.text), dtype=np.bool_)
    for point in points:
        is_strong, _ = split(rows, point.threshold, point.band)
        assert not (is_strong & ~before).any()
        before = is_strong
        assert point == measure(rows, point.threshold, point.band)
        assert (point.band is not None) == has_answer
    assert len({point.strong_share for point in points}) == len(points) <= 103


@pytest.mark.slow
@given(QUALITIES)
@settings(max_examples=150, deadline=None)
def test_outside_the_band_the_answer_would_overrule_few(
    qualities: list[tuple[float, float]],
) -> None:
    text, answer = (np.array([row[place] for row in qualities]) for place in (0, 1))
    for point in calibrate(rows_of(text.tolist(), answer.tolist()), GAP).points:
        assert point.band is not None
        low, high = point.band
        clipped, stands = np.clip(text, 0, 1), np.clip(answer, 0, 1) >= point.threshold
        above = (clipped >= high) & ~stands
        below = (clipped < low) & stands
        assert low <= high
        # Where the band is empty, it is so because some cut is overruled seldom from either side.
        assert above.sum() + below.sum() < 0.02 * len(text)


def test_a_band_is_no_wider_than_it_must_be() -> None:
    # Text and answer agree but for the middle fifth.
    text = np.linspace(0.0, 1.0, 1001)
    answer = np.where(np.abs(text - 0.5) < 0.1, 1.0 - text, text)
    rows = rows_of(text.tolist(), answer.tolist())
    point = next(p for p in calibrate(rows, GAP).points if p.threshold <= 0.5)
    assert point.band is not None
    assert point.band == pytest.approx((0.41, 0.59), abs=0.011)
    assert point.watched_share == pytest.approx(0.18, abs=0.02)


def test_a_threshold_lies_in_the_middle_of_a_gap() -> None:
    rows = rows_of([0.1] * 50 + [0.9] * 50, None)
    assert calibrate(rows, CalibrationTarget(strong_share=0.5)).chosen.threshold == pytest.approx(
        0.5
    )
    # Neighbouring numbers have no middle: the cut still parts them.
    above = float(np.nextafter(0.5, 1.0))
    close = calibrate(rows_of([0.5] * 50 + [above] * 50, None), CalibrationTarget(strong_share=0.5))
    assert (close.chosen.strong_share, close.chosen.threshold) == (0.5, above)


def test_text_alone_has_no_band_and_the_probe_has_one() -> None:
    text_only = staged_rows(400, has_prompt=False, has_answer=False)
    calibration = calibrate(text_only, GAP)
    assert calibration.stage == "text"
    assert {point.band for point in calibration.points} == {None}
    assert {point.watched_share for point in calibration.points} == {0.0}
    probed = calibrate(staged_rows(400, has_answer=False), GAP)
    assert probed.stage == "prompt"
    assert any(point.watched_share > 0.3 for point in probed.points)


def test_about_a_hundred_settings_and_deciles() -> None:
    rng = np.random.default_rng(3)
    rows = rows_of(rng.random(3000).tolist(), rng.random(3000).tolist())
    calibration = calibrate(rows, GAP)
    assert 90 <= len(calibration.points) <= 103
    shares = [point.strong_share for point in calibration.points]
    assert max(np.diff(sorted(shares))) < 0.03
    assert calibration.quality_deciles == pytest.approx(np.linspace(0, 1, 11), abs=0.03)
    assert calibration.chosen in calibration.points
    # With so many rows the bounds of the band leave a choice, which must not cost the ends.
    assert (calibration.points[-1].strong_share, calibration.points[0].strong_share) == (0.0, 1.0)


@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.95, 1.0])
def test_recovered_gap_at_the_least_share(fraction: float) -> None:
    rng = np.random.default_rng(2)
    gain = rng.random(3000)
    rows = StageRows(
        text=1.0 - gain,
        prompt=1.0 - gain,
        answer=None,
        weak=np.zeros(3000),
        strong=(rng.random(3000) < gain).astype(np.float64),
    )
    chosen = calibrate(rows, CalibrationTarget(recovered_gap=fraction)).chosen
    recovered = chosen.accuracy / rows.strong.mean()
    assert fraction <= recovered + 1e-9 <= fraction + 0.03
    # Gains are uniform: the share s recovers 1 - (1 - s) ** 2.
    assert chosen.strong_share == pytest.approx(1.0 - np.sqrt(1.0 - fraction), abs=0.06)


def test_no_gap_no_large_model() -> None:
    rows = staged_rows(200)
    chosen = calibrate(replace(rows, strong=rows.weak), GAP).chosen
    assert (chosen.threshold, chosen.strong_share, chosen.relative_accuracy) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_strong_share_is_met_from_below(share: float) -> None:
    rng = np.random.default_rng(4)
    rows = rows_of(rng.random(2000).tolist(), None)
    chosen = calibrate(rows, CalibrationTarget(strong_share=share)).chosen
    assert share - 0.015 < chosen.strong_share <= share
    if share == 1.0:
        assert chosen.threshold == ALWAYS_LARGE


def test_a_constant_router_cannot_share() -> None:
    rows = rows_of([0.5] * 50, None)
    assert calibrate(rows, CalibrationTarget(strong_share=0.9)).chosen.strong_share == 0.0


def test_quality_is_relative_to_always_large() -> None:
    rows = staged_rows(2000)
    cheap, dear = (calibrate(rows, CalibrationTarget(quality=q)).chosen for q in (0.8, 0.97))
    assert cheap.relative_accuracy >= 0.8
    assert dear.relative_accuracy >= 0.97
    assert cheap.strong_share < dear.strong_share < 1.0
    assert dear.accuracy == pytest.approx(dear.relative_accuracy * rows.strong.mean())
    with pytest.raises(CalibrationError, match=r"no setting reaches 1\.500.*best one reaches 1\.0"):
        calibrate(rows, CalibrationTarget(quality=1.5))


def test_a_large_model_that_is_never_right_divides_nothing() -> None:
    rows = staged_rows(100)
    chosen = calibrate(replace(rows, strong=np.zeros(100)), CalibrationTarget(quality=1.0)).chosen
    assert (chosen.strong_share, chosen.relative_accuracy) == (0.0, 1.0)


def test_later_stages_give_more_at_the_same_share() -> None:
    target = CalibrationTarget(strong_share=0.45)
    accuracies = [
        calibrate(rows, target).chosen.accuracy
        for rows in (
            staged_rows(4000, has_prompt=False, has_answer=False),
            staged_rows(4000, has_answer=False),
            staged_rows(4000),
        )
    ]
    assert accuracies == sorted(accuracies)
    assert accuracies[2] > accuracies[0] + 0.05


def test_costs_by_hand() -> None:
    rows = StageRows(
        text=np.array([0.9, 0.5, 0.5, 0.1]),
        prompt=np.array([0.9, 0.5, 0.5, 0.1]),
        answer=np.array([0.0, 0.8, 0.2, 1.0]),
        weak=np.ones(4),
        strong=np.ones(4),
        hold_back_tokens=16,
        num_prompt_tokens=np.full(4, 1e6),
        num_weak_tokens=np.array([1e6, 1e6, 64.0, 1e6]),
        num_strong_tokens=np.full(4, 1e6),
        weak_s=np.full(4, 2.0),
        strong_s=np.full(4, 5.0),
    )
    point = measure(rows, 0.6, (0.3, 0.7))
    assert (point.strong_share, point.watched_share) == (0.5, 0.5)
    small, large = 1.0 + 2.0, 10.0 + 20.0
    # Small at once; watched and kept; watched and escalated after 16 tokens; large at once.
    expected = [small, small, 1.0 + 2.0 * 16e-6 + large, large]
    assert request_costs(rows, point, PRICES) == pytest.approx(expected, rel=1e-9)
    assert request_seconds(rows, point) == pytest.approx([2.0, 2.0, 2.0 * 16 / 64 + 5.0, 5.0])
    short = replace(rows, num_weak_tokens=np.full(4, 10.0))
    assert request_costs(short, point, PRICES)[2] == pytest.approx(31.0 + 2e-5, rel=1e-9)
    assert request_seconds(short, point)[2] == pytest.approx(2.0 + 5.0)


def test_max_cost_buys_the_best_accuracy_within_it() -> None:
    rows = staged_rows(2000)
    points = calibrate(rows, GAP).points
    mean_costs = [float(request_costs(rows, point, PRICES).mean()) for point in points]
    limit = (min(mean_costs) + max(mean_costs)) / 2
    chosen = calibrate(rows, CalibrationTarget(max_cost_usd=limit, prices=PRICES)).chosen
    assert float(request_costs(rows, chosen, PRICES).mean()) <= limit
    affordable = [p for p, cost in zip(points, mean_costs, strict=True) if cost <= limit]
    assert chosen.accuracy == max(point.accuracy for point in affordable)
    with pytest.raises(CalibrationError, match="the cheapest costs"):
        calibrate(rows, CalibrationTarget(max_cost_usd=min(mean_costs) / 2, prices=PRICES))


def test_a_cost_target_names_missing_settings() -> None:
    bare = staged_rows(100, has_costs=False)
    with pytest.raises(CalibrationError, match="prompt_tokens"):
        calibrate(bare, CalibrationTarget(max_cost_usd=1.0, prices=PRICES))
    with pytest.raises(CalibrationError, match="prices of both tiers"):
        CalibrationTarget(max_cost_usd=1.0)
    with pytest.raises(CalibrationError, match="weak_s"):
        request_seconds(bare, measure(bare, 0.5))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {},
            "exactly one of recovered_gap, strong_share, quality, max_cost_usd, max_seconds, "
            "not none",
        ),
        ({"strong_share": 0.3, "quality": 0.9}, "not strong_share, quality"),
        ({"strong_share": 1.2}, r"strong_share=1\.2 must be"),
        ({"recovered_gap": 0.0}, r"recovered_gap=0\.0 must be above 0"),
        ({"quality": float("nan")}, "quality=nan"),
    ],
)
def test_targets_are_checked(fields: dict[str, float], why: str) -> None:
    with pytest.raises(CalibrationError, match=why):
        CalibrationTarget(
            recovered_gap=fields.get("recovered_gap"),
            strong_share=fields.get("strong_share"),
            quality=fields.get("quality"),
        )


def test_rows_are_checked() -> None:
    rows = staged_rows(10)
    with pytest.raises(ValueError, match=r"weak has shape \[9\], not \[10\]"):
        replace(rows, weak=np.zeros(9))
    with pytest.raises(ValueError, match="answer holds values that are not finite"):
        replace(rows, answer=np.full(10, np.nan))
    with pytest.raises(ValueError, match="no prompts"):
        rows_of([], None)


def test_without_the_last_stage_a_band_falls_back_on_the_one_before() -> None:
    rows = staged_rows(500)
    chosen: OperatingPoint = calibrate(rows, GAP).chosen
    bare = replace(rows, answer=None)
    is_strong, is_watched = split(bare, chosen.threshold, chosen.band)
    assert (is_strong[is_watched] == (rows.prompt[is_watched] < chosen.threshold)).all()
