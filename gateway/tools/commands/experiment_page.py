"""`outrider experiment report --html`: the report as one self-contained page."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final

import typer

from outrider.gateway.experiments.statistics.decision import part_text
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
from outrider.gateway.tools.commands.report_page import filled_page
from outrider.gateway.tools.commands.user_errors import EXIT_FAILED, complain
from outrider.gateway.tools.measuring.bench.bench_tables import Grid
from outrider.gateway.tools.measuring.bench.plots import Axis, IntervalRow, spans
from outrider.gateway.tools.measuring.bench.report_charts import figure

_MARGIN: Final = 1.15


def write_files(analysis: Analysis, png: Path | None, html: Path | None) -> None:
    """Write the report as a picture and as a page. Exits with a message where it cannot."""
    from outrider.gateway.experiments.statistics.report_png import PlotsMissingError, write_png

    try:
        if png is not None:
            write_png(analysis, png)
        if html is not None:
            html.write_text(experiment_page(analysis), encoding="utf-8")
    except (PlotsMissingError, OSError) as error:
        complain(f"the report cannot be written: {error}")
        raise typer.Exit(EXIT_FAILED) from None


def experiment_page(analysis: Analysis) -> str:
    """Return the page: the verdict, each arm against the control, the arms, and the notes."""
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
    return filled_page(
        "measuring/bench/bench_report.html",
        title=escape(f"Experiment {analysis.plan.name}"),
        subtitle=escape(headline(analysis)),
        lead=escape(analysis.verdict.text),
        body="\n".join(parts),
    )


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
    svg = spans(
        [_span(row, reach) for row in known],
        x=Axis(label="lift (arm / control - 1)", low=-reach, high=reach, is_share=True),
        name="Lift of each figure with its interval",
    )
    edge = reach / _MARGIN
    text = f"with its interval; what decides lies between {-edge:+.1%} and {edge:+.1%}"
    return figure(svg, "Lift (arm / control - 1)", text)


def _span(row: ComparisonRow, reach: float) -> IntervalRow:
    lift = row.found.lift
    low, high = (min(max(one, -reach), reach) for one in (lift.low, lift.high))
    value = lift.estimate if abs(lift.estimate) <= reach else math.nan
    return IntervalRow(
        label=row.title, low=low, value=value, high=high, color=1 if row.is_noted else 0
    )
