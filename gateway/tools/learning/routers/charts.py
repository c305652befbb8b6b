"""The charts of a router: what its answers are worth at what share, and whether it knows itself."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from outrider.gateway.tools.learning.routers.router_tables import STAGE_LABELS
from outrider.gateway.tools.reports.charts import Axis, Chart, PlotSeries, ReferenceLine
from outrider.gateway.tools.reports.pictures import write_picture
from outrider.router.calibration import OperatingPoint, Stage, StageRows
from outrider.router.evaluation import NUM_POINTS, RouterReport

_COLORS: Final[dict[Stage, int]] = {"text": 3, "prompt": 2, "answer": 1}
_NUM_BINS: Final = 30


def draw_plots(report: RouterReport, rows: StageRows, folder: Path) -> list[Path]:
    """Write cost_quality.png, calibration.png and qualities.png; returns their paths."""
    charts = {
        "cost_quality.png": cost_quality_chart(report),
        "calibration.png": calibration_chart(report),
        "qualities.png": quality_chart(rows, report.setting),
    }
    return [write_picture([chart], folder / name) for name, chart in charts.items()]


def cost_quality_chart(report: RouterReport) -> Chart:
    """Accuracy over the share of prompts that the large model answers."""
    shares = np.linspace(0.0, 1.0, NUM_POINTS)
    corners, ends = (0.0, 1.0), (report.weak_accuracy, report.strong_accuracy)
    own, last = report.setting, report.best_stage
    stages = [
        PlotSeries(STAGE_LABELS[name], shares, stage.curve, _COLORS[name])
        for name, stage in report.stages.items()
    ]
    stages[-1] = replace(stages[-1], low=last.curve_low, high=last.curve_high)
    margin = 0.06 * (ends[1] - ends[0])
    low = min(ends[0], float(last.curve_low.min())) - margin
    high = float(report.oracle_curve.max()) + margin
    return Chart(
        "Accuracy by the large model's share",
        [
            PlotSeries("oracle", shares, report.oracle_curve, 0, is_dashed=True),
            *stages,
            PlotSeries("at random", corners, ends, 0),
            PlotSeries("always small, always large", corners, ends, 5, kind="dots"),
            PlotSeries("this router's setting", [own.strong_share], [own.accuracy], 4, kind="dots"),
        ],
        x=Axis("prompts that the large model answers", low=-0.02, high=1.03, is_share=True),
        y=Axis("accuracy of the answers", low=low, high=high),
    )


def calibration_chart(report: RouterReport) -> Chart:
    """Estimated quality against what was found, in bins of equally many prompts."""
    stages = [_bins(stage, report) for stage in report.stages]
    values = np.concatenate([one for each in stages for one in (each.x, each.low, each.high)])
    low, high = float(values.min()), float(values.max())
    margin = 0.06 * max(high - low, 0.1)
    low, high = low - margin, high + margin
    diagonal = PlotSeries("perfectly calibrated", (low, high), (low, high), 0, is_dashed=True)
    return Chart(
        "Expected and found quality",
        [diagonal, *stages],
        x=Axis("quality that the router expects (1 - gain)", low=low, high=high),
        y=Axis("quality that was found", low=low, high=high),
    )


def _bins(stage: Stage, report: RouterReport) -> PlotSeries:
    entry = report.stages[stage]
    found = np.array([one.observed for one in entry.bins])
    error = np.array([one.standard_error for one in entry.bins])
    return PlotSeries(
        f"{STAGE_LABELS[stage]} (error {entry.ece:.3f})",
        [one.expected for one in entry.bins],
        found,
        _COLORS[stage],
        kind="marked",
        low=found - error,
        high=found + error,
    )


def quality_chart(rows: StageRows, setting: OperatingPoint) -> Chart:
    """Return a histogram of text quality with the cuts of the setting."""
    quality = np.clip(rows.text, 0.0, 1.0)
    cuts = [min(cut, 1.0) for cut in setting.band or (setting.threshold,)]
    low, high = (
        end(10 * edge(float(quality.min()), float(quality.max()), *cuts)) / 10
        for end, edge in ((math.floor, min), (math.ceil, max))
    )
    edges = np.linspace(low, high, _NUM_BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    is_better = rows.strong > rows.weak
    others, _ = np.histogram(quality[~is_better], bins=edges)
    every, _ = np.histogram(quality, bins=edges)
    label = "text quality: how safe the small model's answer seems"
    return Chart(
        "Text qualities and where the setting cuts",
        [
            PlotSeries("no worse than the large model", middles, others, 0, kind="bars"),
            PlotSeries("the large model is better", middles, every, 4, kind="bars", low=others),
        ],
        x=Axis(label, low=low - 0.01, high=high + 0.01),
        y=Axis("prompts"),
        marks=_cuts(cuts),
    )


def _cuts(cuts: list[float]) -> list[ReferenceLine]:
    if len(cuts) == 1:
        return [ReferenceLine(cuts[0], f"threshold {cuts[0]:.2f}")]
    low, high = cuts
    return [
        ReferenceLine(low, "under watch", until=high, color=1),
        ReferenceLine(low, f"large below {low:.2f}"),
        ReferenceLine(high, f"small from {high:.2f}"),
    ]
