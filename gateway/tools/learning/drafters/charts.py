"""The charts of `outrider draft tune` and `compare`: acceptance by depth, tokens per second."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from outrider.draft.training.compare import Compared, plain_tokens_per_s
from outrider.draft.training.tune import TuneReport
from outrider.gateway.tools.learning.drafters.drafter_tables import (
    COMPARED_TITLE,
    compared_grid,
    pace_text,
)
from outrider.gateway.tools.reports.charts import (
    NUM_COLORS,
    AnyChart,
    Axis,
    Chart,
    IntervalChart,
    PlotSeries,
    ReferenceLine,
    bar,
)
from outrider.gateway.tools.reports.page import figure, figures, page, write_page
from outrider.gateway.tools.reports.pictures import write_picture

_TERMS: Final[Mapping[str, str]] = {
    "Level": "One pass of the drafter, which guesses one token further.",
    "Chains, trees": "Tokens a second over plain decoding's in the same round: with a chain of "
    "first choices, and with trees sized by cost, as outrider serve drafts.",
}


def draw_plots(report: TuneReport, folder: Path) -> list[Path]:
    """Write acceptance_by_depth.png and speed_by_tree_size.png; returns their paths."""
    charts = {
        "acceptance_by_depth.png": _acceptance(report),
        "speed_by_tree_size.png": _speed(report),
    }
    return [write_picture([chart], folder / name) for name, chart in charts.items()]


def draw_comparison(found: Sequence[Compared], path: Path) -> Path:
    """Write acceptance by depth and tokens per second of drafters: a picture, or a page.

    Raises ReportError or OSError where it cannot be written.
    """
    if path.suffix != ".html":
        return write_picture(_compared(found), path, num_columns=2)
    drawn = (figure(chart, f"{chart.name}.", "") for chart in _compared(found))
    html = page(
        title=f"Drafters: {', '.join(one.name for one in found)}",
        subtitle="measured on the same prompts, in turn with plain decoding",
        lead=pace_text(found),
        body=f"{figures(drawn)}\n<h2>{COMPARED_TITLE}</h2>\n{compared_grid(found).html()}",
        terms=_TERMS,
    )
    write_page(html, path)
    return path


def _compared(found: Sequence[Compared]) -> Iterator[AnyChart]:
    levels, pace = [], plain_tokens_per_s(found)
    for number, one in enumerate(found):
        label = f"{one.name} ({one.kind}, {1e3 * one.level_s:.2f} ms a level)"
        shares = one.level_acceptance
        depths = range(1, len(shares) + 1)
        levels.append(PlotSeries(label, depths, shares, _color(number), kind="marked"))
    yield _by_depth("First choices accepted where those above were", levels, "depth in tokens")
    rows = [
        bar(f"{one.name}: {one.tree_ratio:.2f} x plain", one.tree_ratio * pace, _color(number))
        for number, one in enumerate(found)
    ]
    axis = Axis("tokens per second", low=0.0)
    yield IntervalChart("Tokens per second with trees (line: plain)", rows, x=axis, zero=pace)


def _color(number: int) -> int:
    return number % NUM_COLORS + 1


def _by_depth(name: str, series: Sequence[PlotSeries], label: str) -> Chart:
    depths = sorted({depth for one in series for depth in one.x})
    return Chart(
        name,
        series,
        x=Axis(label, low=0.7, ticks=depths),
        y=Axis("share accepted", high=1.03, is_share=True),
    )


def _acceptance(report: TuneReport) -> Chart:
    """Plot acceptance by depth of the deepest full trees; adaptive trees end at varying depths."""
    full = [tried for tried in report.tried if not tried.choice.adaptive]
    shown = max(
        full or report.tried,
        key=lambda tried: (tried.choice.max_draft_nodes, tried.choice.max_draft_depth),
    )
    choice, runs = shown.choice, shown.runs
    depths = range(1, min(len(run.accepted_per_depth) for run in runs) + 1)
    lines = {
        "a level, once the one above was accepted": [run.level_acceptance for run in runs],
        "the whole path so far": [run.path_acceptance for run in runs],
    }
    series = [
        PlotSeries(label, depths, _mean(rows, len(depths)), color, kind="marked")
        for color, (label, rows) in zip((3, 2), lines.items(), strict=True)
    ]
    kind = "adaptive trees" if choice.adaptive else "full trees"
    label = (
        f"depth in tokens ({kind} of {choice.max_draft_nodes} nodes, "
        f"{choice.max_branching} alternatives a token)"
    )
    return _by_depth("Acceptance by depth", series, label)


def _mean(rows: Sequence[Sequence[float]], length: int) -> list[float]:
    return [sum(row[place] for row in rows) / len(rows) for place in range(length)]


def _speed(report: TuneReport) -> Chart:
    sizes = {t.choice.max_draft_nodes for t in report.tried if t.limit == "max_draft_nodes"}
    adaptive = _speed_lines(report, "adaptive: sized by cost up to the limit", 3, adaptive=True)
    full = _speed_lines(report, "full trees", 2, adaptive=False)
    plain = ReferenceLine(report.plain_tokens_per_s, "plain decoding", is_vertical=False)
    return Chart(
        "Tokens per second by tree size",
        [*adaptive, *full],
        x=Axis("drafted tokens allowed in a tree", scale="log", ticks=sorted(sizes)),
        y=Axis("tokens per second"),
        marks=[plain],
    )


def _speed_lines(
    report: TuneReport, label: str, color: int, *, adaptive: bool
) -> Iterator[PlotSeries]:
    """The median over the rounds and how far they spread, at plain decoding's median pace.

    Each round's rate is taken relative to plain decoding in that round: what the machine did in
    between is no property of a tree.
    """
    tried, pace = report.of_limit("max_draft_nodes", adaptive=adaptive), report.plain_tokens_per_s
    sizes = [case.choice.max_draft_nodes for case in tried]
    middle = [case.ratio * pace for case in tried]
    low = [min(case.ratios) * pace for case in tried]
    high = [max(case.ratios) * pace for case in tried]
    yield PlotSeries(label, sizes, middle, color, low=low, high=high)
    yield PlotSeries("", sizes, middle, color, kind="dots")
