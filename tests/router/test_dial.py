import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.router.calibration import ALWAYS_LARGE
from outrider.router.dial import Dial, Setting, quantile
from tests.router.routers import point, table


@given(st.floats(0.0, 1.0))
def test_a_share_is_interpolated(share: float) -> None:
    setting = Dial(table()).at_share(share)
    assert setting.strong_share == pytest.approx(share)
    assert setting.threshold == pytest.approx(share)
    assert setting.band is not None
    assert setting.band[0] <= setting.threshold <= setting.band[1]


@given(st.floats(0.0, 1.0))
def test_a_quality_is_kept_at_the_least_share(quality: float) -> None:
    setting = Dial(table()).at_quality(quality)
    assert setting.relative_accuracy is not None
    assert setting.strong_share is not None
    assert setting.relative_accuracy >= quality - 1e-9
    # The table: relative accuracy = (0.6 + 0.3 * share) / 0.9.
    needed = max(0.0, (0.9 * quality - 0.6) / 0.3)
    assert setting.strong_share == pytest.approx(needed, abs=1e-9)


def test_a_threshold_brings_its_band_along() -> None:
    setting = Dial(table()).at_threshold(0.55)
    assert setting.threshold == 0.55
    assert setting.band == pytest.approx((0.35, 0.75))
    assert setting.strong_share == pytest.approx(0.55)
    assert Dial(table()).at_threshold(ALWAYS_LARGE).strong_share == 1.0


def test_a_cost_buys_the_largest_share_within_it() -> None:
    dial = Dial(table())

    def cost_usd(setting: Setting) -> float:
        assert setting.strong_share is not None
        return 1.0 + 4.0 * setting.strong_share

    assert dial.at_cost(2.0, cost_usd).strong_share == pytest.approx(0.25)
    assert dial.at_cost(9.0, cost_usd).strong_share == 1.0
    assert dial.at_cost(0.1, cost_usd).strong_share == 0.0  # nothing is cheaper


def test_by_text_keeps_the_share_and_drops_the_band() -> None:
    dial = Dial(table())
    setting = dial.by_text(dial.at_share(0.33))
    assert setting.band is None
    assert setting.threshold == pytest.approx(0.33)
    assert dial.by_text(dial.at_share(1.0)).threshold == ALWAYS_LARGE
    text = Dial(table(stage="text"))
    assert text.by_text(text.chosen) == text.chosen


def test_the_chosen_point_is_there_without_a_table() -> None:
    calibration = table(0.4)
    bare = Dial(type(calibration)(chosen=point(0.4), points=(), stage="answer", quality_deciles=()))
    assert bare.chosen == Dial(calibration).chosen
    assert bare.at_share(0.9).strong_share == 0.4


@given(st.floats(0.0, 3.0), st.floats(0.0, 1.0))
def test_a_gain_factor_moves_both_ways_and_stays_in_range(factor: float, threshold: float) -> None:
    setting = Setting(threshold=threshold, band=(threshold / 2, threshold))
    moved = setting.for_gain_factor(factor)
    assert moved.band is not None
    assert 0.0 <= moved.band[0] <= moved.band[1] <= ALWAYS_LARGE
    assert 0.0 <= moved.threshold <= ALWAYS_LARGE
    if factor > 1.0:
        assert moved.threshold <= setting.threshold + 1e-12
    else:
        assert moved.threshold >= setting.threshold - 1e-12


def test_a_quantile_cuts_off_its_share() -> None:
    values = [i / 100 for i in range(100)]
    for share in (0.0, 0.25, 0.9):
        cut = quantile(values, share)
        assert sum(value < cut for value in values) == pytest.approx(100 * share)
    assert quantile(values, 1.0) == ALWAYS_LARGE
