"""The budget against trying every size."""

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.budget import AcceptanceEstimate, TreeBudget

PROBS = st.lists(st.floats(0.0, 1.0), max_size=60).map(lambda probs: sorted(probs, reverse=True))


def staircase(tile: int, step_s: float, base_s: float):
    return lambda rows: base_s + step_s * math.ceil(rows / tile)


@given(
    probs=PROBS,
    num_sequences=st.integers(1, 8),
    tile=st.sampled_from([1, 4, 16, 64]),
    base_s=st.floats(0.0, 1.0),
    spent_s=st.floats(0.0, 1.0),
)
def test_no_size_gives_more_tokens_per_second(
    probs: list[float], num_sequences: int, tile: int, base_s: float, spent_s: float
) -> None:
    target = staircase(tile, 0.3, base_s)
    budget = TreeBudget(target_pass_s=target, draft_pass_s=staircase(1, 0.1, 0.0))
    nodes, expected, step_s = budget.num_nodes(probs, num_sequences=num_sequences, spent_s=spent_s)
    rates = [
        (num_sequences + gained) / (spent_s + target(num_sequences + number))
        for number, gained in enumerate(accumulate(probs, initial=0.0))
    ]
    assert 0 <= nodes <= len(probs)
    assert expected == pytest.approx(num_sequences + sum(probs[:nodes]))
    assert step_s == pytest.approx(spent_s + target(num_sequences + nodes))
    assert expected / step_s == pytest.approx(max(rates))
    assert rates[nodes] == pytest.approx(max(rates))


def test_free_rows_are_filled_and_dear_ones_are_not() -> None:
    probs = [0.5] * 40
    free = TreeBudget(target_pass_s=lambda rows: 1.0, draft_pass_s=lambda rows: 0.1)
    assert free.num_nodes(probs, num_sequences=1, spent_s=0.0)[0] == 40
    dear = TreeBudget(target_pass_s=lambda rows: float(rows), draft_pass_s=lambda rows: 0.1)
    assert dear.num_nodes(probs, num_sequences=1, spent_s=0.0)[0] == 0
    tiles = TreeBudget(target_pass_s=staircase(16, 1.0, 0.0), draft_pass_s=lambda rows: 0.1)
    assert tiles.num_nodes(probs, num_sequences=1, spent_s=0.0)[0] == 15  # up to the tile's edge


def test_drafting_stops_paying_under_load() -> None:
    budget = TreeBudget(
        target_pass_s=lambda rows: 1.0 if rows <= 16 else rows / 16,
        draft_pass_s=lambda rows: 0.1,
    )
    assert budget.is_worth_drafting(1, acceptance=0.6, max_depth=4)
    assert not budget.is_worth_drafting(16, acceptance=0.6, max_depth=4)
    assert not budget.is_worth_drafting(1, acceptance=0.05, max_depth=4)
    assert not budget.is_worth_drafting(1, acceptance=0.9, max_depth=0)


def test_a_dear_drafter_is_worth_it_for_nobody() -> None:
    budget = TreeBudget(target_pass_s=lambda rows: 1.0, draft_pass_s=lambda rows: 2.0)
    assert not budget.is_worth_drafting(1, acceptance=1.0, max_depth=8)


@given(
    gained=st.floats(0.0, 4.0),
    expected=st.floats(1.0, 20.0),
    step_s=st.floats(0.01, 2.0),
    pass_s=st.floats(0.01, 2.0),
)
def test_a_pass_is_worth_it_when_the_rate_rises(
    gained: float, expected: float, step_s: float, pass_s: float
) -> None:
    budget = TreeBudget(target_pass_s=lambda rows: 1.0, draft_pass_s=lambda rows: pass_s)
    before, after = expected / step_s, (expected + gained) / (step_s + pass_s)
    if not math.isclose(before, after, rel_tol=1e-9):
        assert (after > before) == budget.is_worth_a_pass(
            tokens_gained=gained, num_rows=3, expected_tokens=expected, step_s=step_s
        )


def test_the_estimate_follows_what_is_seen() -> None:
    estimate = AcceptanceEstimate(value=0.7)
    for _ in range(100):
        estimate.observe(False)
    assert estimate.value < 0.01
    for number in range(400):
        estimate.observe(number % 4 > 0)
    assert 0.55 < estimate.value < 0.95
