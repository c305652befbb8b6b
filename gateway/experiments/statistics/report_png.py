"""The report as a picture: intervals of attainment and of latencies, arms above differences."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outrider.gateway.experiments.statistics.interval import Interval
from outrider.gateway.experiments.statistics.report import Analysis
from outrider.gateway.experiments.totals import SketchName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK: Final = "#1c2325"
_SOFT: Final = "#5d6a6e"
_GRID: Final = "#dfe3e4"
_UNSURE: Final = "#8a979b"
_COLORS: Final = ("#5d6a6e", "#2563a8", "#c2620f", "#0f766e", "#a8321f", "#6d4aa8")
_DPI: Final = 150
_WIDTH_INCHES: Final = 11.0
_LATENCIES: Final[tuple[tuple[SketchName, str], ...]] = (("ttft_s", "TTFT"), ("duration_s", "E2E"))


class PlotsMissingError(RuntimeError):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "a picture needs matplotlib: install it with pip install matplotlib, or ask "
            "for the report as text or JSON"
        )


def write_png(analysis: Analysis, path: Path) -> None:
    """Write the picture. Raises PlotsMissingError without matplotlib, OSError for the file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PlotsMissingError from error
    plan, arms = analysis.plan, analysis.arms
    figure = Figure(figsize=(_WIDTH_INCHES, 5.0 + 0.5 * len(arms)), facecolor="white")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(2, 3)
    figure.suptitle(
        f"{plan.name}, version {plan.version}: decided by {plan.metric}, alpha {plan.alpha:g}",
        x=0.01, ha="left", color=_INK, fontsize=13,
    )  # fmt: skip
    names = [f"{arm.name}\n{arm.num_requests:,} requests" for arm in arms]
    shares = [arm.shares["attained"].scaled(100.0) for arm in arms]
    _draw(grid[0][0], "attainment, %", names, shares)
    for axes, (sketch, title) in zip(grid[0][1:], _LATENCIES, strict=True):
        found = [arm.quantiles[sketch][0.95].scaled(1000.0) for arm in arms]
        _draw(axes, f"{title} p95, ms", names, found)
    others = [each.arm for each in analysis.comparisons]
    points = [each.shares["attained"].difference.scaled(100.0) for each in analysis.comparisons]
    title = f"attainment against {plan.control}, points"
    _draw(grid[1][0], title, others, points, is_difference=True)
    for axes, (sketch, word) in zip(grid[1][1:], _LATENCIES, strict=True):
        found = [each.quantiles[sketch][0.95].lift.scaled(100.0) for each in analysis.comparisons]
        title = f"{word} p95 against {plan.control}, %"
        _draw(axes, title, others, found, is_difference=True)
    text = "\n".join(textwrap.wrap(analysis.verdict.text, 150))
    figure.text(0.01, 0.012, text, color=_INK, fontsize=9, va="bottom")
    figure.subplots_adjust(left=0.11, right=0.985, top=0.88, bottom=0.17, hspace=0.6, wspace=0.42)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw(
    axes: "Axes",
    title: str,
    names: Sequence[str],
    intervals: Sequence[Interval],
    *,
    is_difference: bool = False,
) -> None:
    """Draw one row an arm: a dot with its interval; an arrow's end for an unknown bound."""
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    low, high = _extent(intervals, is_difference)
    for row, interval in enumerate(intervals):
        color = _COLORS[(row + is_difference) % len(_COLORS)]
        if is_difference and not interval.excludes(0.0):
            color = _UNSURE
        if math.isnan(interval.estimate):
            axes.text((low + high) / 2.0, row, "no data", ha="center", va="center", color=_SOFT)
            continue
        start, end = max(interval.low, low), min(interval.high, high)
        axes.plot([start, end], [row, row], color=color, linewidth=3, solid_capstyle="butt")
        axes.plot([interval.estimate], [row], "o", color=color, markersize=7)
        for is_cut, at, marker in (
            (interval.low < low, low, "<"),
            (interval.high > high, high, ">"),
        ):
            if is_cut:
                axes.plot([at], [row], marker, color=color, markersize=7)
    if is_difference:
        axes.axvline(0.0, color=_INK, linewidth=1)
    axes.set_xlim(low, high)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names, fontsize=8, color=_INK)
    axes.tick_params(axis="x", labelsize=8, colors=_SOFT)
    axes.grid(axis="x", color=_GRID)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _extent(intervals: Sequence[Interval], is_difference: bool) -> tuple[float, float]:
    """Return the axis' range: all finite bounds, no further from the estimates than is useful."""
    centres = [each.estimate for each in intervals if math.isfinite(each.estimate)]
    if not centres:
        return -1.0, 1.0
    found = [*centres, 0.0] if is_difference else list(centres)
    bounds = [bound for each in intervals for bound in (each.low, each.high)]
    found += [bound for bound in bounds if math.isfinite(bound)]
    low, high = min(found), max(found)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room
