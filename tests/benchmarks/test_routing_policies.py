import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing.routing_policies import (
    ESCALATED,
    LARGE,
    SMALL,
    Outcome,
    chosen_by,
    cross_fitted,
    curve,
    figures,
    gain_at_equal_cost,
    known_by,
    least_share,
    names_of,
    one_tier,
    oracle,
    seconds_of,
    taken,
)
from tests.benchmarks.routed_rows import PRICES, ROWS, TARGET


def test_single_tiers_and_the_oracle_bound_every_policy() -> None:
    small, large = one_tier(ROWS, SMALL, PRICES), one_tier(ROWS, LARGE, PRICES)
    best = oracle(ROWS, PRICES)
    assert small.scores.mean() == ROWS.weak.mean()
    assert large.scores.mean() == ROWS.strong.mean()
    assert (small.strong_share, large.strong_share) == (0.0, 1.0)
    assert best.scores.mean() == np.maximum(ROWS.weak, ROWS.strong).mean()
    assert best.strong_share == (ROWS.strong > ROWS.weak).mean()
    assert small.costs.mean() < best.costs.mean() < large.costs.mean()
    for stage in ROWS.stages:
        outcome = cross_fitted(known_by(ROWS, stage), TARGET, PRICES)
        assert outcome.scores.mean() <= best.scores.mean()
        assert outcome.costs.min() >= small.costs.min()


def test_a_tier_costs_its_prompt_and_its_own_answer() -> None:
    rows = taken(ROWS, np.array([3]))
    assert rows.num_weak_tokens is not None
    assert rows.num_strong_tokens is not None
    expected = 20 + rows.num_weak_tokens[0]
    assert one_tier(rows, SMALL, PRICES).costs[0] == pytest.approx(1e-6 * expected)
    expected = 10 * (20 + rows.num_strong_tokens[0])
    assert one_tier(rows, LARGE, PRICES).costs[0] == pytest.approx(1e-6 * expected)


def test_stages_know_no_more_than_they_are_told() -> None:
    assert known_by(ROWS, "text").stages == ("text",)
    assert known_by(ROWS, "prompt").stages == ("text", "prompt")
    assert known_by(ROWS, "answer") is ROWS
    # The probe decides before anything but the first token is paid for.
    assert known_by(ROWS, "prompt").hold_back_tokens == 1


def test_escalations_pay_for_what_was_held() -> None:
    outcome = cross_fitted(ROWS, TARGET, PRICES)
    large, escalated = (outcome.ways == way for way in (LARGE, ESCALATED))
    assert escalated.any()
    alone = one_tier(ROWS, LARGE, PRICES).costs
    assert ROWS.num_weak_tokens is not None
    held = 1e-6 * (20 + np.minimum(ROWS.num_weak_tokens, 16))
    assert outcome.costs[escalated] == pytest.approx((alone + held)[escalated])
    assert outcome.costs[large] == pytest.approx(alone[large])


def test_a_setting_is_never_judged_on_prompts_that_chose_it() -> None:
    """Changing the labels of one half changes only what the other half is given."""
    number = len(ROWS.text)
    even = np.arange(0, number, 2)
    weak = ROWS.weak.copy()
    weak[even] = 1.0 - weak[even]
    changed = taken(ROWS, np.arange(number))
    changed.weak[:] = weak
    before = cross_fitted(ROWS, TARGET, PRICES)
    after = cross_fitted(changed, TARGET, PRICES)
    assert (before.ways[even] == after.ways[even]).all()
    assert (before.ways[1::2] != after.ways[1::2]).any()


def test_better_stages_give_better_curves_and_smaller_shares() -> None:
    shares = [least_share(known_by(ROWS, stage), 0.01) for stage in ROWS.stages]
    assert all(share is not None and 0 < share <= 1 for share in shares)
    assert sorted(shares, key=lambda share: -(share or 0)) == shares
    points = curve(known_by(ROWS, "text"), PRICES)
    assert points == sorted(points)
    assert list(points[0][1:]) == pytest.approx([ROWS.weak.mean(), 0.0])
    assert list(points[-1]) == pytest.approx([1.0, ROWS.strong.mean(), 1.0])


def test_at_equal_cost_the_better_judge_gains_and_a_router_gains_nothing_over_itself() -> None:
    watch = cross_fitted(ROWS, TARGET, PRICES)
    text = known_by(ROWS, "text")
    gained = gain_at_equal_cost(watch, text, PRICES)
    assert gained.low > 0
    itself = gain_at_equal_cost(cross_fitted(text, TARGET, PRICES), text, PRICES)
    assert abs(itself.estimate) < 0.02
    assert itself.low <= 0 <= itself.high
    whole = gain_at_equal_cost(one_tier(ROWS, LARGE, PRICES), text, PRICES)
    assert whole.estimate == pytest.approx(0.0)


@pytest.mark.slow
@given(st.lists(st.sampled_from([SMALL, LARGE, ESCALATED]), min_size=3, max_size=20))
def test_a_policy_takes_the_time_of_its_ways(ways: list[int]) -> None:
    number = len(ways)
    outcome = Outcome(scores=np.ones(number), costs=np.ones(number), ways=np.array(ways))
    measured = {way: np.array([1.0, 2.0, 3.0]) + 10.0 * way for way in (SMALL, LARGE, ESCALATED)}
    found = seconds_of(outcome, measured, np.array([number - 1, 0, 1]))
    taken_ways = [ways[-1], ways[0], ways[1]]
    assert found.tolist() == [1.0 + place + 10.0 * way for place, way in enumerate(taken_ways)]
    entry = figures(outcome, outcome, found)
    assert entry.p50_s == sorted(found)[1]
    assert entry.cost == 1.0
    assert figures(outcome, outcome, None).p95_s is None


def test_a_choice_among_tiers_begins_nothing_in_vain() -> None:
    ways = np.array([SMALL, LARGE] * (len(ROWS.text) // 2))
    outcome = chosen_by(ROWS, ways, PRICES)
    small, large = one_tier(ROWS, SMALL, PRICES), one_tier(ROWS, LARGE, PRICES)
    assert (outcome.costs[::2] == small.costs[::2]).all()
    assert (outcome.costs[1::2] == large.costs[1::2]).all()
    assert outcome.strong_share == 0.5


def test_names_are_one_a_stage() -> None:
    names = names_of(ROWS.stages)
    assert list(names) == ["text", "prompt", "answer"]
    assert len(set(names.values())) == 3
