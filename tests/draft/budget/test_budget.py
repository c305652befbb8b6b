"""The budget against trying every size."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.draft.budget.budget import AcceptanceEstimate, DraftGain, StepBudget, TreeBudget
from tests.engines import FixedTimes

PROBS = st.lists(st.floats(0.0, 1.0), max_size=60).map(lambda probs: sorted(probs, reverse=True))


def staircase(tile: int, step_s: float, base_s: float) -> FixedTimes:
    return FixedTimes(lambda rows: base_s + step_s * math.ceil(rows / tile))


def step_budget(
    target: FixedTimes,
    draft: FixedTimes,
    *,
    num_sequences: int,
    base_tokens: float | None = None,
    max_stretch: float = math.inf,
) -> StepBudget:
    budget = TreeBudget(target_pass_s=target, draft_pass_s=draft, max_stretch=max_stretch)
    return budget.of_step(
        num_sequences=num_sequences,
        context=0.0,
        base_tokens=num_sequences if base_tokens is None else base_tokens,
    )


@given(
    probs=PROBS,
    num_sequences=st.integers(1, 8),
    tile=st.sampled_from([1, 4, 16, 64]),
    base_s=st.floats(0.0, 1.0),
    spent_s=st.floats(0.0, 1.0),
    urgency=st.floats(0.5, 4.0),
)
def test_no_size_gives_more_tokens_per_second(
    probs: list[float],
    num_sequences: int,
    tile: int,
    base_s: float,
    spent_s: float,
    urgency: float,
) -> None:
    target = staircase(tile, 0.3, base_s)
    base = num_sequences * urgency
    step = step_budget(
        target, staircase(1, 0.1, 0.0), num_sequences=num_sequences, base_tokens=base
    )
    step.passes_s = spent_s
    nodes, expected, step_s = step.num_nodes(np.array(probs))
    rates = [
        (base + gained) / (spent_s + target(num_sequences + number))
        for number, gained in enumerate(accumulate(probs, initial=0.0))
    ]
    assert 0 <= nodes <= len(probs)
    assert expected == pytest.approx(base + sum(probs[:nodes]))
    assert step_s == pytest.approx(spent_s + target(num_sequences + nodes))
    assert expected / step_s == pytest.approx(max(rates))
    assert rates[nodes] == pytest.approx(max(rates))


def test_free_rows_are_filled_and_dear_ones_are_not() -> None:
    probs = np.full(40, 0.5)
    draft = FixedTimes(lambda rows: 0.1)

    def num_nodes(target: FixedTimes) -> int:
        return step_budget(target, draft, num_sequences=1).num_nodes(probs)[0]

    assert num_nodes(FixedTimes(lambda rows: 1.0)) == 40
    assert num_nodes(FixedTimes(lambda rows: float(rows))) == 0
    assert num_nodes(staircase(16, 1.0, 0.0)) == 15  # up to the tile's edge


def num_worth(step: StepBudget, acceptances: list[float], max_depth: int) -> int:
    gains = [DraftGain(acceptance=value) for value in acceptances]
    return step.num_worth_drafting(gains, np.empty(0), max_depth)


def knee(num_sequences: int) -> StepBudget:
    """Sixteen rows are free, every further one costs a sixteenth."""
    return step_budget(
        FixedTimes(lambda rows: 1.0 if rows <= 16 else rows / 16),
        FixedTimes(lambda rows: 0.1),
        num_sequences=num_sequences,
    )


def test_drafting_stops_paying_under_load() -> None:
    assert num_worth(knee(1), [0.6], 4) == 1
    assert num_worth(knee(16), [0.6] * 16, 4) == 0
    assert num_worth(knee(1), [0.05], 4) == 0
    assert num_worth(knee(1), [0.9], 0) == 0
    assert num_worth(knee(1), [], 4) == 0


def test_one_pass_of_a_block_pays_where_a_pass_a_level_does_not() -> None:
    """A draft pass takes nearly as long as a large one."""
    level = step_budget(FixedTimes(lambda r: 1.0), FixedTimes(lambda r: 0.9), num_sequences=1)
    block = replace(level, num_block_rows=8)
    assert num_worth(level, [0.85], 8) == 0
    assert num_worth(block, [0.85], 8) == 1
    assert num_worth(block, [0.85], 1) == 0  # a block of one depth
    # Its rows count: eight of each sequence.
    by_rows = replace(block, draft_pass_s=FixedTimes(lambda rows: 0.6 * rows))
    assert num_worth(by_rows, [0.85], 8) == 0


def test_only_the_sequences_that_agree_are_drafted_for() -> None:
    """Eight rows are free: two sequences that agree use them better than eight that may not."""
    assert num_worth(knee(8), [0.95, 0.95, *[0.05] * 6], 4) == 2
    assert num_worth(knee(8), [0.9] * 8, 1) == 8


def test_an_expensive_drafter_drafts_for_no_sequence() -> None:
    step = step_budget(FixedTimes(lambda r: 1.0), FixedTimes(lambda r: 2.0), num_sequences=1)
    assert num_worth(step, [1.0], 8) == 0


@given(
    gained=st.floats(0.0, 4.0),
    expected=st.floats(1.0, 20.0),
    step_s=st.floats(0.01, 2.0),
    pass_s=st.floats(0.01, 2.0),
)
def test_a_pass_is_worth_it_when_the_rate_rises(
    gained: float, expected: float, step_s: float, pass_s: float
) -> None:
    """Its own time, and that of one more row to judge."""
    step = step_budget(
        FixedTimes(lambda rows: step_s + 0.1 * (rows - 1)),
        FixedTimes(lambda rows: pass_s),
        num_sequences=1,
        base_tokens=expected,
    )
    before, after = expected / step_s, (expected + gained) / (step_s + pass_s + 0.1)
    if not math.isclose(before, after, rel_tol=1e-9):
        worth_it = step.is_worth_a_pass(np.empty(0), tokens_gained=gained, num_rows=1, num_trees=1)
        assert worth_it == (after > before)


def test_the_estimate_follows_what_is_seen() -> None:
    estimate = AcceptanceEstimate(value=0.7)
    for _ in range(100):
        estimate.observe(False)
    assert estimate.value < 0.01
    for number in range(400):
        estimate.observe(number % 4 > 0)
    assert 0.55 < estimate.value < 0.95


def test_a_step_with_guesses_does_not_keep_a_stream_waiting() -> None:
    """Half as long again and no longer, however many tokens that would give."""
    target, draft = FixedTimes(lambda rows: 1.0 + 0.1 * (rows - 1)), FixedTimes(lambda rows: 0.01)
    free = step_budget(target, draft, num_sequences=1)
    bound = step_budget(target, draft, num_sequences=1, max_stretch=1.5)
    probs = np.full(30, 0.99)
    assert free.num_nodes(probs)[0] == 30
    assert num_worth(bound, [0.99], 16) == 1
    bound.passes_s = 0.1
    assert bound.num_nodes(probs)[0] == 4  # 0.1 s is spent, four rows take 0.4 s
    worth = {"tokens_gained": 1.0, "num_rows": 1, "num_trees": 1}
    assert bound.is_worth_a_pass(probs[:2], **worth)
    assert not bound.is_worth_a_pass(probs[:4], **worth)
    bound.passes_s = 0.9
    assert bound.num_nodes(probs)[0] == 0
    slow = FixedTimes(lambda rows: 1.0)
    step = step_budget(target, slow, num_sequences=1, max_stretch=1.5)
    assert num_worth(step, [0.99], 16) == 0


def test_a_pass_behind_which_rows_are_dear_is_not_made() -> None:
    """The draft itself takes next to nothing."""

    def is_worth(row_s: float) -> bool:
        target = FixedTimes(lambda rows: 1.0 + row_s * (rows - 1))
        step = step_budget(target, FixedTimes(lambda rows: 0.001), num_sequences=1)
        return step.is_worth_a_pass(np.empty(0), tokens_gained=0.5, num_rows=1, num_trees=1)

    assert is_worth(0.3)
    assert not is_worth(0.6)


def test_a_long_text_to_catch_up_with_is_worth_it_for_a_long_answer() -> None:
    step = step_budget(
        FixedTimes(lambda rows: 1.0), FixedTimes(lambda rows: 0.02 * rows), num_sequences=1
    )

    def num_worth_reading(num_rows: int, num_steps: int) -> int:
        gain = DraftGain(acceptance=0.7, catch_up_rows=num_rows, num_steps=num_steps)
        return step.num_worth_drafting([gain], np.empty(0), 4)

    assert num_worth_reading(2, 4) == 1
    assert num_worth_reading(200, 64) == 1
    assert num_worth_reading(500, 4) == 0


def test_trees_are_built_for_a_gain_that_pays_the_hosts_work() -> None:
    step = step_budget(FixedTimes(lambda rows: 1.0), FixedTimes(lambda rows: 0.1), num_sequences=1)
    dear = replace(step, part_host_s=0.6)
    assert step.num_nodes(np.array([0.5]))[0] == 1
    assert dear.num_nodes(np.array([0.5])) == (0, 1.0, 1.0)


def test_text_that_says_it_already_leaves_the_model_less_to_add() -> None:
    step = step_budget(FixedTimes(lambda r: 1.0), FixedTimes(lambda r: 0.3), num_sequences=1)
    probs = np.array([0.95**depth for depth in range(1, 12)])
    text = [DraftGain(acceptance=0.7, text_tokens=float(probs.sum()))]
    assert step.num_worth_drafting([DraftGain(acceptance=0.7)], np.empty(0), 8) == 1
    assert step.num_worth_drafting(text, probs, 8) == 0
    # Text of which little is expected does not keep a good model from being asked.
    weak = np.array([0.4, 0.2, 0.1])
    assert step.num_worth_drafting([DraftGain(acceptance=0.95, text_tokens=0.7)], weak, 8) == 1


@pytest.mark.parametrize(("num_sequences", "longest_s"), [(1, 0.08), (2, 0.08), (3, 0.03)])
def test_only_few_streams_may_wait_unseen(num_sequences: int, longest_s: float) -> None:
    budget = TreeBudget(
        target_pass_s=FixedTimes(lambda rows: 0.02), draft_pass_s=FixedTimes(lambda rows: 0.001),
        max_stretch=1.5,
    )  # fmt: skip
    step = budget.of_step(num_sequences=num_sequences, context=0.0, base_tokens=num_sequences)
    assert step.longest_s == pytest.approx(longest_s)


@pytest.mark.parametrize("num_prompt_rows", [0, 30, 300])
def test_a_prompt_beside_makes_no_guess_look_cheap(num_prompt_rows: int) -> None:
    """Its time is spent in any case; a guess has to be worth what it adds to the step."""
    budget = TreeBudget(
        target_pass_s=FixedTimes(lambda rows: 0.010 + 0.0025 * rows),
        draft_pass_s=FixedTimes(lambda rows: 0.001),
        unseen_in_company_s=0.0,
    )
    step = budget.of_step(
        num_sequences=4,
        num_prompt_rows=num_prompt_rows,
        context=0.0,
        base_tokens=4.0,
        step_host_s=0.001,
    )
    # Of a plain step a token takes 5.25 ms: what takes 2.5 ms has to be right in half of all cases.
    assert step.num_nodes(np.array([0.9, 0.7, 0.4, 0.2, 0.1]))[0] == 2
    assert step.longest_s == pytest.approx(1.3 * 0.021)


# ---- texts that are read ---------------------------------------------------------------------


def by_rows(num_sequences: int) -> StepBudget:
    """A large pass takes 1 s, a draft pass 0.01 s a row, a step 1.5 s at most."""
    return step_budget(
        FixedTimes(lambda rows: 1.0),
        FixedTimes(lambda rows: 0.01 * rows),
        num_sequences=num_sequences,
        max_stretch=1.5,
    )


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_what_is_read_serves_later_steps_but_others_wait_for_it(num_sequences: int) -> None:
    step, short = by_rows(num_sequences), by_rows(num_sequences)
    step.spend(40 + 1, {"a": 10, "b": 30})
    short.spend(1)
    assert step.reading_s == pytest.approx({"a": 0.1, "b": 0.3})
    assert step.passes_s == pytest.approx(short.passes_s)
    assert step.num_nodes(np.array([0.9]))[1:] == pytest.approx(
        short.num_nodes(np.array([0.9]))[1:]
    )
    assert step.room_s == pytest.approx(step.longest_s - 0.4 * (num_sequences > 1))


def test_a_token_of_each_text_is_what_any_step_takes_in() -> None:
    step = by_rows(2)
    step.spend(4, {"a": 1, "b": 1})
    assert step.reading_s == {}
    assert step.passes_s == pytest.approx(0.04)


def test_as_much_is_read_as_has_room_in_the_step_of_others() -> None:
    assert by_rows(1).most_first_rows(1, 1024) == 1024
    assert by_rows(4).most_first_rows(4, 1024) == pytest.approx(50, abs=1)
    assert by_rows(4).most_first_rows(4, 20) == 20
    assert by_rows(60).most_first_rows(60, 1024) == 120
    assert replace(by_rows(4), prompts_share=0.5).most_first_rows(4, 1024) == 8


def test_the_best_rate_is_that_of_chains_over_plain_steps() -> None:
    step = by_rows(2)
    one_deep = 2 * (1 + 0.8) / (1.0 + 0.02)
    two_deep = 2 * (1 + 0.8 + 0.64) / (1.0 + 0.04)
    gains = [DraftGain(acceptance=0.8)] * 2
    assert step.best_rate(gains, 1) == pytest.approx(one_deep / 2)
    assert step.best_rate(gains, 2) == pytest.approx(two_deep / 2)


def test_an_answer_soon_knows_its_own_text() -> None:
    """Whatever was right of others' before."""
    known = AcceptanceEstimate()
    for _ in range(100):
        known.observe(True)
    own = known.of_one()
    assert own.value == known.value
    for _ in range(4):
        own.observe(False)
    assert own.value < 0.55
    assert known.value > 0.99, "it is a copy"
