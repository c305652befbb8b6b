from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing import bench_router_figures
from benchmarks.routing.bench_router_figures import minus_text, unlike
from outrider.gateway.settings.tree import bundled_pair
from outrider.router.calibration import CalibrationTarget, StageRows, calibrate
from outrider.router.scorer import RouterScorer
from tests.router.routers import scorer_that_says
from tests.router.staged import staged_rows


def weighed_rows() -> StageRows:
    rows = staged_rows(2000)
    ones = np.ones(len(rows.text))
    return replace(rows, small_cost=0.1 * ones, begun_cost=0.05 * ones, large_cost=1.1 * ones)


def test_settings_without_a_watch_are_the_text_and_others_are_compared_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = weighed_rows()
    calibration = calibrate(rows, CalibrationTarget(recovered_gap=0.95))
    monkeypatch.setattr(bench_router_figures, "read_labelled_prompts", lambda path: None)
    monkeypatch.setattr(bench_router_figures, "stage_rows", lambda scorer, data: rows)
    found = minus_text(scorer_that_says(0.5, calibration), Path("labels.jsonl"))
    assert len(found) == len(calibration.points)
    begun = [one for one in found if one["watched_share"] > 0.0]
    assert begun
    assert min(one["difference"].estimate for one in begun) > 0.0
    for one in found:
        if one["watched_share"] == 0.0:
            assert one["difference"].estimate == pytest.approx(0.0, abs=0.02)
    assert max(one["cost"] for one in found) == pytest.approx(1.0)


def test_tasks_of_the_pairs_world_are_like_its_routers_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_router_figures, "_NUM_OWN", 60)
    found = unlike(RouterScorer.load(bundled_pair() / "router"), None)
    assert list(found) == ["own world"]
    assert found["own world"]["share"] < 0.1
