"""The figure of simulate_fleet: placement at four replicas, and fleets by their size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain

_COLOURS = {
    "round robin": "#7a7a7a",
    "least work": "#c77d0a",
    "cache aware": "#0b6e99",
    "oracle": "#9aa83a",
}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw simulate_fleet's results into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = plain(results)
    by_rate = {float(k): v for k, v in found["four_replicas"].items() if "fail" not in k}
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    goodput, hits, ttft, sizes = figure.subplots(2, 2).flat
    for axes, title, key, factor in (
        (goodput, "four replicas: goodput, requests/s", "goodput_per_s", 1.0),
        (hits, "four replicas: prompt tokens from caches, %", "hit_rate", 100.0),
        (ttft, "four replicas: time to first token, p99, s", "ttft_p99_s", 1.0),
    ):
        for policy, colour in _COLOURS.items():
            style = "o--" if policy == "oracle" else "o-"
            values = [factor * one[policy][key] for one in by_rate.values()]
            axes.plot(list(by_rate), values, style, color=colour, label=policy)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("offered, requests/s a replica")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    numbers = [int(size) for size in found["sizes"]]
    linear = [one["linear"] for one in found["sizes"].values()]
    sizes.semilogx(numbers, linear, "o-", color=_COLOURS["cache aware"])
    sizes.set_title("goodput a replica by that of a fleet of four", fontsize=10)
    sizes.set_xlabel("replicas")
    sizes.set_ylim(0, 1.2)
    figure.savefig(path, dpi=110)
