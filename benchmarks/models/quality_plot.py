"""The figure of bench_quality: what a scheme loses in accuracy, over its bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.gateway.tools.reports.charts import (
    Axis,
    Chart,
    IntervalChart,
    IntervalRow,
    PlotSeries,
)
from outrider.gateway.tools.reports.pictures import write_picture


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy by bytes of weights, and the change with its interval, into a PNG file."""
    schemes = {
        f"{tier}, {name}": entry
        for tier, entries in results["tiers"].items()
        for name, entry in entries.items()
    }
    right = {name: 100 * entry["accuracy"] for name, entry in schemes.items()}
    dots = [
        PlotSeries(name, [entry["weight_bytes"] / 1e6], [right[name]], color, kind="dots")
        for color, (name, entry) in enumerate(schemes.items())
    ]
    sizes = Chart(
        "right answers, %",
        dots,
        x=Axis("MB of weights", scale="log"),
        y=Axis("", low=min(right.values()) - 3),
    )
    rows = [
        IntervalRow(name, 100 * low, 100 * entry["accuracy_change"], 100 * high)
        for name, entry in schemes.items()
        if "accuracy_change" in entry
        for low, high in [entry["accuracy_change_interval"]]
    ]
    changes = IntervalChart("change of right answers, percentage points", rows, x=Axis(""))
    write_picture([sizes, changes], path, num_columns=2)
