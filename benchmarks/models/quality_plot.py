"""The figure of bench_quality: what a scheme loses in accuracy, over its bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = {"large": "#0b6e99", "small": "#b3541e"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy by bytes of weights, and the change with its interval, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    sizes, changes = figure.subplots(1, 2)
    for tier, schemes in results["tiers"].items():
        colour = _COLOURS[tier]
        megabytes = [entry["weight_bytes"] / 1e6 for entry in schemes.values()]
        right = [100 * entry["accuracy"] for entry in schemes.values()]
        sizes.plot(megabytes, right, "o-", color=colour, label=tier)
        for name, x, y in zip(schemes, megabytes, right, strict=True):
            sizes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
        for name, entry in schemes.items():
            if "accuracy_change" in entry:
                _interval(changes, f"{tier}, {name}", entry, colour)
    sizes.set(xlabel="MB of weights", ylabel="right answers, %", xscale="log")
    sizes.legend()
    changes.axvline(0, color="#7a7a7a", linewidth=1)
    changes.set(xlabel="change of right answers, percentage points")
    figure.savefig(path, dpi=110)


def _interval(axes: Any, label: str, entry: Mapping[str, Any], colour: str) -> None:
    middle = 100 * entry["accuracy_change"]
    low, high = (100 * bound for bound in entry["accuracy_change_interval"])
    axes.errorbar([middle], [label], xerr=[[middle - low], [high - middle]], fmt="o", color=colour)
