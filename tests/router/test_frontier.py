import numpy as np
import pytest

from outrider.router.calibration import ALWAYS_LARGE, CalibrationTarget, Prices, calibrate, measure
from outrider.router.costs import TokenPrices
from outrider.router.frontier import arena_score, average_quality, frontier
from tests.router.staged import staged_rows

PRICES: Prices = {
    "small": TokenPrices(prompt=1.0, cached_prompt=0.0, completion=2.0),
    "large": TokenPrices(prompt=10.0, cached_prompt=0.0, completion=20.0),
}


def test_average_quality_by_hand() -> None:
    # From (0, 0.5) straight to (2, 0.9), then level: the middle point lies below the hull.
    points = [(0.0, 0.5), (1.0, 0.6), (2.0, 0.9), (3.0, 0.7)]
    assert average_quality(points, 0.0, 4.0) == pytest.approx((2 * 0.7 + 2 * 0.9) / 4)
    assert average_quality(points[::-1], 1.0, 2.0) == pytest.approx(0.8)
    assert average_quality([(1.0, 0.4), (1.0, 0.8)], 1.0, 2.0) == pytest.approx(0.8)


def test_arena_score_by_its_definition() -> None:
    # A thousand requests for the geometric mean of the range: half cheap.
    usd = np.sqrt(0.0044 * 200.0) / 1000.0
    assert arena_score(0.8, usd) == pytest.approx(1.1 * 0.8 * 0.5 / (0.1 * 0.8 + 0.5))
    assert arena_score(0.8, 0.0044e-3) == pytest.approx(1.1 * 0.8 / 1.08)
    assert arena_score(0.8, 1e-9) == arena_score(0.8, 0.0044e-3)
    assert arena_score(0.8, 10.0) == 0.0
    assert arena_score(0.0, 10.0) == 0.0


def test_lines_of_single_models_chance_and_oracle() -> None:
    rows = staged_rows(600)
    points = calibrate(rows, CalibrationTarget(recovered_gap=0.95)).points
    found = frontier(rows, points, measure(rows, 0.6, (0.0, ALWAYS_LARGE)), PRICES)
    assert found.small.accuracy == pytest.approx(rows.weak.mean())
    assert found.large.accuracy == pytest.approx(rows.strong.mean())
    assert found.oracle.accuracy == pytest.approx(np.maximum(rows.weak, rows.strong).mean())
    assert found.coin.strong_share == pytest.approx(0.5)
    assert found.coin.accuracy == pytest.approx((found.small.accuracy + found.large.accuracy) / 2)
    assert found.random[0] == found.small
    assert found.random[-1] == found.large
    assert [one.strong_share for one in found.settings] == sorted(
        one.strong_share for one in found.settings
    )
    for one in (found.small, found.large, found.oracle, found.setting):
        assert one.p50_s is not None
        assert one.p95_s is not None
        assert one.p50_s <= one.p95_s
        assert one.arena_score is not None
    chance, router, oracle = (
        found.aiq(which) for which in (found.random, found.settings, (found.oracle,))
    )
    assert chance == pytest.approx(found.coin.accuracy)
    assert chance is not None
    assert router is not None
    assert oracle is not None
    assert chance < router < oracle


def test_what_data_and_prices_lack_is_none() -> None:
    rows = staged_rows(100, has_costs=False)
    bare = frontier(rows, (), measure(rows, 0.5), PRICES)
    assert (bare.setting.cost_usd, bare.setting.p50_s, bare.oracle.p95_s) == (None, None, None)
    assert bare.aiq(bare.random) is None
    assert bare.setting.arena_score is None
    unpriced = frontier(staged_rows(100), (), measure(staged_rows(100), 0.5), None)
    assert unpriced.setting.cost_usd is None
    assert unpriced.setting.p50_s is not None
