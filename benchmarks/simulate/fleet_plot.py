"""The figure of simulate_fleet: placement at four replicas, and fleets by their size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain
from outrider.gateway.tools.reports.charts import Axis, Chart, PlotSeries, lines_by_case
from outrider.gateway.tools.reports.pictures import write_picture

_PANELS: Mapping[str, Any] = {
    "four replicas: goodput, requests/s": lambda entry: entry["goodput_per_s"],
    "four replicas: prompt tokens from caches, %": lambda entry: 100 * entry["hit_rate"],
    "four replicas: time to first token, p99, s": lambda entry: entry["ttft_p99_s"],
}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw simulate_fleet's results into a PNG file."""
    found = plain(results)
    rates = {float(k): v for k, v in found["four_replicas"].items() if "fail" not in k}
    offered = Axis("offered, requests/s a replica", low=min(rates))
    charts = [lines_by_case(title, rates, offered, pick) for title, pick in _PANELS.items()]
    linear = [one["linear"] for one in found["sizes"].values()]
    by_size = Chart(
        "goodput a replica by that of a fleet of four",
        [PlotSeries("", [int(size) for size in found["sizes"]], linear, kind="marked")],
        x=Axis("replicas", scale="log"),
        y=Axis("", high=1.2),
    )
    write_picture([*charts, by_size], path, num_columns=2)
