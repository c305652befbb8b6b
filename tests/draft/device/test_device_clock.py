"""What steps take beside their passes where trees grow on the device, and what follows from it."""

import numpy as np
import pytest

from outrider.draft.budget.budget import DraftGain, TreeBudget
from outrider.draft.budget.level_host_times import LevelHostTimes
from outrider.draft.device.device_clock import LevelClock, StepClock
from outrider.draft.device.device_growth import DeviceGrowth
from outrider.draft.forecast import Grower, TreeForecast, num_levels, share_nodes
from tests.engine.passes.test_pass_clock import FakeDevice
from tests.engines import (
    drafter_of,
    fixed_budget,
    make_engine,
    make_request,
    random_prompt,
    serve,
    tiny_pair,
)

# Recorded shape of an 8B and a 0.6B model on one GPU: milliseconds of the passes in their graphs,
# of what surrounds a level (ranking, tree kernels, the host's gap) and of what surrounds a step.
LARGE_S, LARGE_ROW_S = 4.95e-3, 4e-6
SMALL_S, LEVEL_BESIDE_S, STEP_BESIDE_S = 1.15e-3, 0.3e-3, 0.4e-3


def recorded_budget() -> TreeBudget:
    return fixed_budget(target=LARGE_S, row=LARGE_ROW_S, draft=SMALL_S)


def test_levels_are_timed_in_the_devices_queue_without_waiting() -> None:
    device, times = FakeDevice(), LevelHostTimes()
    clock = LevelClock(times, device.make_event)  # type: ignore[arg-type]
    for _ in range(3):  # levels of 1.15 ms and 0.3 ms beside
        clock.begin_level(num_trees=4, pass_s=SMALL_S)
        device.queued_ms += 1.45
    clock.end()
    clock.end()  # nothing is open
    clock.poll()
    assert times(4) == 0.0
    device.run(3.0)  # the first two are over
    clock.poll()
    assert times(4) == pytest.approx(LEVEL_BESIDE_S)
    device.run(100.0)
    device.queued_ms = 200.0  # a large pass is no part of a level
    clock.poll()
    clock.begin_level(num_trees=4, pass_s=SMALL_S)
    clock.poll()
    assert times(4) == pytest.approx(LEVEL_BESIDE_S)
    assert device.num_waits == 0


def test_steps_of_the_same_sequences_tell_what_is_beside_their_passes() -> None:
    now_s = [0.0]
    clock = StepClock(lambda: now_s[0])

    def step(ids: list[str], seconds: float, expected_s: float | None) -> None:
        clock.begin(ids)
        if expected_s is not None:
            clock.expect(expected_s)
        now_s[0] += seconds

    step(["a", "b"], 8.0, 7.5)
    step(["a", "b"], 8.0, 7.5)
    assert clock.times(2) == pytest.approx(0.5)
    step(["a"], 3.0, 2.0)
    clock.break_off()  # steps without guesses follow
    now_s[0] += 90.0
    step(["a"], 3.0, None)
    step(["a"], 3.0, None)
    assert clock.times(2) == clock.times(1) == pytest.approx(0.5)


@pytest.mark.parametrize("num_sequences", [3, 8])
def test_at_recorded_times_streams_in_company_get_more_than_the_root(num_sequences: int) -> None:
    """With all that a level takes in the budget, the stretch alone would rule drafts out."""
    step = recorded_budget().of_step(
        num_sequences=num_sequences,
        context=1000.0,
        base_tokens=num_sequences,
        level_host_s=LEVEL_BESIDE_S,
        beside_s=STEP_BESIDE_S,
    )
    # By the stretch the root's level and no other.
    assert STEP_BESIDE_S + LARGE_S + 2 * step.level_s(4) > 1.3 * (LARGE_S + STEP_BESIDE_S)
    gains = [DraftGain(acceptance=0.8)] * num_sequences
    assert step.num_worth_drafting(gains, np.empty(0), 8) == num_sequences
    forecast = TreeForecast()
    forecast.by_rank[:] = forecast.by_depth[:] = 0.8 ** np.arange(1.0, len(forecast.by_rank) + 1)
    growers = [Grower(forecast=forecast, urgency=1.0, max_depth=8, max_nodes=32)] * num_sequences
    root_s = step.level_s(num_sequences)
    number = num_levels(growers, step, width=4, spent_s=root_s, min_gain=0.05)
    assert number >= 2
    spent_s = root_s + number * step.level_s(4 * num_sequences)
    num_nodes, _ = share_nodes(growers, np.empty(0), step, spent_s=spent_s)
    assert num_nodes >= 3 * num_sequences
    # Nothing comes for nothing: ten times as much beside each level leaves fewer of them.
    dear = recorded_budget().of_step(
        num_sequences=num_sequences, context=1000.0, base_tokens=num_sequences,
        level_host_s=10 * LEVEL_BESIDE_S, beside_s=STEP_BESIDE_S,
    )  # fmt: skip
    assert num_levels(growers, dear, width=4, spent_s=root_s, min_gain=0.05) < number


def test_what_is_beside_every_step_makes_a_level_dearer_by_less() -> None:
    """A step that takes long anyway has more use for a level."""

    def levels(beside_s: float) -> int:
        step = recorded_budget().of_step(
            num_sequences=1, context=0.0, base_tokens=1.0,
            level_host_s=LEVEL_BESIDE_S, beside_s=beside_s,
        )  # fmt: skip
        grower = Grower(forecast=TreeForecast(), urgency=1.0, max_depth=8, max_nodes=32)
        return num_levels([grower], step, width=4, spent_s=step.level_s(1), min_gain=0.05)

    assert levels(0.0) < levels(0.03)


def test_a_drafter_learns_both_while_it_serves() -> None:
    # Swift, so that all that the clock shows is beside passes; and worth a draft in every step.
    budget = fixed_budget(target=1e-6, row=0.0, draft=1e-9)
    engine = make_engine(tiny_pair(drift=0.0), on_device=True, budget=budget)
    drafter = drafter_of(engine)
    growth = drafter._last["small"]
    assert isinstance(growth, DeviceGrowth)
    serve(engine, [make_request("r", random_prompt(6), max_tokens=60)])
    assert growth.beside_s(1) > 0.0
    assert drafter._growths["small"].host_times(1) > 0.0
