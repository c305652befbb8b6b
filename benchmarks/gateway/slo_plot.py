"""The figure of bench_slo: goodput and attainment by the offered rate, by queue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain

_COLOURS = ("#7a7a7a", "#c77d0a", "#0b6e99")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_slo's results into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = plain(results)["points"]
    rates = [float(rate) for rate in points]
    names = list(next(iter(points.values())))
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels: tuple[tuple[str, Any, float], ...] = (
        ("goodput, requests/s", lambda entry: entry["goodput_per_s"]["median"], 1.0),
        ("attained, all, %", lambda entry: entry["attainment"], 100.0),
        ("attained, short chat, %", lambda entry: entry["chat_attainment"], 100.0),
        ("time to first token of short chat, p99, ms", lambda e: e["chat_ttft_s"]["p99"], 1e3),
    )
    for axes, (title, pick, factor) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for name, colour in zip(names, _COLOURS, strict=True):
            values = [factor * pick(entry[name]) for entry in points.values()]
            axes.plot(rates, values, "o-", color=colour, label=name)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("offered, requests/s")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
