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
from outrider.gateway.tools.measuring.bench.report_tables import table

_WIDTH: Final = 640
_LABELS: Final = 150
_ROW: Final = 24
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
        table(["", *arm_titles(analysis.arms)], list(arm_rows(analysis.arms))),
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
    yield table(COMPARISON_TITLES, [row.cells for row in rows])


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
    height = _ROW * len(known) + 30

    def x(value: float) -> float:
        inside = min(max(value, -reach), reach)
        return _LABELS + (_WIDTH - _LABELS) * (inside + reach) / (2.0 * reach)

    marks = [f'<path class="axis" d="M{x(0):.1f} 0V{height - 24}" stroke-dasharray="3 3"/>']
    for place, row in enumerate(known):
        y, lift = _ROW * place + 14, row.found.lift
        color = "var(--c1)" if row.is_noted else "var(--soft)"
        marks += [
            f'<text class="row" x="{_LABELS - 8}" y="{y + 4}">{escape(row.title)}</text>',
            f'<path class="line" stroke="{color}" d="M{x(lift.low):.1f} {y}H{x(lift.high):.1f}"/>',
        ]
        if abs(lift.estimate) <= reach:
            marks.append(f'<circle cx="{x(lift.estimate):.1f}" cy="{y}" r="4" fill="{color}"/>')
    for value in (-reach / _MARGIN, 0.0, reach / _MARGIN):
        text = f"{value:+.1%}" if value else "no difference"
        marks.append(f'<text class="x" x="{x(value):.1f}" y="{height - 6}">{text}</text>')
    return (
        f'<figure class="chart"><svg viewBox="0 0 {_WIDTH + 40} {height}" role="img" '
        f'aria-label="Lift of each figure with its interval">{"".join(marks)}</svg>'
        "<figcaption>Lift (arm / control - 1) with its interval</figcaption></figure>"
    )
