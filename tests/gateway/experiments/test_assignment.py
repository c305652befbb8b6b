"""Assignment to arms: sticky, independent, exclusive, and in the configured shares."""

from collections import Counter
from typing import Any

import pytest
from scipy.stats import binomtest, chi2_contingency

from outrider.gateway.contract.errors.tree import BadRequestError
from outrider.gateway.experiments.assigner import NullAssigner, Subject, conversation_unit
from outrider.gateway.experiments.assignment import HashAssigner
from outrider.gateway.experiments.lifecycle import arm_stopped, edited, ramped, reweighted, started
from outrider.gateway.experiments.records import ExperimentRecord
from tests.gateway.experiments.making import SECRET, record, spec, user

TIERS = {"control": {}, "small": {"set": {"tier": "small"}}}
MANY = 4000


def assigner(*records: ExperimentRecord) -> HashAssigner:
    return HashAssigner(records, SECRET)


def arms(assigning: HashAssigner, many: int = MANY) -> list[str]:
    found = [assigning.assign(user(i)) for i in range(many)]
    return ["" if one is None else one.label for one in found]


def test_the_same_unit_gets_the_same_arm_in_every_process_and_another_secret_another() -> None:
    made = record()
    first = arms(assigner(made), 200)
    assert first == arms(assigner(made), 200)
    assert first != [
        "" if a is None else a.label
        for a in map(HashAssigner([made], b"another").assign, (user(i) for i in range(200)))
    ]


def test_arms_get_their_shares() -> None:
    weighted = {"control": {"weight": 3.0}, "b": {"weight": 1.0, "set": {"sources": []}}}
    counts = Counter(arms(assigner(record(arms=weighted, share=0.5))))
    assert binomtest(counts[""], MANY, 0.5).pvalue > 1e-4
    in_it = MANY - counts[""]
    assert binomtest(counts["drafts:1/b"], in_it, 0.25).pvalue > 1e-4


def test_the_arm_the_share_and_the_bucket_have_nothing_to_do_with_each_other() -> None:
    half = assigner(record(share=0.5))
    found = [half.assign(user(i)) for i in range(20_000)]
    refs = [one.arms[0] for one in found if one is not None]
    table = Counter((ref.arm, ref.unit_bucket % 8) for ref in refs)
    observed = [[table[arm, bucket] for bucket in range(8)] for arm in ("control", "deep")]
    assert chi2_contingency(observed).pvalue > 1e-4
    assert {ref.unit_bucket for ref in refs} == set(range(64))


def test_two_layers_cross() -> None:
    both = assigner(record("one"), record("two", arms=TIERS, layer="b"))
    table = Counter(arms(both))
    assert set(table) == {f"two:1/{b},one:1/{a}" for a in ("control", "deep") for b in TIERS}
    observed = [[table[f"two:1/{b},one:1/{a}"] for a in ("control", "deep")] for b in TIERS]
    assert chi2_contingency(observed).pvalue > 1e-4


def test_crossed_overlays_hold_together() -> None:
    both = assigner(record("one"), record("two", arms=TIERS, layer="b"))
    wanted = {
        "two:1/small,one:1/deep": {"max_draft_nodes": 32, "tier": "small"},
        "two:1/small,one:1/control": {"tier": "small"},
        "two:1/control,one:1/deep": {"max_draft_nodes": 32},
        "two:1/control,one:1/control": {},
    }
    for i in range(50):
        found = both.assign(user(i))
        assert found is not None
        assert found.overlay.document() == wanted[found.label]
        assert [ref.experiment for ref in found.arms] == ["two", "one"]


def test_experiments_of_one_layer_exclude_each_other() -> None:
    one = record("one", share=0.5)
    two = started(record("two", share=0.5, runs=False), [one], 3.0)
    counts = Counter(label.partition(":")[0] for label in arms(assigner(one, two)))
    assert set(counts) == {"one", "two"}
    assert binomtest(counts["one"], MANY, 0.5).pvalue > 1e-4


def test_a_growing_share_moves_no_unit_between_arms() -> None:
    small = record(share=0.2)
    large = ramped(small, 0.7, [])
    for before, after in zip(arms(assigner(small)), arms(assigner(large)), strict=True):
        assert before in ("", after)


def test_other_weights_move_only_those_that_must() -> None:
    before = record()
    after = reweighted(before, 1, {"control": 0.7, "deep": 0.3})
    moved = Counter(
        (old, new)
        for old, new in zip(arms(assigner(before)), arms(assigner(after)), strict=True)
        if old != new
    )
    assert set(moved) == {("drafts:1/deep", "drafts:1/control")}
    assert binomtest(moved.total(), MANY, 0.2).pvalue > 1e-4


def test_a_new_version_keeps_arms_and_another_salt_does_not() -> None:
    before = record()
    labels = [label.replace(":1/", ":2/") for label in arms(assigner(before))]
    assert labels == arms(assigner(edited(before, spec(metric="ttft"), [], 3.0)))
    dealt_anew = arms(assigner(edited(before, spec(salt="again"), [], 3.0)))
    same = sum(a == b for a, b in zip(labels, dealt_anew, strict=True))
    assert binomtest(same, MANY, 0.5).pvalue > 1e-4


