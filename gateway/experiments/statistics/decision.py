"""The decision of an experiment: its verdict, in words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from outrider.gateway.experiments.statistics.comparison import Comparison
from outrider.gateway.experiments.statistics.interval import Interval
from outrider.gateway.experiments.statistics.mismatch import Mismatch
from outrider.gateway.experiments.statistics.plan import PlanMetric, SamplePlan, UnitName

VerdictState = Literal["undecided", "better", "worse", "equivalent", "mixed", "invalid"]

METRIC_WORDS: Final[Mapping[PlanMetric, str]] = {
    "attainment": "attainment",
    "ttft": "mean time to first token",
    "tpot": "mean inter-token time",
    "e2e": "mean end-to-end time",
    "cost": "mean cost of a request",
    "feedback": "feedback",
}
_WRITTEN: Final[Mapping[PlanMetric, tuple[float, str, str]]] = {
    "attainment": (100.0, " points", ".2f"),
    "ttft": (1000.0, " ms", ".4g"),
    "tpot": (1000.0, " ms", ".4g"),
    "e2e": (1000.0, " ms", ".4g"),
    "cost": (1.0, " USD", ".3g"),
    "feedback": (1.0, "", ".3g"),
}
"""The factor of a value, its unit and its format."""
_HIGHER_IS_BETTER: Final = frozenset({"attainment", "feedback"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The conclusion of an experiment."""

    state: VerdictState
    """better: an arm surely beats the control. worse: the control beats every arm. mixed: it beats
    some. equivalent: no difference that matters. invalid: the arms' sizes are wrong."""
    text: str
    winner: str | None = None
    """The arm that beats the control."""

    @property
    def is_decided(self) -> bool:
        """Return whether the experiment may end with this."""
        return self.state in ("better", "worse", "equivalent")


def decide(
    plan: SamplePlan, comparisons: Mapping[str, Comparison | None], mismatch: Mismatch | None
) -> Conclusion:
    """Decide by each arm's comparison with the control on the deciding metric.

    `comparisons`: None where it could not be made. `mismatch`: None where it is not tested.
    """
    if mismatch is not None and mismatch.is_mismatch:
        return Conclusion(state="invalid", text=_mismatch_text(mismatch))
    known = {
        arm: found
        for arm, found in comparisons.items()
        if found is not None and arm not in plan.stopped
    }
    if not known:
        return Conclusion(state="undecided", text=f"Nothing to compare yet by {_metric(plan)}.")
    sign = 1.0 if plan.metric in _HIGHER_IS_BETTER else -1.0
    better = [arm for arm, found in known.items() if _surely(found, sign)]
    worse = [arm for arm, found in known.items() if _surely(found, -sign)]
    if better:
        return _better(plan, known, better, sign)
    if len(worse) == len(known):
        told = "; ".join(f"{arm} {phrase(plan.metric, known[arm].difference)}" for arm in worse)
        return Conclusion(
            state="worse",
            winner=plan.control,
            text=f"No arm beats {_control(plan)} by {_metric(plan)}: {told}.",
        )
    if all(_is_small(found, plan.min_effect) for found in known.values()):
        return Conclusion(
            state="equivalent",
            text=(
                f"No difference of {_metric(plan)} that matters: all are within "
                f"{_amount(plan.metric, plan.min_effect or 0.0)} of {_control(plan)}."
            ),
        )
    told = "; ".join(
        f"{arm} {phrase(plan.metric, found.difference)}{_outlook(found)}"
        for arm, found in known.items()
    )
    if worse:
        return Conclusion(
            state="mixed", text=f"Worse by {_metric(plan)}: {', '.join(worse)}. {told}."
        )
    return Conclusion(
        state="undecided", text=f"No difference of {_metric(plan)} has been shown yet: {told}."
    )


