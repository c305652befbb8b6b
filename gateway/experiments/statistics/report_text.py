"""The report for a terminal: tables by rich."""

import math
from collections.abc import Callable, Mapping
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.experiments.statistics.comparison import Comparison
from gateway.experiments.statistics.interval import Interval
from gateway.experiments.statistics.plan import PlanMetric
from gateway.experiments.statistics.report import (
    QUANTILES,
    Analysis,
    ArmComparison,
    ArmReport,
    quantile_name,
)
from gateway.experiments.statistics.selfcheck import SelfCheck
from gateway.experiments.totals import ShareName, SketchName, ValueName

LATENCY_TITLES: Final[Mapping[SketchName, str]] = {
    "ttft_s": "TTFT",
    "inter_token_s": "TPOT",
    "duration_s": "E2E",
}
SHARE_TITLES: Final[Mapping[ShareName, str]] = {
    "attained": "attainment",
    "failed": "errors",
    "refused": "refused",
    "cancelled": "cancelled",
    "escalated": "escalated",
    "degraded": "degraded",
}
VALUE_TITLES: Final[Mapping[ValueName, str]] = {
    "ttft_s": "TTFT mean",
    "inter_token_s": "TPOT mean",
    "duration_s": "E2E mean",
    "cost_usd": "cost mean",
    "completion_tokens": "tokens mean",
}
_STATE_STYLES: Final = {
    "better": "green",
    "worse": "yellow",
    "equivalent": "cyan",
    "invalid": "bold red",
    "mixed": "yellow",
    "undecided": "default",
}


def print_report(analysis: Analysis, console: Console) -> None:
    """Print verdict, arms, differences, guardrails and sample ratio, in that order."""
    plan = analysis.plan
    console.print(
        f"Experiment {plan.name}, version {plan.version} ({plan.state}); unit {plan.unit}, "
        f"control {plan.control}, decided by {plan.metric} at alpha {plan.alpha:g}",
        markup=False,
    )
    console.print(analysis.verdict.text, style=_STATE_STYLES[analysis.verdict.state], markup=False)
    console.print(_arms_table(analysis.arms))
    if all(arm.num_requests for arm in analysis.arms):
        for comparison in analysis.comparisons:
            console.print(_comparison_table(comparison, analysis))
    _print_guardrails(analysis, console)
    if analysis.mismatch is not None:
        counts = " : ".join(str(count) for count in analysis.mismatch.observed)
        console.print(
            f"Sample ratio: {counts} requests, p = {analysis.mismatch.p_value:.3g}"
            f"{' - MISMATCH' if analysis.mismatch.is_mismatch else ''}",
            markup=False,
        )
    else:
        console.print("Sample ratio: not tested, because weights follow the results.")


def print_check(check: SelfCheck, console: Console) -> None:
    """Print the self-check's table and its sentence."""
    table = Table(title=f"A/A check of {check.plan.name}, version {check.plan.version}")
    for title in ("arm", "requests", "design effect", "false alarms", "ordinary test"):
        table.add_column(title, justify="left" if title == "arm" else "right")
    for arm in check.arms:
        table.add_row(
            arm.arm,
            f"{arm.num_requests:,}",
            f"{arm.design_effect:.2f}",
            _percent(arm.false_alarms),
            _percent(arm.ordinary),
        )
    console.print(table)
    console.print(check.text, style="green" if check.is_sound else "bold red", markup=False)


def interval_text(interval: Interval, show: Callable[[float], str]) -> str:
    """Return estimate and bounds; a dash for unknown ones."""
    if math.isnan(interval.estimate):
        return "-"
    if math.isinf(interval.low) and math.isinf(interval.high):
        return f"{show(interval.estimate)} (?)"
    return (
        f"{show(interval.estimate)} ({_bound(interval.low, show)}..{_bound(interval.high, show)})"
    )


def milliseconds(seconds: float) -> str:
    """Return three figures and the unit."""
    return f"{seconds * 1000.0:.3g} ms" if abs(seconds) < _ONE_SECOND else f"{seconds:.3g} s"


def dollars(value: float) -> str:
    """Return three figures and the unit."""
    return f"${value:.3g}"


def share(value: float) -> str:
    """Return the share in per cent."""
    return f"{value:.2%}"


def points(value: float) -> str:
    """Return a difference of shares, in percentage points."""
    return f"{value * 100.0:.2f} pp"


def signed(show: Callable[[float], str]) -> Callable[[float], str]:
    """Return the same format with a plus before positive values."""
    return lambda value: f"+{show(value)}" if value > 0.0 else show(value)


