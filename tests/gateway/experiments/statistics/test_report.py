"""The whole report: verdicts, JSON, text, picture, and the check of an arm against itself."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from outrider.gateway.experiments.statistics.plan import Limits, SamplePlan
from outrider.gateway.experiments.statistics.report import analyse
from outrider.gateway.experiments.statistics.report_text import print_check, print_report
from outrider.gateway.experiments.statistics.selfcheck import self_check
from tests.gateway.experiments.statistics.arms import arm

LIMITS = Limits(p95_ttft_ms=750.0, error_share=0.05, cost_per_request_usd=0.001)


def plan_of(*arms, **changes):
    return SamplePlan(
        name="budget", version=1, control=arms[0], weights=dict.fromkeys(arms, 1.0), **changes
    )


@pytest.fixture(scope="module")
def totals():
    rng = np.random.default_rng(1)
    return {
        "control": arm("control", rng, num_requests=4000, median_s=0.24),
        "fast": arm("fast", rng, num_requests=4050, median_s=0.18),
        "same": arm("same", rng, num_requests=3950, median_s=0.24),
        "slow": arm("slow", rng, num_requests=4000, median_s=0.4, error_share=0.15),
    }


def printed(show, *arguments):
    out = io.StringIO()
    show(*arguments, Console(file=out, width=200, color_system=None))
    return out.getvalue()


def test_the_better_arm_wins(totals):
    analysis = analyse(plan_of("control", "fast", "same", limits=LIMITS), totals)
    assert analysis.verdict.state == "better"
    assert analysis.verdict.winner == "fast"
    assert analysis.verdict.is_decided
    assert "fast is better than the control by attainment: +" in analysis.verdict.text
    assert analysis.mismatch is not None
    assert not analysis.mismatch.is_mismatch
    # two comparisons decide, at half of alpha each: wider than the same at alpha
    fast = analysis.comparisons[0]
    assert fast.primary is not None
    assert fast.primary.difference.low < fast.shares["attained"].difference.low
    for q in (0.5, 0.95):
        assert fast.quantiles["ttft_s"][q].difference.is_below(0.0)


@pytest.mark.parametrize(
    ("arms", "changes", "state", "winner"),
    [
        (("control", "slow"), {}, "worse", "control"),
        (("control", "same"), {}, "undecided", None),
        (("control", "same"), {"min_effect": 0.2}, "equivalent", None),
        (("control", "same", "slow"), {}, "mixed", None),
        (("control", "slow"), {"stopped": {"slow": "errors"}}, "undecided", None),
        (("slow", "control", "fast"), {"metric": "ttft"}, "better", "fast"),
        (("control", "same"), {"metric": "e2e", "unit": "request"}, "undecided", None),
        (("control", "fast"), {"metric": "feedback", "feedback_name": "stars"}, "undecided", None),
        (("control", "fast"), {"metric": "feedback", "feedback_name": "why"}, "undecided", None),
        (("control", "fast"), {"is_adaptive": True}, "better", "fast"),
    ],
)
def test_verdicts(totals, arms, changes, state, winner):
    analysis = analyse(plan_of(*arms, **changes), totals)
    assert (analysis.verdict.state, analysis.verdict.winner) == (state, winner)
    assert (analysis.mismatch is None) == bool(changes.keys() & {"is_adaptive", "stopped"})
    json.dumps(analysis.document(), allow_nan=False)


def test_arms_of_the_wrong_size_make_it_invalid(totals):
    plan = SamplePlan(
        name="budget", version=1, control="control", weights={"control": 9, "fast": 1}
    )
    verdict = analyse(plan, totals).verdict
    assert verdict.state == "invalid"
    assert "instead of 90.0%" in verdict.text


def test_guardrails_are_exceeded_kept_or_open(totals):
    analysis = analyse(plan_of("control", "slow", limits=LIMITS), totals)
    states = {
        (each.name, rail.name): rail.state for each in analysis.arms for rail in each.guardrails
    }
    assert states["control", "p95_ttft_ms"] == "kept"
    assert states["slow", "p95_ttft_ms"] == "exceeded"
    assert states["control", "error_share"] == "kept"
    assert states["slow", "error_share"] == "exceeded"
    assert states["control", "cost_per_request_usd"] == "exceeded"
    empty = analyse(plan_of("control", "slow", limits=LIMITS), {})
    assert {rail.state for each in empty.arms for rail in each.guardrails} == {"open"}


def test_text_and_json_of_a_report(totals):
    plan = plan_of("control", "fast", "slow", limits=LIMITS, stopped={"slow": "15 % errors"})
    analysis = analyse(plan, totals)
    text = printed(print_report, analysis)
    for word in ("fast against control", "TTFT p95", "slow (stopped)", "Sample ratio: 4000 : 4050",
                 "slow was stopped: 15 % errors", "feedback stars", "good: 2"):  # fmt: skip
        assert word in text
    document = json.loads(json.dumps(analysis.document(), allow_nan=False))
    assert document["verdict"]["winner"] == "fast"
    control = document["arms"][0]
    assert control["requests"] == 4000
    attained = control["shares"]["attained"]
    assert attained["low"] < attained["estimate"] < attained["high"]
    assert control["quantiles"]["ttft_s"]["p95"]["low"] > 0.3
    assert document["comparisons"][0]["shares"]["attained"]["p_value"] < 0.01


def test_an_experiment_without_requests_is_told_too():
    analysis = analyse(plan_of("control", "fast", limits=LIMITS), {})
    assert analysis.verdict.text.startswith("No request has come yet.")
    assert "requests" in printed(print_report, analysis)
    json.dumps(analysis.document(), allow_nan=False)
    with pytest.raises(ValueError, match="control"):
        SamplePlan(name="x", version=1, control="c", weights={"a": 1, "b": 1})
    with pytest.raises(ValueError, match="single arm"):
        SamplePlan(name="x", version=1, control="a", weights={"a": 1})


def test_an_arm_split_against_itself_does_not_differ(totals):
    plan = plan_of("control", "fast")
    check = self_check(plan, totals, np.random.default_rng(2), num_splits=100)
    assert check.is_sound
    assert check.arms[0].false_alarms is not None
    assert check.arms[0].false_alarms <= 0.05
    assert check.arms[0].ordinary is not None
    assert check.arms[0].ordinary > 0.1
    assert "Sound" in printed(print_check, check)
    json.dumps(check.document(), allow_nan=False)


def test_the_check_finds_units_that_are_taken_for_requests(totals):
    """All requests of a bucket alike, but told to be independent: the check must say so."""
    rng = np.random.default_rng(3)
    few = {
        name: arm(name, rng, num_requests=6000, median_s=0.42, num_users=40)
        for name in ("control", "fast")
    }
    check = self_check(
        plan_of("control", "fast", unit="request"), few, np.random.default_rng(4), num_splits=40
    )
    assert not check.is_sound
    assert "Not sound" in check.text
    small = {"control": arm("control", rng, num_requests=100, median_s=0.2)}
    nothing = self_check(plan_of("control", "fast"), small, rng, num_splits=10)
    assert nothing.is_sound
    assert "Too little data" in nothing.text
    with pytest.raises(ValueError, match="splits"):
        self_check(plan_of("control", "fast"), totals, rng, num_splits=0)


def test_requests_that_took_no_part_are_told_with_the_reason(totals):
    plan = plan_of("control", "fast", limits=LIMITS)
    none = analyse(plan, {}, {"no-unit": 250, "own-setting": 5})
    assert none.verdict.text.startswith("255 requests came, 0 took part: 250 without a user")
    assert none.verdict.state == "undecided"
    some = analyse(plan, totals, {"share": 10})
    assert "10 outside the share" in printed(print_report, some).replace("\n", " ")
    assert some.document()["passed_over"] == {"share": 10}