def test_a_stopped_arms_units_get_the_controls_settings_and_are_not_counted() -> None:
    three = {
        "control": {"set": {"max_draft_nodes": 2}},
        "a": {"set": {"max_draft_nodes": 4}},
        "b": {"set": {"max_draft_nodes": 8}},
    }
    made = record(arms=three)
    before, after = assigner(made), assigner(arm_stopped(made, 1, "a", "slow", 3.0))
    seen = Counter[str]()
    for i in range(300):
        was, found = before.assign(user(i)), after.assign(user(i))
        assert was is not None
        assert found is not None
        if was.label == "drafts:1/a":
            assert (found.arms, found.label) == ((), "")
            assert found.overlay.document() == {"max_draft_nodes": 2}
        else:
            assert found == was
        seen[was.label] += 1
    assert len(seen) == 3


def test_a_stopped_arm_beside_a_control_that_sets_nothing_is_nothing() -> None:
    three = {"control": {}, "a": {"set": {"sources": []}}, "b": {"set": {"sources": ["model"]}}}
    made = arm_stopped(record(arms=three), 1, "a", "slow", 3.0)
    labels = Counter(arms(assigner(made), 600))
    assert labels[""] == pytest.approx(200, abs=80)
    assert "drafts:1/a" not in labels


@pytest.mark.parametrize(
    ("eligible", "fields", "takes_part"),
    [
        ({"keys": ["key"]}, {}, True),
        ({"keys": ["other"]}, {}, False),
        ({"teams": ["team-a"]}, {"team_id": "team-a"}, True),
        ({"teams": ["team-a"]}, {}, False),
        ({"models": ["auto"]}, {"model": "auto"}, True),
        ({"models": ["auto"]}, {"model": "small"}, False),
        ({"endpoints": ["chat"]}, {"endpoint": "chat"}, True),
        ({"endpoints": ["chat"]}, {"endpoint": "messages"}, False),
        ({"headers": {"x-beta": "1"}}, {"headers": {"x-beta": "1"}}, True),
        ({"headers": {"x-beta": "1"}}, {"headers": {"x-beta": "2"}}, False),
        ({"headers": {"x-beta": "*"}}, {"headers": {"x-beta": "2"}}, True),
        ({"headers": {"x-beta": "*"}}, {}, False),
        ({}, {"own_fields": frozenset({"max_draft_nodes"})}, False),
        ({}, {"own_fields": frozenset({"speculation"})}, False),
        ({}, {"own_fields": frozenset({"tier", "slo"})}, True),
    ],
)
def test_units_take_part_by_share_and_filters(
    eligible: dict[str, Any], fields: dict[str, Any], takes_part: bool
) -> None:
    found = assigner(record(eligible=eligible)).assign(user(1, **fields))
    assert (found is not None) == takes_part


@pytest.mark.parametrize(
    ("unit", "subject", "takes_part"),
    [
        ("user", Subject(key_id="key"), False),
        ("user", Subject(key_id="anonymous", user="a"), True),
        ("key", Subject(key_id="key"), True),
        ("key", Subject(key_id="anonymous", user="a"), False),
        ("conversation", Subject(key_id="key", conversation="c"), True),
        ("conversation", Subject(key_id="key", user="a"), False),
        ("request", Subject(key_id="key", request_id="r"), True),
    ],
)
def test_the_unit_must_be_known(unit: str, subject: Subject, takes_part: bool) -> None:
    assigning = assigner(record(unit=unit))
    assert (assigning.assign(subject) is not None) == takes_part
    assert assigning.wants_conversation == (unit == "conversation")


def test_two_tenants_users_of_one_name_are_two_units_and_a_teams_is_one() -> None:
    assigning = assigner(record())

    def labels(**fields: str) -> list[str]:
        found = [assigning.assign(user(i, **fields)) for i in range(100)]
        return [one.label for one in found if one is not None]

    assert labels(key_id="a") != labels(key_id="b")
    assert labels(key_id="a", team_id="t") == labels(key_id="b", team_id="t")


def test_the_header_forces_an_arm_of_any_experiment_and_is_measured_as_nobodys() -> None:
    assigning = assigner(record(share=0.0), record("draft-one", arms=TIERS, runs=False))
    found = assigning.assign(
        user(1, headers={"x-outrider-arm": "draft-one/small"}, own_fields=frozenset({"tier"}))
    )
    assert found is not None
    assert found.is_forced
    assert found.measured == ()
    assert found.label == "forced:draft-one:1/small"
    assert found.overlay.document() == {"tier": "small"}


@pytest.mark.parametrize("wanted", ["drafts", "drafts/none", "", "x" * 10_000, "é/\x00"])
def test_an_unknown_forced_arm_is_refused_and_the_known_are_named(wanted: str) -> None:
    subject = user(1, headers={"x-outrider-arm": wanted})
    with pytest.raises(BadRequestError, match="available: drafts/control, drafts/deep") as caught:
        assigner(record()).assign(subject)
    assert len(str(caught.value)) < 400
    assert caught.value.param == "x-outrider-arm"
    with pytest.raises(BadRequestError, match="available: none"):
        NullAssigner().assign(subject)


def test_any_text_is_a_unit() -> None:
    assigning = assigner(record())
    for text in ("\ud800", "漢字", "a\0b", "x" * 100_000):
        assert assigning.assign(Subject(key_id="key", user=text)) is not None


def test_conversations_are_identified_by_their_first_message_and_key() -> None:
    assert conversation_unit("a", " hello ") == conversation_unit("a", "hello")
    assert conversation_unit("a", "hello") != conversation_unit("b", "hello")
    assert conversation_unit("ab", "c") != conversation_unit("a", "bc")
