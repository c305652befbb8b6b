"""The figure of bench_tiers: accuracy over cost of all tiers, of pairs, and of each model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain
from outrider.gateway.tools.reports.charts import Axis, Chart, PlotSeries
from outrider.gateway.tools.reports.pictures import write_picture


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_tiers' results into a PNG file."""
    found = plain(results)
    names = {"all": "all five", found["best_pair"]: "best pair of the training"}
    names.setdefault(found["best_pair_in_hindsight"], "best pair in hindsight")
    names["unlabelled"] = "all, one without labels"
    lines = [
        _line(label, found["lines"][name], color)
        for color, (name, label) in enumerate(names.items(), start=1)
        if name in found["lines"]
    ]
    singles = list(found["singles"].values())
    ends = [[one["usd"], one["accuracy"]] for one in (singles[0], singles[-1])]
    dots = [[one["usd"], one["accuracy"]] for one in singles]
    oracle = [[found["oracle"]["usd"], found["oracle"]["accuracy"]]]
    marks = [
        *lines,
        _line("a coin between the ends", ends, 0, is_dashed=True),
        _line("each model alone", dots, 5, kind="dots"),
        _line("oracle", oracle, 6, kind="dots"),
    ]
    title = f"RouterBench: {found['num_train']} prompts learnt from, {found['num_test']} judged"
    chart = Chart(
        title,
        marks,
        x=Axis("mean cost of a request, USD"),
        y=Axis("accuracy of the answers", low=0.55, high=1.0),
    )
    write_picture([chart], path)


def _line(
    name: str,
    points: Sequence[Sequence[float]],
    color: int,
    *,
    kind: str = "line",
    is_dashed: bool = False,
) -> PlotSeries:
    ordered = sorted((cost, accuracy) for cost, accuracy in points)
    return PlotSeries(
        name,
        [cost for cost, _ in ordered],
        [accuracy for _, accuracy in ordered],
        color,
        kind="dots" if kind == "dots" else "line",
        is_dashed=is_dashed,
    )
