"""Slots: exact shares, and no unit moves without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.experiments.slots import (
    NUM_SLOTS,
    NoRoomError,
    Ranges,
    count_of,
    dealt,
    resized,
    shares_of,
    size_of,
)

Weights = st.dictionaries(
    st.sampled_from("abcdef"), st.floats(min_value=0.01, max_value=100.0), min_size=2
)


def slots(ranges: Ranges) -> set[int]:
    return {slot for start, end in ranges for slot in range(start, end)}


@given(before=Weights, after=Weights)
def test_dealing_is_exact_complete_and_moves_as_few_as_possible(
    before: dict[str, float], after: dict[str, float]
) -> None:
    first = dealt(before, {})
    second = dealt(after, first)
    assert sum(size_of(ranges) for ranges in second.values()) == NUM_SLOTS
    assert set().union(*(slots(ranges) for ranges in second.values())) == set(range(NUM_SLOTS))
    total = sum(after.values())
    for arm, share in shares_of(second).items():
        assert share == pytest.approx(after[arm] / total, abs=len(after) / NUM_SLOTS)
    for arm in second:
        kept = slots(first.get(arm, ())) & slots(second[arm])
        assert len(kept) == min(size_of(first.get(arm, ())), size_of(second[arm]))


@given(first=st.floats(0, 1), second=st.floats(0, 1))
def test_a_growing_arm_keeps_its_slots_and_a_shrinking_arm_gets_none(
    first: float, second: float
) -> None:
    before = resized((), count_of(first), [])
    after = resized(before, count_of(second), [])
    assert size_of(after) == count_of(second)
    small, large = sorted((slots(before), slots(after)), key=len)
    assert small <= large


def test_slots_of_other_experiments_are_not_taken() -> None:
    one = resized((), 3000, [])
    two = resized((), 3000, [one])
    grown = resized(one, 6000, [two])
    assert slots(one) < slots(grown)
    assert not slots(grown) & slots(two)
    with pytest.raises(NoRoomError, match="7001 of 10000 slots are wanted, 7000 are free"):
        resized(one, 7001, [two])


def test_the_smallest_share_is_a_slot_and_none_is_none() -> None:
    assert (count_of(0.0), count_of(1e-9), count_of(0.25), count_of(1.0)) == (0, 1, 2500, 10_000)
