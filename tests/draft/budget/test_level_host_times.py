"""The host's work beside a draft pass, learnt by the number of trees."""

import pytest

from outrider.draft.budget.level_host_times import LevelHostTimes
from tests.engines import (
    drafter_of,
    fixed_budget,
    make_engine,
    make_request,
    random_prompt,
    serve,
    tiny_pair,
)


def test_nothing_is_known_at_first() -> None:
    assert LevelHostTimes()(3) == 0.0


def test_the_nearest_number_of_trees_stands_for_unknown_ones() -> None:
    times = LevelHostTimes()
    times.observe(1, 0.1, expected_s=1.0)
    times.observe(8, 0.8, expected_s=1.0)
    assert (times(1), times(2), times(8), times(40)) == (0.1, 0.1, 0.8, 0.8)


def test_it_follows_slowly_and_a_held_up_level_says_little() -> None:
    times = LevelHostTimes()
    times.observe(1, 0.001, expected_s=0.002)
    times.observe(1, 10.0, expected_s=0.002)
    assert times(1) == pytest.approx(0.0013)
    times.observe(1, -1.0, expected_s=0.002)  # a pass that was faster than expected
    assert times(1) == pytest.approx(0.0013 * 0.9)


def test_a_first_level_that_loads_kernels_is_not_believed() -> None:
    times = LevelHostTimes()
    times.observe(1, 3.0, expected_s=0.001)
    assert times(1) == pytest.approx(0.0013)


def test_levels_that_were_too_dear_once_are_doubted_in_every_step_without_them() -> None:
    budget = fixed_budget(target=0.005, row=0.0, draft=0.001)
    engine = make_engine(tiny_pair(drift=0.0), budget=budget)
    drafter = drafter_of(engine)
    times = drafter._growths["small"].host_times
    times.observe(1, 10.0, expected_s=10.0)
    serve(engine, [make_request("r", random_prompt(6), max_tokens=40)])
    assert not sum(engine.stats().drafted_by_source.get("model", ()))
    assert times(1) == pytest.approx(10.0 * 0.998**39, rel=0.01)


def test_dearer_levels_make_fewer_worth_their_time() -> None:
    budget = fixed_budget(target=0.02, row=0.0, draft=0.0001)

    def is_worth(level_host_s: float) -> bool:
        step = budget.of_step(
            num_sequences=1, context=0, base_tokens=1.0, level_host_s=level_host_s
        )
        return step.is_worth_a_pass(
            tokens_gained=0.03, num_rows=1, expected_tokens=3.0, step_s=0.021
        )

    assert is_worth(0.0)
    assert not is_worth(0.0005)