def phrase(metric: PlanMetric, interval: Interval) -> str:
    """Describe a difference: estimate and bounds with their unit."""
    if not math.isfinite(interval.low) or not math.isfinite(interval.high):
        return "not enough data"
    scale, unit, figures = _WRITTEN[metric]
    estimate, low, high = (
        f"{value * scale:+{figures}}" for value in (interval.estimate, interval.low, interval.high)
    )
    return f"{estimate}{unit} ({low} to {high})"


def part_text(num_requests: int, passed_over: Mapping[str, int], unit: UnitName) -> str:
    """Say how many requests came while the experiment ran, and why some took no part."""
    total = num_requests + sum(passed_over.values())
    if not total:
        return "No request has come yet. Counts arrive some seconds after the requests."
    reasons = {"no-unit": _NO_UNIT[unit], **_REASONS}
    told = "; ".join(
        f"{count:,} {reasons.get(reason, reason)}"
        for reason, count in sorted(passed_over.items(), key=lambda pair: -pair[1])
    )
    came = "request came" if total == 1 else "requests came"
    return f"{total:,} {came}, {num_requests:,} took part{': ' + told if told else ''}."


_NO_UNIT: Final[Mapping[UnitName, str]] = {
    "user": "without a user (send safety_identifier or user, or use another unit)",
    "key": "without a key (create keys, or use another unit)",
    "conversation": "without a message of a user",
    "request": "without an id",
}
_REASONS: Final[Mapping[str, str]] = {
    "share": "outside the share, or in another experiment of the layer",
    "own-setting": "set what the arms set (a model of their own, for example)",
    "not-eligible": "not eligible",
    "scope": "with a key that may not use every arm",
}


def _better(
    plan: SamplePlan, known: Mapping[str, Comparison], better: list[str], sign: float
) -> Conclusion:
    winner = max(better, key=lambda arm: sign * known[arm].difference.estimate)
    text = (
        f"{winner} is better than {_control(plan)} by {_metric(plan)}: "
        f"{phrase(plan.metric, known[winner].difference)}."
    )
    rest = [arm for arm in better if arm != winner]
    if rest:
        text += f" Better than the control too, and not told apart from it: {', '.join(rest)}."
    return Conclusion(state="better", winner=winner, text=text)


def _surely(comparison: Comparison, sign: float) -> bool:
    difference = comparison.difference
    return difference.is_above(0.0) if sign > 0.0 else difference.is_below(0.0)


def _is_small(comparison: Comparison, min_effect: float | None) -> bool:
    if min_effect is None:
        return False
    difference = comparison.difference
    return difference.low > -min_effect and difference.high < min_effect


def _outlook(comparison: Comparison) -> str:
    """Return how many times the data it takes, should the estimate be the truth."""
    difference = comparison.difference
    reach = (difference.high - difference.low) / 2.0
    if not math.isfinite(reach) or difference.estimate == 0.0:
        return ""
    factor = (reach / abs(difference.estimate)) ** 2
    if factor > _FAR:
        return ""
    return f", to be shown with about {max(factor, 1.1):.1f} times the data if that is the truth"


_FAR: Final = 100.0


def _metric(plan: SamplePlan) -> str:
    if plan.metric == "feedback" and plan.feedback_name:
        return f"feedback {plan.feedback_name}"
    return METRIC_WORDS[plan.metric]


def _control(plan: SamplePlan) -> str:
    return "the control" if plan.control == "control" else f"the control {plan.control}"


def _amount(metric: PlanMetric, value: float) -> str:
    scale, unit, figures = _WRITTEN[metric]
    return f"{value * scale:{figures}}{unit}"


def _mismatch_text(mismatch: Mismatch) -> str:
    total = max(1, sum(mismatch.observed))
    told = ", ".join(
        f"{count / total:.1%} instead of {share:.1%}"
        for count, share in zip(mismatch.observed, mismatch.expected_shares, strict=True)
    )
    return (
        f"The sizes of the arms do not match their weights ({told}; p = {mismatch.p_value:.1g}): "
        "find the cause before you trust any difference."
    )
