"""The figure of bench_slo: goodput and attainment by the offered rate, by queue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain
from outrider.gateway.tools.reports.charts import Axis, lines_by_case
from outrider.gateway.tools.reports.pictures import write_picture

_PANELS: Mapping[str, Any] = {
    "goodput, requests/s": lambda entry: entry["goodput_per_s"]["median"],
    "attained, all, %": lambda entry: 100 * entry["attainment"],
    "attained, short chat, %": lambda entry: 100 * entry["chat_attainment"],
    "time to first token of short chat, p99, ms": lambda e: 1e3 * e["chat_ttft_s"]["p99"],
}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_slo's results into a PNG file."""
    points = {float(rate): entry for rate, entry in plain(results)["points"].items()}
    offered = Axis("offered, requests/s", low=min(points))
    charts = [lines_by_case(title, points, offered, pick) for title, pick in _PANELS.items()]
    write_picture(charts, path, num_columns=2)
