"""Pass times on disk: taken where they hold, ignored where they are wrong, never an error."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.passes import step_times
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.passes.saved_times import SavedTimes
from outrider.engine.passes.step_times import StepTimeCurve, follow_step_times
from tests.engines import tiny_pair

CURVE = StepTimeCurve(num_rows=(1, 2, 8), seconds=(0.1, 0.1, 0.3), context=4.0, row_context_s=1e-6)


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(model=tiny_pair().small, num_blocks=16, block_size=16)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """Runners that were measured; each measurement gives `CURVE`."""
    found: list[ModelRunner] = []

    def profile(runner: ModelRunner, **_: object) -> StepTimeCurve:
        found.append(runner)
        return CURVE

    monkeypatch.setattr(step_times, "profile_step_times", profile)
    monkeypatch.setattr(step_times, "warm_up_passes", lambda _: {1: 0.1, 2: 0.1, 8: 0.3})
    return found


def test_a_second_start_does_not_measure(
    runner: ModelRunner, measured: list[ModelRunner], tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "outrider"
    for _ in range(2):
        times = follow_step_times(runner, saved=SavedTimes(folder, {}))
        assert times(8) == pytest.approx(0.3, rel=0.01)
    assert measured == [runner]
    assert runner.pool.num_used == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o077 for path in folder.iterdir()] == [0]


@pytest.mark.parametrize("seconds", [(0.08, 0.2, 0.6), (0.08, 0.1, 0.6), (0.08, 0.2, 0.3)])
def test_times_that_one_pass_beats_are_measured_anew_and_the_faster_kept(
    seconds: tuple[float, ...], runner: ModelRunner, measured: list[ModelRunner], tmp_path: Path
) -> None:
    saved = SavedTimes(tmp_path, {})
    saved.save(runner, replace(CURVE, seconds=seconds))
    assert follow_step_times(runner, saved=saved)(8) == pytest.approx(0.3, rel=0.01)
    assert measured == [runner]
    assert saved.load(runner) == replace(CURVE, seconds=(0.08, 0.1, 0.3))


def test_a_machine_that_is_slower_today_is_believed_and_the_fast_times_are_kept(
    runner: ModelRunner, measured: list[ModelRunner], tmp_path: Path
) -> None:
    saved, fast = SavedTimes(tmp_path, {}), replace(CURVE, seconds=(0.05, 0.05, 0.15))
    saved.save(runner, fast)
    times = follow_step_times(runner, saved=saved)
    assert times(1) > 1.1 * 0.05
    assert times(8) > 1.1 * 0.15
    assert (measured, saved.load(runner)) == ([], fast)


def test_other_conditions_are_measured_anew(
    runner: ModelRunner, measured: list[ModelRunner], tmp_path: Path
) -> None:
    large = ModelRunner(model=tiny_pair().large, num_blocks=16, block_size=16)
    follow_step_times(runner, saved=SavedTimes(tmp_path, {"deterministic": False}))
    follow_step_times(runner, saved=SavedTimes(tmp_path, {"deterministic": True}))
    follow_step_times(large, saved=SavedTimes(tmp_path, {"deterministic": False}))
    assert len(measured) == 3


def test_times_of_a_busy_machine_are_measured_at_every_start_until_one_is_quiet(
    runner: ModelRunner, measured: list[ModelRunner], tmp_path: Path
) -> None:
    saved = SavedTimes(tmp_path, {})
    saved.save(runner, replace(CURVE, seconds=(0.09, 0.2, 0.6), is_quiet=False))
    for _ in range(2):
        follow_step_times(runner, saved=saved)
    assert len(measured) == 1
    assert saved.load(runner) == replace(CURVE, seconds=(0.09, 0.1, 0.3))


def test_a_beaten_curve_is_quiet_only_if_it_is_so_when_measured_anew() -> None:
    later = replace(CURVE, seconds=(0.2, 0.2, 0.2), is_quiet=False)
    assert CURVE.fastest(later) == replace(CURVE, seconds=(0.1, 0.1, 0.2), is_quiet=False)
    assert later.fastest(CURVE).is_quiet


def test_a_measurement_says_whether_the_processor_was_its_own(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = SavedTimes(tmp_path, {})
    for share, is_quiet in ((1e9, False), (0.0, True)):
        monkeypatch.setattr(step_times, "_QUIET_SHARE", share)
        follow_step_times(runner, saved=saved)
        curve = saved.load(runner)
        assert curve is not None
        assert curve.is_quiet is is_quiet


GOOD: dict[str, Any] = {
    "num_rows": [1, 2],
    "seconds": [0.1, 0.2],
    "context": 1.0,
    "row_context_s": 0.0,
    "is_quiet": True,
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        *(
            json.dumps(GOOD | changes)
            for changes in (
                {"num_rows": [1]},
                {"num_rows": [2, 1]},
                {"num_rows": [1, 1]},
                {"num_rows": [0, 1]},
                {"num_rows": [1, 2.5]},
                {"num_rows": [True, 2]},
                {"num_rows": None},
                {"seconds": [0.2, 0.1]},
                {"seconds": [0.0, 0.1]},
                {"seconds": [0.1, float("inf")]},
                {"seconds": [0.1, float("nan")]},
                {"seconds": ["0.1", "0.2"]},
                {"context": -1.0},
                {"row_context_s": -1e-6},
                {"row_context_s": None},
                {"is_quiet": 1},
            )
        ),
    ],
)
def test_a_wrong_file_is_replaced(
    text: str, runner: ModelRunner, measured: list[ModelRunner], tmp_path: Path
) -> None:
    saved = SavedTimes(tmp_path, {})
    saved.save(runner, CURVE)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    follow_step_times(runner, saved=saved)
    assert len(measured) == 1
    assert saved.load(runner) == CURVE


def test_a_folder_that_cannot_be_made_costs_a_measurement(
    runner: ModelRunner, measured: list[ModelRunner], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    follow_step_times(runner, saved=SavedTimes(tmp_path / "file" / "cache", {}))
    assert len(measured) == 1
