"""The host's work beside passes, learnt from whole steps."""

import numpy as np
import pytest

from outrider.draft.budget.host_times import HostTimes, RunningTimes, StepShape
from tests.engines import fixed_budget

PASSES_S = 0.010


def observe(times: HostTimes, num_parts: int, seconds: float, *, number: int = 1) -> None:
    """Steps enough to be believed."""
    shape = StepShape(num_sequences=number, passes_s=PASSES_S, num_parts=num_parts)
    for _ in range(100):
        times.observe(shape, PASSES_S + seconds)


def test_nothing_is_known_at_first() -> None:
    times = HostTimes()
    assert (times.plain(3), times.part(3), times.part.most(3)) == (0.0, 0.0, 0.0)


def test_levels_and_trees_share_what_a_step_takes_beside_a_plain_one() -> None:
    times = HostTimes()
    observe(times, 0, 0.0002)
    observe(times, 4, 0.0014)  # three levels and the trees
    assert times.plain(1) == pytest.approx(0.0002, rel=0.01)
    assert times.part(1) == pytest.approx(0.0003, rel=0.01)


def test_before_the_first_plain_step_any_work_counts_as_one_part_more() -> None:
    times = HostTimes()
    observe(times, 3, 0.0008)
    assert times.plain(1) == pytest.approx(0.0002, rel=0.01)
    assert times.part(1) == pytest.approx(0.0002, rel=0.01)
    observe(times, 0, 0.0005)
    assert times.plain(1) == pytest.approx(0.0005, rel=0.01)


def test_the_nearest_number_of_sequences_stands_for_unknown_ones() -> None:
    times = HostTimes()
    observe(times, 0, 0.0001)
    observe(times, 0, 0.0008, number=8)
    found = [times.plain(number) for number in (1, 2, 8, 40)]
    assert found == pytest.approx([0.0001, 0.0001, 0.0008, 0.0008], rel=0.01)


def test_what_a_crowd_takes_counts_for_few_as_their_share_and_for_a_few_steps() -> None:
    """It may be an error of large passes, in which a lone client's whole step would vanish."""
    times = HostTimes()
    observe(times, 0, 0.004, number=64)
    assert times.plain(1) == pytest.approx(0.004 / 64, rel=0.01)
    times = HostTimes()
    observe(times, 0, 0.0001)
    observe(times, 0, 0.004, number=16)
    for _ in range(4):
        times.observe(StepShape(num_sequences=4, passes_s=PASSES_S), PASSES_S + 0.0003)
    assert times.plain(4) == pytest.approx(0.0003, rel=0.2)


def test_one_step_says_little_however_long_it_was_held_up() -> None:
    times = HostTimes()
    observe(times, 0, 0.0002)
    times.observe(StepShape(num_sequences=1, passes_s=PASSES_S), 10.0)
    assert times.plain(1) == pytest.approx(0.0002 + 0.05 * PASSES_S, rel=0.01)
    observe(times, 0, 0.0002)
    assert times.plain(1) == pytest.approx(0.0002, rel=0.01)


def test_passes_that_are_faster_than_expected_make_no_work_negative() -> None:
    times = HostTimes()
    observe(times, 0, -0.002)
    assert times.plain(1) == 0.0


def test_what_varies_is_counted_at_a_standard_error_more() -> None:
    steady, varying = RunningTimes(), RunningTimes()
    for number in range(200):
        steady.observe(1, 0.001, bound_s=1.0)
        varying.observe(1, 0.002 * (number % 2), bound_s=1.0)
    assert steady.most(1) == pytest.approx(steady(1), rel=0.01)
    assert varying.most(1) == pytest.approx(varying(1) + 0.00023, rel=0.1)


def test_dearer_levels_make_fewer_worth_their_time() -> None:
    budget = fixed_budget(target=0.02, row=0.0, draft=0.0001)

    def is_worth(part_host_s: float) -> bool:
        step = budget.of_step(num_sequences=1, context=0, base_tokens=3.0, part_host_s=part_host_s)
        return step.is_worth_a_pass(np.empty(0), tokens_gained=0.03, num_rows=1, num_trees=1)

    assert is_worth(0.0)
    assert not is_worth(0.0005)
