import logging
import random
from typing import Any

import pytest

from outrider.router.dial import Dial, Setting
from outrider.router.guard import Autopilot, GuardOutcome, RouteGuard
from tests.router.routers import table

DECILES = [i / 10 for i in range(11)]


def guard_of(
    share: float | None = 0.5, *, autopilot: Autopilot | None = None, deciles: Any = DECILES
) -> RouteGuard:
    setting = Setting(threshold=0.5, strong_share=share)
    return RouteGuard(
        current_setting=lambda: setting if autopilot is None else autopilot.setting,
        deciles=deciles,
        autopilot=autopilot,
        clock=lambda: 0.0,
    )


def feed(guard: RouteGuard, qualities: list[float], threshold: float = 0.5) -> None:
    for quality in qualities:
        guard.saw(GuardOutcome(quality=quality, is_strong=quality < threshold))


def uniform(count: int, seed: int = 0, low: float = 0.0, high: float = 1.0) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(low, high) for _ in range(count)]


def test_nothing_is_known_at_first() -> None:
    numbers = guard_of().numbers()
    assert (numbers.num_outcomes, numbers.strong_share, numbers.quality_shift) == (0, None, None)
    assert not numbers.is_drifting


def test_as_calibrated_is_no_drift() -> None:
    guard = guard_of()
    feed(guard, uniform(1000))
    numbers = guard.numbers()
    assert numbers.strong_share == pytest.approx(0.5, abs=0.05)
    assert numbers.quality_shift is not None
    assert numbers.quality_shift < 0.05
    assert not numbers.is_drifting


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (0.4, 0.6), (0.5, 1.0)])
def test_other_prompts_are_a_drift_that_is_logged_once(
    low: float, high: float, caplog: pytest.LogCaptureFixture
) -> None:
    guard = guard_of()
    with caplog.at_level(logging.WARNING, "outrider.router.guard"):
        feed(guard, uniform(1000, low=low, high=high))
    numbers = guard.numbers()
    assert numbers.quality_shift is not None
    assert numbers.quality_shift > 0.25
    assert numbers.is_drifting
    (record,) = caplog.records
    assert "routing drifts" in record.message
    assert "quality_shift=" in record.message


def test_a_share_that_is_off_is_a_drift_without_any_deciles() -> None:
    guard = guard_of(0.2, deciles=None)
    feed(guard, uniform(400))
    numbers = guard.numbers()
    assert numbers.quality_shift is None
    assert numbers.is_drifting
    few = guard_of(0.2, deciles=None)
    feed(few, uniform(20))
    assert not few.numbers().is_drifting  # too early to say


def test_equal_deciles_are_one_bin() -> None:
    # Half of the prompts had a quality of exactly 1.
    deciles = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    guard = guard_of(None, deciles=deciles)
    feed(guard, [1.0] * 500 + uniform(500))
    shift = guard.numbers().quality_shift
    assert shift is not None
    assert shift < 0.05


def test_the_window_forgets() -> None:
    guard = guard_of()
    feed(guard, uniform(2000, low=0.0, high=0.3))
    feed(guard, uniform(1024))
    assert not guard.numbers().is_drifting


def test_escalated_answers_are_held_against_what_was_written_again() -> None:
    guard = guard_of()
    assert guard.numbers().escalated_agreement is None
    guard.saw_escalated(0.4, 0.9)
    guard.saw_escalated(0.2, 0.5)
    numbers = guard.numbers()
    assert numbers.escalated_confidence == pytest.approx(0.3)
    assert numbers.escalated_agreement == pytest.approx(0.7)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.8])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.3), (0.6, 1.0)])
def test_the_autopilot_keeps_the_share_when_other_prompts_come(
    share: float, low: float, high: float
) -> None:
    autopilot = Autopilot(share, Setting(threshold=0.5))
    guard = guard_of(autopilot=autopilot, deciles=None)
    for quality in uniform(3000, low=low, high=high):
        is_strong = quality < autopilot.setting.threshold
        guard.saw(GuardOutcome(quality=quality, is_strong=is_strong))
    assert guard.numbers().strong_share == pytest.approx(share, abs=0.06)


@pytest.mark.slow_cases
@pytest.mark.parametrize("share", [0.15, 0.5, 0.85])
def test_the_autopilot_turns_a_cascade_along_its_table(share: float) -> None:
    dial = Dial(table())
    autopilot = Autopilot(share, dial.chosen, dial)
    guard = guard_of(autopilot=autopilot)
    rng = random.Random(3)
    for _ in range(4000):
        # Other prompts than in the table, and a watch that thinks more of them than the text.
        quality = rng.uniform(0.0, 0.6)
        confidence = min(quality + rng.uniform(0.0, 0.3), 1.0)
        setting = autopilot.setting
        assert setting.band is not None
        low, high = setting.band
        is_watched = low <= quality < high
        is_strong = quality < low or (is_watched and confidence < setting.threshold)
        guard.saw(
            GuardOutcome(
                quality=quality,
                is_strong=is_strong,
                confidence=confidence if is_watched else None,
            )
        )
    assert guard.numbers().strong_share == pytest.approx(share, abs=0.06)


def test_an_autopilot_needs_a_share() -> None:
    with pytest.raises(ValueError, match=r"target_share=1\.5"):
        Autopilot(1.5, Setting(threshold=0.5))