def value_format(name: ValueName) -> Callable[[float], str]:
    """Return the format of means of this name."""
    if name == "cost_usd":
        return dollars
    return _plain if name == "completion_tokens" else milliseconds


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _bound(value: float, show: Callable[[float], str]) -> str:
    return show(value) if math.isfinite(value) else "?"


def _percent(value: float | None) -> str:
    return "too little data" if value is None else f"{value:.1%}"


def _arms_table(arms: tuple[ArmReport, ...]) -> Table:
    table = Table(title="Arms: estimate (interval)")
    table.add_column("")
    for arm in arms:
        table.add_column(f"{arm.name} (stopped)" if arm.stopped else arm.name, justify="right")
    table.add_row("requests", *(f"{arm.num_requests:,}" for arm in arms))
    table.add_row("weight", *(share(arm.weight) for arm in arms))
    for share_name, title in SHARE_TITLES.items():
        table.add_row(title, *(interval_text(arm.shares[share_name], share) for arm in arms))
    for sketch_name, title in LATENCY_TITLES.items():
        for q in QUANTILES:
            table.add_row(
                f"{title} {quantile_name(q)}",
                *(interval_text(arm.quantiles[sketch_name][q], milliseconds) for arm in arms),
            )
    for value_name, title in VALUE_TITLES.items():
        show = value_format(value_name)
        table.add_row(title, *(interval_text(arm.means[value_name], show) for arm in arms))
    for name in sorted({each.name for arm in arms for each in arm.feedback}):
        table.add_row(f"feedback {name}", *(_feedback_text(arm, name) for arm in arms))
    return table


def _feedback_text(arm: ArmReport, name: str) -> str:
    told = []
    for each in arm.feedback:
        if each.name != name:
            continue
        if each.kind == "label":
            labels = (f"{escape(label)}: {count}" for label, count in each.labels.items())
            told.append(", ".join(labels))
        else:
            show = share if each.kind == "success" else _plain
            told.append(f"{interval_text(each.interval, show)} of {each.count}")
    return "; ".join(told) or "-"


def _comparison_table(comparison: ArmComparison, analysis: Analysis) -> Table:
    plan = analysis.plan
    # a line without any requests is left out
    seen = {
        name
        for name in SHARE_TITLES
        if any(arm.shares[name].estimate > 0.0 for arm in analysis.arms)
    }
    table = Table(title=f"{comparison.arm} against {plan.control}")
    for title in ("", "difference (interval)", "lift (interval)", "p"):
        table.add_column(title, justify="left" if not title else "right")
    if comparison.primary is not None:
        show = _METRIC_FORMATS[plan.metric]
        _add(table, f"decides: {plan.metric}", comparison.primary, show, "bold")
    for share_name, title in SHARE_TITLES.items():
        if share_name in seen:
            _add(table, title, comparison.shares[share_name], points)
    for sketch_name, title in LATENCY_TITLES.items():
        for q in QUANTILES:
            found = comparison.quantiles[sketch_name][q]
            _add(table, f"{title} {quantile_name(q)}", found, milliseconds)
    for value_name, title in VALUE_TITLES.items():
        _add(table, title, comparison.means[value_name], value_format(value_name))
    for name, found in comparison.feedback.items():
        _add(table, f"feedback {name}", found, _plain)
    return table


def _add(
    table: Table, title: str, found: Comparison, show: Callable[[float], str], style: str = ""
) -> None:
    table.add_row(
        title,
        interval_text(found.difference, signed(show)),
        interval_text(found.lift, signed(share)),
        f"{found.p_value:.3g}",
        style=style or ("green" if found.p_value <= _NOTED else None),
    )


_METRIC_FORMATS: Final[Mapping[PlanMetric, Callable[[float], str]]] = {
    "attainment": points,
    "ttft": milliseconds,
    "tpot": milliseconds,
    "e2e": milliseconds,
    "cost": dollars,
    "feedback": _plain,
}
_NOTED: Final = 0.05
_ONE_SECOND: Final = 0.9995


def _print_guardrails(analysis: Analysis, console: Console) -> None:
    for arm in analysis.arms:
        for guardrail in arm.guardrails:
            console.print(
                f"Guardrail {guardrail.name} of {arm.name}: limit {guardrail.limit:g}, "
                f"{interval_text(guardrail.interval, _plain)}: {guardrail.state}",
                markup=False,
            )
        if arm.stopped:
            console.print(f"{arm.name} was stopped: {arm.stopped}", style="yellow", markup=False)
