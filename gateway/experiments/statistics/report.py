"""The report of an experiment: every arm with its intervals, every difference, the verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from outrider.gateway.experiments.statistics.binomial import compare_shares, share_interval
from outrider.gateway.experiments.statistics.clusters import latency_design_effect
from outrider.gateway.experiments.statistics.comparison import Comparison
from outrider.gateway.experiments.statistics.decision import Conclusion, decide, part_text
from outrider.gateway.experiments.statistics.interval import Interval, check_alpha, finite
from outrider.gateway.experiments.statistics.means import compare_means, mean_interval
from outrider.gateway.experiments.statistics.mismatch import Mismatch, sample_ratio_mismatch
from outrider.gateway.experiments.statistics.plan import SamplePlan
from outrider.gateway.experiments.statistics.quantiles import compare_quantiles, quantile_interval
from outrider.gateway.experiments.totals import (
    SHARE_NAMES,
    SKETCH_NAMES,
    VALUE_NAMES,
    ArmTotals,
    FeedbackTotals,
    MetricName,
    ShareName,
    SketchName,
    ValueName,
)

QUANTILES: Final = (0.5, 0.95, 0.99)
GuardrailState = Literal["kept", "open", "exceeded"]

_METRICS: Final[Mapping[str, MetricName]] = {
    "attainment": "attained",
    "ttft": "ttft_s",
    "tpot": "inter_token_s",
    "e2e": "duration_s",
    "cost": "cost_usd",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackReport:
    """Outcomes of one name: scores by their mean, successes by their share, labels by count."""

    name: str
    kind: str
    count: int
    interval: Interval
    labels: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailReport:
    """One limit of one arm: kept and exceeded are sure, open is neither. In the limit's unit."""

    name: str
    limit: float
    interval: Interval

    @property
    def state(self) -> GuardrailState:
        """Return the state that the interval shows."""
        if self.interval.is_above(self.limit):
            return "exceeded"
        return "kept" if self.interval.high <= self.limit else "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReport:
    """One arm. Every interval alone has level alpha; times are seconds."""

    name: str
    weight: float
    num_requests: int
    stopped: str | None
    shares: Mapping[ShareName, Interval]
    means: Mapping[ValueName, Interval]
    quantiles: Mapping[SketchName, Mapping[float, Interval]]
    feedback: tuple[FeedbackReport, ...]
    guardrails: tuple[GuardrailReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """One arm against the control.

    Every comparison but `primary` alone has level alpha: of many, one in twenty may mislead.
    """

    arm: str
    primary: Comparison | None
    """Decides, at its share of alpha; None where it cannot be made."""
    shares: Mapping[ShareName, Comparison]
    means: Mapping[ValueName, Comparison]
    quantiles: Mapping[SketchName, Mapping[float, Comparison]]
    feedback: Mapping[str, Comparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The present report on one version of an experiment."""

    plan: SamplePlan
    arms: tuple[ArmReport, ...]
    comparisons: tuple[ArmComparison, ...]
    mismatch: Mismatch | None
    """None if adaptive."""
    verdict: Conclusion
    passed_over: Mapping[str, int] = field(default_factory=dict)
    """Requests that took no part while it ran, by reason (`PassReason`)."""

    @property
    def num_requests(self) -> int:
        """Return the number of requests that took part."""
        return sum(arm.num_requests for arm in self.arms)

    def document(self) -> dict[str, Any]:
        """Return the report as JSON. Quantiles are keyed p50, p95 and p99."""
        plan = self.plan
        return {
            "experiment": plan.name,
            "version": plan.version,
            "state": plan.state,
            "metric": plan.metric,
            "alpha": plan.alpha,
            "unit": plan.unit,
            "control": plan.control,
            "is_adaptive": plan.is_adaptive,
            "verdict": {
                "state": self.verdict.state,
                "is_decided": self.verdict.is_decided,
                "winner": self.verdict.winner,
                "text": self.verdict.text,
            },
            "mismatch": None if self.mismatch is None else self.mismatch.document(),
            "requests": self.num_requests,
            "passed_over": dict(self.passed_over),
            "arms": [_arm_document(arm) for arm in self.arms],
            "comparisons": [_comparison_document(each) for each in self.comparisons],
        }


def analyse(
    plan: SamplePlan,
    totals: Mapping[str, ArmTotals],
    passed_over: Mapping[str, int] | None = None,
) -> Analysis:
    """Analyse. Arms without totals are empty. `passed_over`: requests that took no part, by reason.

    Raises ValueError for alpha not in (0, 1).
    """
    check_alpha(plan.alpha)
    by_arm = {
        name: totals.get(name) or ArmTotals(experiment=plan.name, version=plan.version, arm=name)
        for name in plan.weights
    }
    control = by_arm[plan.control]
    comparisons = tuple(_compare(plan, control, by_arm[name]) for name in plan.others)
    mismatch = _mismatch(plan, by_arm)
    passed = dict(passed_over or {})
    primary = {each.arm: each.primary for each in comparisons}
    verdict = decide(plan, primary, mismatch)
    if not any(arm.num_requests for arm in by_arm.values()):
        verdict = replace(verdict, text=part_text(0, passed, plan.unit))
    return Analysis(
        plan=plan,
        arms=tuple(_arm(plan, name, each) for name, each in by_arm.items()),
        comparisons=comparisons,
        mismatch=mismatch,
        verdict=verdict,
        passed_over=passed,
    )


def _arm(plan: SamplePlan, name: str, totals: ArmTotals) -> ArmReport:
    alpha, alone = plan.alpha, plan.is_independent
    return ArmReport(
        name=name,
        weight=plan.weights[name] / sum(plan.weights.values()),
        num_requests=totals.num_requests,
        stopped=plan.stopped.get(name),
        shares={
            each: share_interval(totals.metrics[each], alpha, is_independent=alone)
            for each in SHARE_NAMES
        },
        means={
            each: mean_interval(totals.metrics[each], alpha, is_independent=alone)
            for each in VALUE_NAMES
        },
        quantiles={
            each: {
                q: quantile_interval(
                    totals.sketches[each],
                    q,
                    alpha,
                    design_effect=latency_design_effect(totals, each, alpha, is_independent=alone),
                )
                for q in QUANTILES
            }
            for each in SKETCH_NAMES
        },
        feedback=tuple(_feedback(each, alpha, alone) for each in totals.feedback),
        guardrails=_guardrails(plan, totals),
    )


def _feedback(totals: FeedbackTotals, alpha: float, is_independent: bool) -> FeedbackReport:
    values = totals.values
    if totals.kind == "success":
        interval = share_interval(values, alpha, is_independent=is_independent)
    elif totals.kind == "score":
        interval = mean_interval(values, alpha, is_independent=is_independent)
    else:
        interval = Interval(estimate=math.nan, low=-math.inf, high=math.inf)
    return FeedbackReport(
        name=totals.name,
        kind=totals.kind,
        count=values.n,
        interval=interval,
        labels=dict(totals.labels),
    )


def _guardrails(plan: SamplePlan, totals: ArmTotals) -> tuple[GuardrailReport, ...]:
    limits, alone = plan.limits, plan.is_independent
    wanted = (limits.p95_ttft_ms, limits.error_share, limits.cost_per_request_usd)
    num_limits = sum(limit is not None for limit in wanted)
    if num_limits == 0:
        return ()
    # all limits of all arms together err with the guardrails' alpha
    alpha = limits.alpha / num_limits / len(plan.weights)
    found = []
    if limits.p95_ttft_ms is not None:
        effect = latency_design_effect(totals, "ttft_s", alpha, is_independent=alone)
        interval = quantile_interval(
            totals.sketches["ttft_s"], 0.95, alpha, design_effect=effect
        ).scaled(1000.0)
        found.append(
            GuardrailReport(name="p95_ttft_ms", limit=limits.p95_ttft_ms, interval=interval)
        )
    if limits.error_share is not None:
        interval = share_interval(totals.metrics["failed"], alpha, is_independent=alone)
        found.append(
            GuardrailReport(name="error_share", limit=limits.error_share, interval=interval)
        )
    if limits.cost_per_request_usd is not None:
        interval = mean_interval(totals.metrics["cost_usd"], alpha, is_independent=alone)
        found.append(
            GuardrailReport(
                name="cost_per_request_usd", limit=limits.cost_per_request_usd, interval=interval
            )
        )
    return tuple(found)


def _compare(plan: SamplePlan, control: ArmTotals, arm: ArmTotals) -> ArmComparison:
    alpha, alone = plan.alpha, plan.is_independent
    return ArmComparison(
        arm=arm.arm,
        primary=_primary(plan, control, arm),
        shares={
            name: compare_shares(
                control.metrics[name], arm.metrics[name], alpha, is_independent=alone
            )
            for name in SHARE_NAMES
        },
        means={
            name: compare_means(
                control.metrics[name], arm.metrics[name], alpha,
                is_independent=alone, is_adaptive=plan.is_adaptive,
            )
            for name in VALUE_NAMES
        },
        quantiles={
            name: {
                q: compare_quantiles(
                    control.sketches[name], arm.sketches[name], q, alpha,
                    design_effects=(
                        latency_design_effect(control, name, alpha, is_independent=alone),
                        latency_design_effect(arm, name, alpha, is_independent=alone),
                    ),
                )
                for q in QUANTILES
            }
            for name in SKETCH_NAMES
        },
        feedback={
            each.name: found
            for each in control.feedback
            if (found := _compare_feedback(plan, control, arm, each.name, alpha)) is not None
        },
    )  # fmt: skip


def _primary(plan: SamplePlan, control: ArmTotals, arm: ArmTotals) -> Comparison | None:
    alpha, alone = plan.comparison_alpha, plan.is_independent
    if plan.metric == "feedback":
        name = plan.feedback_name or (control.feedback[0].name if control.feedback else "")
        return _compare_feedback(plan, control, arm, name, alpha)
    metric = _METRICS[plan.metric]
    one, two = control.metrics[metric], arm.metrics[metric]
    if one.n == 0 or two.n == 0:
        return None
    if plan.metric == "attainment":
        return compare_shares(one, two, alpha, is_independent=alone)
    return compare_means(one, two, alpha, is_independent=alone, is_adaptive=plan.is_adaptive)


def _compare_feedback(
    plan: SamplePlan, control: ArmTotals, arm: ArmTotals, name: str, alpha: float
) -> Comparison | None:
    """Compare feedback; None for labels, and unless both arms have the name and the same kind."""
    one = next((f for f in control.feedback if f.name == name and f.kind != "label"), None)
    if one is None:
        return None
    two = next((f for f in arm.feedback if f.name == name and f.kind == one.kind), None)
    if two is None:
        return None
    alone = plan.is_independent
    if one.kind == "success":
        return compare_shares(one.values, two.values, alpha, is_independent=alone)
    return compare_means(
        one.values, two.values, alpha, is_independent=alone, is_adaptive=plan.is_adaptive
    )


def _mismatch(plan: SamplePlan, totals: Mapping[str, ArmTotals]) -> Mismatch | None:
    """Test the ratio; None if adaptive. Stopped arms are left out: they no longer grow."""
    if plan.is_adaptive:
        return None
    live = [name for name in plan.weights if name not in plan.stopped]
    if len(live) < 2:
        return None
    counts = np.stack([totals[name].requests_by_bucket for name in live])
    return sample_ratio_mismatch(
        counts, [plan.weights[name] for name in live], is_independent=plan.is_independent
    )


def quantile_name(q: float) -> str:
    """Return p50, p95 or p99."""
    return f"p{q * 100.0:g}"


def _arm_document(arm: ArmReport) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "weight": arm.weight,
        "requests": arm.num_requests,
        "stopped": arm.stopped,
        "shares": {name: each.document() for name, each in arm.shares.items()},
        "means": {name: each.document() for name, each in arm.means.items()},
        "quantiles": {
            name: {quantile_name(q): each.document() for q, each in found.items()}
            for name, found in arm.quantiles.items()
        },
        "feedback": [
            {
                "name": each.name,
                "kind": each.kind,
                "count": each.count,
                **each.interval.document(),
                "labels": dict(each.labels),
            }
            for each in arm.feedback
        ],
        "guardrails": [
            {
                "name": each.name,
                "limit": finite(each.limit),
                "state": each.state,
                **each.interval.document(),
            }
            for each in arm.guardrails
        ],
    }


def _comparison_document(comparison: ArmComparison) -> dict[str, Any]:
    primary = comparison.primary
    return {
        "arm": comparison.arm,
        "primary": None if primary is None else primary.document(),
        "shares": {name: each.document() for name, each in comparison.shares.items()},
        "means": {name: each.document() for name, each in comparison.means.items()},
        "quantiles": {
            name: {quantile_name(q): each.document() for q, each in found.items()}
            for name, found in comparison.quantiles.items()
        },
        "feedback": {name: each.document() for name, each in comparison.feedback.items()},
    }
