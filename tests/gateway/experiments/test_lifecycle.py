"""Actions on an experiment, and the states that they lead to."""

from typing import Any

import pytest

from outrider.gateway.contract.errors.tree import BadRequestError, ConflictError
from outrider.gateway.experiments.lifecycle import (
    arm_stopped,
    edited,
    ramped,
    reweighted,
    started,
    stopped,
)
from outrider.gateway.experiments.slots import size_of
from tests.gateway.experiments.making import record, spec

THREE = {"control": {}, "a": {"set": {"max_draft_nodes": 1}}, "b": {"set": {"sources": []}}}


def test_a_life() -> None:
    made = record(runs=False, share=0.5)
    assert (made.state, made.version, made.slots) == ("draft", 1, ())
    running = started(made, [], 5.0)
    assert (running.state, size_of(running.slots), running.started_at) == ("running", 5000, 5.0)
    assert started(running, [], 6.0) == running
    over = stopped(running, 7.0)
    assert (over.state, over.slots, over.stopped_at) == ("stopped", (), 7.0)
    assert stopped(over, 8.0) == over
    again = started(over, [], 9.0)
    assert (again.version, again.started_at, again.stopped_at) == (1, 5.0, None)
    assert again.slots == running.slots


def test_an_edit_of_a_draft_is_no_new_version_and_of_what_ran_is() -> None:
    draft = edited(record(runs=False), spec(metric="ttft"), [], 3.0)
    assert (draft.version, draft.spec.metric) == (1, "ttft")
    before = record(share=0.3)
    after = edited(before, spec(metric="ttft"), [], 3.0)
    assert (after.version, after.state, after.started_at) == (2, "running", 3.0)
    assert after.slots == before.slots
    assert after.current.arm_slots == before.current.arm_slots


@pytest.mark.parametrize(
    "fields", [{"description": "why"}, {"guardrails": {"error_share": 0.1}}, {}]
)
def test_words_and_guardrails_are_no_new_version(fields: dict[str, Any]) -> None:
    after = edited(record(), spec(**fields), [], 3.0)
    assert (after.version, after.spec) == (1, spec(**fields))


def test_another_salt_deals_anew_and_other_weights_move_few() -> None:
    before = record(arms=THREE)
    arms = THREE | {"b": THREE["b"] | {"weight": 2.0}}
    after = edited(before, spec(arms), [], 3.0)
    assert after.current.weights["b"] == pytest.approx(0.5, abs=1e-3)
    kept = range(*after.current.arm_slots["control"][0])
    assert set(kept) <= set(range(*before.current.arm_slots["control"][0]))
    assert edited(before, spec(THREE, salt="x"), [], 3.0).version == 2


def test_one_layer_has_room_for_one_whole() -> None:
    first = record("first", share=0.6)
    with pytest.raises(ConflictError, match=r"share of 0\.5 .* 0\.4 of the layer 'default'.*first"):
        started(record("second", share=0.5, runs=False), [first], 3.0)
    second = started(record("second", share=0.4, runs=False), [first], 3.0)
    with pytest.raises(ConflictError, match="share"):
        ramped(second, 0.41, [first])
    assert size_of(ramped(second, 0.41, [stopped(first, 4.0)]).slots) == 4100


def test_one_layer_has_one_unit() -> None:
    first = record("first", share=0.1)
    with pytest.raises(ConflictError, match="assigns by user and this one by key"):
        started(record("second", share=0.1, unit="key", runs=False), [first], 3.0)


@pytest.mark.parametrize(
    ("sets", "clashes"),
    [
        ({"max_draft_nodes": 1}, True),
        ({"sources": ["model"]}, False),
        ({"tier": "small"}, False),
    ],
)
def test_layers_that_set_the_same_are_refused(sets: dict[str, Any], clashes: bool) -> None:
    first = record("first")
    other = record("other", arms={"a": {}, "b": {"set": sets}}, layer="other", runs=False)
    if clashes:
        with pytest.raises(ConflictError, match="'first' of the layer 'default' runs and sets max"):
            started(other, [first], 3.0)
        assert started(other, [stopped(first, 4.0)], 5.0).is_running
    else:
        assert started(other, [first], 3.0).is_running


def test_a_tier_and_a_threshold_in_two_layers_clash_also_by_an_edit() -> None:
    first = record("first", arms={"a": {}, "b": {"set": {"tier": "small"}}})
    other = record("other", layer="other")
    with pytest.raises(ConflictError, match="sets threshold, tier too"):
        edited(other, spec({"a": {}, "b": {"set": {"threshold": 0.5}}}, layer="other"), [first], 3)


def test_a_stopped_arm_leaves_the_others_as_they_are() -> None:
    before = record(arms=THREE)
    after = arm_stopped(before, 1, "a", "too slow", 3.0)
    assert after.live_arms == ("control", "b")
    assert after.current.stopped_arms["a"].reason == "too slow"
    assert after.current.arm_slots == before.current.arm_slots
    assert arm_stopped(after, 1, "a", "again", 4.0) == after
    assert arm_stopped(before, 2, "a", "too slow", 3.0) == before
    assert arm_stopped(before, 1, "nobody", "too slow", 3.0) == before


@pytest.mark.parametrize("arms", [["control"], ["a", "b"]])
def test_nothing_is_left_to_compare(arms: list[str]) -> None:
    after = record(arms=THREE)
    for arm in arms:
        assert after.is_running
        after = arm_stopped(after, 1, arm, "too slow", 3.0)
    assert (after.state, after.slots) == ("stopped", ())


def test_weights_change_within_a_version_and_stopped_arms_keep_theirs() -> None:
    before = arm_stopped(record(arms=THREE), 1, "a", "too slow", 3.0)
    after = reweighted(before, 1, {"control": 0.25, "b": 0.75})
    assert after.version == 1
    assert after.current.weights == pytest.approx(
        {"a": 1 / 3, "control": 1 / 6, "b": 1 / 2}, abs=1e-3
    )
    assert after.current.arm_slots["a"] == before.current.arm_slots["a"]
    assert reweighted(before, 2, {"control": 1.0, "b": 1.0}) == before
    with pytest.raises(BadRequestError, match="control, b"):
        reweighted(before, 1, {"control": 1.0})
