"""The report for a terminal: tables by rich."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.gateway.experiments.statistics.comparison import Comparison
from outrider.gateway.experiments.statistics.decision import part_text
from outrider.gateway.experiments.statistics.interval import Interval
from outrider.gateway.experiments.statistics.plan import PlanMetric
from outrider.gateway.experiments.statistics.report import (
    QUANTILES,
    Analysis,
    ArmComparison,
    ArmReport,
    quantile_name,
)
from outrider.gateway.experiments.statistics.selfcheck import SelfCheck
from outrider.gateway.experiments.totals import ShareName, SketchName, ValueName

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
    console.print(headline(analysis), markup=False)
    console.print(analysis.verdict.text, style=_STATE_STYLES[analysis.verdict.state], markup=False)
    if analysis.num_requests and analysis.passed_over:
        told = part_text(analysis.num_requests, analysis.passed_over, plan.unit)
        console.print(told, markup=False)
    console.print(_arms_table(analysis.arms))
    if all(arm.num_requests for arm in analysis.arms):
        for comparison in analysis.comparisons:
            console.print(_comparison_table(comparison, analysis))
    for note in notes(analysis):
        console.print(note, markup=False)


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


def arm_rows(arms: tuple[ArmReport, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of arms: a title, then a cell of each arm."""
    yield ("requests", *(f"{arm.num_requests:,}" for arm in arms))
    yield ("weight", *(share(arm.weight) for arm in arms))
    for share_name, title in SHARE_TITLES.items():
        yield (title, *(interval_text(arm.shares[share_name], share) for arm in arms))
    for sketch_name, title in LATENCY_TITLES.items():
        for q in QUANTILES:
            yield (
                f"{title} {quantile_name(q)}",
                *(interval_text(arm.quantiles[sketch_name][q], milliseconds) for arm in arms),
            )
    for value_name, title in VALUE_TITLES.items():
        show = value_format(value_name)
        yield (title, *(interval_text(arm.means[value_name], show) for arm in arms))
    for name in sorted({each.name for arm in arms for each in arm.feedback}):
        yield (f"feedback {name}", *(_feedback_text(arm, name) for arm in arms))


def arm_titles(arms: tuple[ArmReport, ...]) -> list[str]:
    """Return the heads of the table of arms."""
    return [f"{arm.name} (stopped)" if arm.stopped else arm.name for arm in arms]


def _arms_table(arms: tuple[ArmReport, ...]) -> Table:
    table = Table(title="Arms: estimate (interval)")
    table.add_column("")
    for title in arm_titles(arms):
        table.add_column(title, justify="right", overflow="fold")
    for row in arm_rows(arms):
        table.add_row(*(escape(cell) for cell in row))
    return table


def _feedback_text(arm: ArmReport, name: str) -> str:
    told = []
    for each in arm.feedback:
        if each.name != name:
            continue
        if each.kind == "label":
            labels = (f"{label}: {count}" for label, count in each.labels.items())
            told.append(", ".join(labels))
        else:
            show = share if each.kind == "success" else _plain
            told.append(f"{interval_text(each.interval, show)} of {each.count}")
    return "; ".join(told) or "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """A figure of an arm against the control's; `is_primary`: it decides."""

    title: str
    found: Comparison
    show: Callable[[float], str]
    is_primary: bool = False

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Title, difference, lift and p-value as text."""
        return (
            self.title,
            interval_text(self.found.difference, signed(self.show)),
            interval_text(self.found.lift, signed(share)),
            f"{self.found.p_value:.3g}",
        )

    @property
    def is_noted(self) -> bool:
        """Return whether the difference is unlikely to be chance."""
        return self.found.p_value <= _NOTED


def comparison_rows(comparison: ArmComparison, analysis: Analysis) -> Iterator[ComparisonRow]:
    """Yield the rows of a comparison, the deciding one first; without events that never came."""
    plan = analysis.plan
    if comparison.primary is not None:
        title, show = f"decides: {plan.metric}", _METRIC_FORMATS[plan.metric]
        yield ComparisonRow(title=title, found=comparison.primary, show=show, is_primary=True)
    for share_name, title in SHARE_TITLES.items():
        if any(arm.shares[share_name].estimate > 0.0 for arm in analysis.arms):
            yield ComparisonRow(title=title, found=comparison.shares[share_name], show=points)
    for sketch_name, title in LATENCY_TITLES.items():
        for q in QUANTILES:
            found = comparison.quantiles[sketch_name][q]
            yield ComparisonRow(title=f"{title} {quantile_name(q)}", found=found, show=milliseconds)
    for value_name, title in VALUE_TITLES.items():
        found = comparison.means[value_name]
        yield ComparisonRow(title=title, found=found, show=value_format(value_name))
    for name, found in comparison.feedback.items():
        yield ComparisonRow(title=f"feedback {name}", found=found, show=_plain)


COMPARISON_TITLES: Final = ("", "difference (interval)", "lift (interval)", "p")


def _comparison_table(comparison: ArmComparison, analysis: Analysis) -> Table:
    table = Table(title=f"{comparison.arm} against {analysis.plan.control}")
    for title in COMPARISON_TITLES:
        table.add_column(title, justify="right" if title else "left", overflow="fold")
    for row in comparison_rows(comparison, analysis):
        style = "bold" if row.is_primary else "green" if row.is_noted else None
        table.add_row(*map(escape, row.cells), style=style)
    return table


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


def notes(analysis: Analysis) -> Iterator[str]:
    """Yield the sentences below the tables: guardrails, stopped arms, sample ratio."""
    for arm in analysis.arms:
        for guardrail in arm.guardrails:
            yield (
                f"Guardrail {guardrail.name} of {arm.name}: limit {guardrail.limit:g}, "
                f"{interval_text(guardrail.interval, _plain)}: {guardrail.state}"
            )
        if arm.stopped:
            yield f"{arm.name} was stopped: {arm.stopped}"
    if analysis.mismatch is None:
        yield "Sample ratio: not tested, because weights follow the results."
        return
    counts = " : ".join(str(count) for count in analysis.mismatch.observed)
    mark = " - MISMATCH" if analysis.mismatch.is_mismatch else ""
    yield f"Sample ratio: {counts} requests, p = {analysis.mismatch.p_value:.3g}{mark}"


def headline(analysis: Analysis) -> str:
    """Return what the experiment is, in a line."""
    plan = analysis.plan
    return (
        f"Experiment {plan.name}, version {plan.version} ({plan.state}); unit {plan.unit}, "
        f"control {plan.control}, decided by {plan.metric} at alpha {plan.alpha:g}"
    )
