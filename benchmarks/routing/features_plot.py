"""The figure of bench_features: APGR by stage and data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain
from outrider.gateway.tools.reports.charts import NUM_COLORS, Axis, Chart, PlotSeries
from outrider.gateway.tools.reports.pictures import write_picture


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_features' results into a PNG file."""
    charts = []
    for name, found in plain(results)["data"].items():
        stages = dict(found["stages"])
        for stage, entry in found.get("resampled", {"stages": {}})["stages"].items():
            stages[f"{stage}, five resamplings"] = entry
        marks = [
            PlotSeries(
                stage,
                [number],
                [entry["apgr"]["value"]],
                1 + (number - 1) % NUM_COLORS,
                kind="dots",
                low=[entry["apgr"]["low"]],
                high=[entry["apgr"]["high"]],
            )
            for number, (stage, entry) in enumerate(stages.items(), start=1)
        ]
        title = f"{name}: trained on {found['num_train']}, judged on {found['num_test']} prompts"
        area = Axis("APGR, 95 % interval (0.5: chance)", low=0.5)
        order = Axis("stage, in the legend's order", low=0.5, high=len(marks) + 0.5, ticks=())
        charts.append(Chart(title, marks, x=order, y=area))
    write_picture(charts, path, num_columns=3)
