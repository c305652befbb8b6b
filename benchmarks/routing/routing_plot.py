"""The figure of bench_routing_quality: accuracy against cost, and against p50 latency."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain

_COLOURS = {
    "always small": "#7a7a7a",
    "always large": "#222222",
    "router": "#d1731f",
    "router + probe": "#3a8f3f",
    "cascade, 16 held": "#0b6e99",
    "oracle": "#b03060",
}
_SPECULATIVE = ("#8a63b8", "#c9a6e4")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_routing_quality's results into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record = plain(results)
    policies = record["policies"]
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    costs, times = figure.subplots(1, 2)
    rest = iter(_SPECULATIVE * 2)
    colours = {name: _COLOURS.get(name) or next(rest) for name in policies}
    for name, points in record["curves"].items():
        axes_x = [cost for cost, _, _ in points]
        axes_y = [100 * accuracy for _, accuracy, _ in points]
        costs.plot(axes_x, axes_y, color=colours.get(name), linewidth=1, alpha=0.7)
    ends = [policies[name] for name in ("always small", "always large")]
    costs.plot(
        [end["cost"] for end in ends],
        [100 * end["accuracy"]["estimate"] for end in ends],
        color="#aaaaaa",
        linewidth=0.8,
        linestyle=":",
    )
    for name, entry in policies.items():
        _mark(costs, entry["cost"], entry, colours[name], name)
        if entry["p50_s"] is not None:
            _mark(times, 1e3 * entry["p50_s"], entry, colours[name], name)
    conditions = record["conditions"]
    costs.set_xlabel("mean cost of a request, always large = 1")
    costs.set_title("lines: every setting; dots: chosen on other prompts; dotted: at random")
    times.set_xlabel(f"p50 latency to the last token, ms ({conditions['latency']})")
    times.set_title(f"{conditions['num_latency_prompts']} of the prompts, one at a time")
    for axes in (costs, times):
        axes.set_ylabel(f"accuracy, % ({conditions['num_prompts']} held-out tasks)")
        axes.title.set_fontsize(10)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
    costs.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


def _mark(axes: Any, x: float, entry: Mapping[str, Any], colour: Any, name: str) -> None:
    accuracy = entry["accuracy"]
    middle = 100 * accuracy["estimate"]
    bars = [[middle - 100 * accuracy["low"]], [100 * accuracy["high"] - middle]]
    axes.errorbar(
        [x], [middle], yerr=bars, fmt="o", color=colour, label=name, capsize=2, elinewidth=0.8
    )
