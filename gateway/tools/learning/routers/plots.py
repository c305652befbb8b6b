"""The pictures of a router: what its answers are worth at what share, and whether it knows itself.

PNG files for `outrider router eval --plots`, SVG for the report: there colours are CSS variables,
so that a picture is dark where the page is.
"""

import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import matplotlib as mpl

mpl.use("Agg")  # files only: a machine that serves models has no display

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from outrider.router.calibration import OperatingPoint, Stage, StageRows
from outrider.router.evaluation import NUM_POINTS, RouterReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = {
    "ink": "#1c2325",
    "soft": "#5d6a6e",
    "grid": "#dfe3e4",
    "text": "#2563a8",
    "prompt": "#c2620f",
    "answer": "#0f766e",
    "large": "#a8321f",
}
STAGE_LABELS: Final[dict[Stage, str]] = {
    "text": "text of the prompt",
    "prompt": "with the probe",
    "answer": "with the answer's beginning",
}
_SIZE_INCHES: Final = (5.2, 3.7)
_DPI: Final = 180


def draw_plots(report: RouterReport, rows: StageRows, folder: Path) -> list[Path]:
    """Write cost_quality.png, calibration.png and qualities.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "cost_quality.png": (cost_quality_figure(report), "Accuracy by the large model's share"),
        "calibration.png": (calibration_figure(report), "Calibration"),
        "qualities.png": (quality_figure(rows, report.setting), "Predicted quality and cuts"),
    }
    paths = []
    for name, (figure, title) in figures.items():
        figure.axes[0].set_title(title, loc="left", fontsize=11)
        figure.savefig(folder / name, dpi=_DPI)
        paths.append(folder / name)
    return paths


def as_svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an <svg> element for HTML; `name` is its own on the page, `label` its content."""
    text = io.StringIO()
    # Letters stay letters, and the same figure gives the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for variable, color in COLORS.items():
        svg = svg.replace(color, f"var(--{variable})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)
    # Several pictures share a page, and each counts its parts from 1.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg)
    # The page gives the size; the viewBox keeps the shape.
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def cost_quality_figure(report: RouterReport) -> Figure:
    """Accuracy over the share of prompts that the large model answers."""
    figure, axes = _new_figure()
    shares = np.linspace(0.0, 1.0, NUM_POINTS)
    ends = (report.weak_accuracy, report.strong_accuracy)
    axes.plot(shares, report.oracle_curve, color=COLORS["soft"], ls="--", lw=1.2, label="oracle")
    last = report.best_stage
    axes.fill_between(
        shares, last.curve_low, last.curve_high, color=COLORS[last.stage], alpha=0.14, lw=0
    )
    for stage, entry in report.stages.items():
        axes.plot(shares, entry.curve, color=COLORS[stage], lw=2.0, label=STAGE_LABELS[stage])
    axes.plot((0.0, 1.0), ends, color=COLORS["soft"], ls=":", lw=1.4, label="at random")
    axes.plot(
        (0.0, 1.0),
        ends,
        color=COLORS["ink"],
        ls="",
        marker="o",
        ms=5,
        label="always small, always large",
    )
    setting = report.setting
    axes.plot(
        setting.strong_share,
        setting.accuracy,
        color=COLORS["ink"],
        ls="",
        marker="D",
        ms=7,
        markerfacecolor=COLORS[last.stage],
        label="this router's setting",
        zorder=5,
    )
    gap = ends[1] - ends[0]
    low = min(ends[0], float(last.curve_low.min())) - 0.06 * gap
    axes.set_ylim(low, float(report.oracle_curve.max()) + 0.06 * gap)
    axes.set_xlim(-0.02, 1.03)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("prompts that the large model answers")
    axes.set_ylabel("accuracy of the answers")
    _legend(axes, "lower right")
    return figure


def calibration_figure(report: RouterReport) -> Figure:
    """Estimated quality against what was found, in bins of equally many prompts."""
    figure, axes = _new_figure()
    values = [
        value
        for entry in report.stages.values()
        for one in entry.bins
        for value in (
            one.expected,
            one.observed - one.standard_error,
            one.observed + one.standard_error,
        )
    ]
    low, high = min(values), max(values)
    margin = 0.06 * max(high - low, 0.1)
    ends = (low - margin, high + margin)
    axes.plot(ends, ends, color=COLORS["soft"], ls=":", lw=1.4, label="perfectly calibrated")
    for stage, entry in report.stages.items():
        axes.errorbar(
            [one.expected for one in entry.bins],
            [one.observed for one in entry.bins],
            yerr=[one.standard_error for one in entry.bins],
            color=COLORS[stage],
            lw=1.6,
            elinewidth=0.8,
            marker="o",
            ms=4.5,
            label=f"{STAGE_LABELS[stage]} (error {entry.ece:.3f})",
        )
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_xlabel("quality that the router expects (1 - gain)")
    axes.set_ylabel("quality that was found")
    _legend(axes, "lower right")
    return figure


def quality_figure(rows: StageRows, setting: OperatingPoint) -> Figure:
    """Plot a histogram of text quality with the cuts of the setting."""
    figure, axes = _new_figure()
    quality = np.clip(rows.text, 0.0, 1.0)
    cuts = [min(cut, 1.0) for cut in setting.band or (setting.threshold,)]
    low, high = (
        end(10 * edge(float(quality.min()), float(quality.max()), *cuts)) / 10
        for end, edge in ((math.floor, min), (math.ceil, max))
    )
    better = rows.strong > rows.weak
    axes.hist(
        [quality[~better], quality[better]],
        bins=np.linspace(low, high, 31).tolist(),
        stacked=True,
        color=[COLORS["grid"], COLORS["large"]],
        edgecolor=COLORS["soft"],
        linewidth=0.4,
        label=["no worse than the large model", "the large model is better"],
    )
    if len(cuts) == 1:
        _cut(axes, cuts[0], "threshold", "right")
    else:
        axes.axvspan(*cuts, color=COLORS["answer"], alpha=0.14, lw=0, zorder=0, label="under watch")
        _cut(axes, cuts[0], "large below", "right")
        _cut(axes, cuts[1], "small from", "left")
    axes.set_xlim(low - 0.01, high + 0.01)
    axes.set_ylim(top=1.45 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlabel("text quality: how safe the small model's answer seems")
    axes.set_ylabel("prompts")
    _legend(axes, "upper left")
    return figure


def _cut(axes: "Axes", place: float, label: str, side: Literal["left", "right"]) -> None:
    """A vertical line; `side`: the end of its label that lies at the line."""
    axes.axvline(place, color=COLORS["ink"], lw=1.1, ls="--")
    axes.annotate(
        f"{label} {place:.2f}",
        (place, 0.84),  # above the bars
        xycoords=("data", "axes fraction"),
        xytext=(-4 if side == "right" else 4, 0),
        textcoords="offset points",
        rotation=90,
        ha=side,
        va="center",
        color=COLORS["ink"],
        fontsize=8,
    )


def _new_figure() -> "tuple[Figure, Axes]":
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(COLORS["soft"])
    axes.tick_params(colors=COLORS["soft"], labelsize=9)
    axes.xaxis.label.set_color(COLORS["ink"])
    axes.yaxis.label.set_color(COLORS["ink"])
    axes.grid(axis="y", color=COLORS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: "Axes", place: Literal["lower right", "upper left"]) -> None:
    axes.legend(frameon=False, loc=place, fontsize=8.5, labelcolor=COLORS["ink"])
