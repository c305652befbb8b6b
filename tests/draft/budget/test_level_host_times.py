"""The host's work beside a draft pass, learnt by the number of trees."""

import pytest

from outrider.draft.budget.budget import TreeBudget
from outrider.draft.budget.level_host_times import LevelHostTimes
from tests.engines import FixedTimes


def test_nothing_is_known_at_first() -> None:
    assert LevelHostTimes()(3) == 0.0


def test_the_nearest_number_of_trees_stands_for_unknown_ones() -> None:
    times = LevelHostTimes()
    times.observe(1, 0.1)
    times.observe(8, 0.8)
    assert (times(1), times(2), times(8), times(40)) == (0.1, 0.1, 0.8, 0.8)


def test_it_follows_slowly_and_a_held_up_level_says_little() -> None:
    times = LevelHostTimes()
    times.observe(1, 0.001)
    times.observe(1, 10.0)
    assert times(1) == pytest.approx(0.0013)
    times.observe(1, -1.0)  # a pass that was faster than expected
    assert times(1) == pytest.approx(0.0013 * 0.9)


def test_dearer_levels_make_fewer_worth_their_time() -> None:
    budget = TreeBudget(
        target_pass_s=FixedTimes(lambda _: 0.02), draft_pass_s=FixedTimes(lambda _: 0.0001)
    )

    def is_worth(level_host_s: float) -> bool:
        step = budget.of_step(
            num_sequences=1, context=0, base_tokens=1.0, level_host_s=level_host_s
        )
        return step.is_worth_a_pass(
            tokens_gained=0.03, num_rows=1, expected_tokens=3.0, step_s=0.021
        )

    assert is_worth(0.0)
    assert not is_worth(0.0005)
