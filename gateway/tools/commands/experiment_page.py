"""`outrider experiment report --html` and `--png`: the report as a page and as a picture."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

import typer

from outrider.gateway.experiments.statistics.decision import part_text
from outrider.gateway.experiments.statistics.interval import Interval
from outrider.gateway.experiments.statistics.report import Analysis, ArmComparison
from outrider.gateway.experiments.statistics.report_text import (
    COMPARISON_TITLES,
    ComparisonRow,
    arm_rows,
    arm_titles,
    comparison_rows,
    headline,
    notes,
)
from outrider.gateway.experiments.totals import SketchName
from outrider.gateway.settings.extras import MissingExtraError
from outrider.gateway.tools.commands.user_errors import EXIT_FAILED, complain
from outrider.gateway.tools.reports.charts import NUM_COLORS, Axis, IntervalChart, IntervalRow
from outrider.gateway.tools.reports.grids import Grid
from outrider.gateway.tools.reports.page import figure, page, write_page
from outrider.gateway.tools.reports.pictures import write_picture

_MARGIN: Final = 1.15
_LATENCIES: Final[tuple[tuple[SketchName, str], ...]] = (("ttft_s", "TTFT"), ("duration_s", "E2E"))


def write_files(analysis: Analysis, png: Path | None, html: Path | None) -> None:
    """Write the report as a picture and as a page. Exits with a message where it cannot."""
    try:
        if png is not None:
            write_experiment_png(analysis, png)
        if html is not None:
            write_page(experiment_page(analysis), html)
    except (MissingExtraError, OSError) as error:
        complain(f"the report cannot be written: {error}")
        raise typer.Exit(EXIT_FAILED) from None


# ---- the page ---------------------------------------------------------------------------------


def experiment_page(analysis: Analysis) -> str:
    """Return the page: the verdict, each arm against the control, the arms, and the notes."""
    return page(
        title=f"Experiment {analysis.plan.name}",
        subtitle=headline(analysis),
        lead=analysis.verdict.text,
        body=experiment_html(analysis),
    )


def experiment_html(analysis: Analysis) -> str:
    """Return the page's parts below its verdict."""
    parts = []
    if analysis.passed_over:
        told = part_text(analysis.num_requests, analysis.passed_over, analysis.plan.unit)
        parts.append(f'<p class="note">{escape(told)}</p>')
    if all(arm.num_requests for arm in analysis.arms):
        for comparison in analysis.comparisons:
            parts += _comparison(comparison, analysis)
    parts += [
        "<h2>Arms: estimate (interval)</h2>",
        Grid(head=["", *arm_titles(analysis.arms)], rows=list(arm_rows(analysis.arms))).html(),
        *(f'<p class="note">{escape(note)}</p>' for note in notes(analysis)),
        '<p class="note">All intervals hold however often you look. Only the row that decides '
        "keeps the experiment's alpha; of twenty others one may mislead.</p>",
    ]
    return "\n".join(parts)


def _comparison(comparison: ArmComparison, analysis: Analysis) -> Iterator[str]:
    rows = list(comparison_rows(comparison, analysis))
    yield f"<h2>{escape(comparison.arm)} against {escape(analysis.plan.control)}</h2>"
    yield _lifts(rows)
    yield Grid(head=COMPARISON_TITLES, rows=[row.cells for row in rows]).html()


def _lifts(rows: Sequence[ComparisonRow]) -> str:
    """Draw the lifts that have bounds, as intervals about no difference.

    The axis fits what decides; a wider interval is cut off at its ends.
    """
    known = [
        row
        for row in rows
        if math.isfinite(row.found.lift.low) and math.isfinite(row.found.lift.high)
    ]
    if not known:
        return ""
    deciding = [row for row in known if row.is_primary] or known
    reach = _MARGIN * max(max(abs(r.found.lift.low), abs(r.found.lift.high)) for r in deciding)
    reach = reach or 1.0
    drawn = IntervalChart(
        "Lift of each figure with its interval",
        [_row(row.title, row.found.lift, int(row.is_noted)) for row in known],
        x=Axis("lift (arm / control - 1)", low=-reach, high=reach, is_share=True),
    )
    edge = reach / _MARGIN
    text = f"with its interval; what decides lies between {-edge:+.1%} and {edge:+.1%}"
    return figure(drawn, "Lift (arm / control - 1)", text)


# ---- the picture ------------------------------------------------------------------------------


def write_experiment_png(analysis: Analysis, path: Path) -> None:
    """Write attainment and latencies of each arm, and below them their differences.

    Raises MissingExtraError without matplotlib, OSError for the file.
    """
    plan = analysis.plan
    write_picture(
        [*_arm_charts(analysis), *_difference_charts(analysis)],
        path,
        title=f"{plan.name}, version {plan.version}: decided by {plan.metric}, "
        f"alpha {plan.alpha:g}",
        note=analysis.verdict.text,
        num_columns=3,
    )


def _arm_charts(analysis: Analysis) -> Iterator[IntervalChart]:
    arms = analysis.arms
    names = [f"{arm.name}: {arm.num_requests:,} requests" for arm in arms]
    shares = [arm.shares["attained"].scaled(100.0) for arm in arms]
    yield _intervals("attainment, %", names, shares, zero=None)
    for sketch, title in _LATENCIES:
        found = [arm.quantiles[sketch][0.95].scaled(1000.0) for arm in arms]
        yield _intervals(f"{title} p95, ms", names, found, zero=None)


def _difference_charts(analysis: Analysis) -> Iterator[IntervalChart]:
    control, compared = analysis.plan.control, analysis.comparisons
    names = [each.arm for each in compared]
    points = [each.shares["attained"].difference.scaled(100.0) for each in compared]
    yield _intervals(f"attainment against {control}, points", names, points, zero=0.0)
    for sketch, title in _LATENCIES:
        lifts = [each.quantiles[sketch][0.95].lift.scaled(100.0) for each in compared]
        yield _intervals(f"{title} p95 against {control}, %", names, lifts, zero=0.0)


def _intervals(
    name: str, labels: Sequence[str], found: Sequence[Interval], *, zero: float | None
) -> IntervalChart:
    """Return a row an arm, the control in grey; a difference that may be none is grey, too."""
    rows = []
    for number, (label, interval) in enumerate(zip(labels, found, strict=True)):
        color = number % (NUM_COLORS + 1)
        if zero is not None:
            color = (number + 1) % (NUM_COLORS + 1) if interval.excludes(zero) else 0
        rows.append(_row(label, interval, color))
    return IntervalChart(name, rows, x=Axis(""), zero=zero)


def _row(label: str, interval: Interval, color: int) -> IntervalRow:
    return IntervalRow(label, interval.low, interval.estimate, interval.high, color)
