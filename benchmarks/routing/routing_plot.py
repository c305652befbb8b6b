"""The figure of bench_routing_quality: accuracy against cost, and against p50 latency."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain
from outrider.gateway.tools.reports.charts import NUM_COLORS, Axis, Chart, PlotSeries
from outrider.gateway.tools.reports.pictures import write_picture


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_routing_quality's results into a PNG file."""
    record = plain(results)
    policies, conditions = record["policies"], record["conditions"]
    colors = {name: number % (NUM_COLORS + 1) for number, name in enumerate(policies)}
    marks = {name: _mark(name, entry, colors[name]) for name, entry in policies.items()}
    least = 100 * min(entry["accuracy"]["low"] for entry in policies.values())
    accuracy = Axis(f"accuracy, % ({conditions['num_prompts']} held-out tasks)", low=least - 2)
    costs = Chart(
        "lines: every setting; dots: chosen on other prompts; dashed: at random",
        [*_curves(record, colors), *marks.values()],
        x=Axis("mean cost of a request, always large = 1"),
        y=accuracy,
    )
    timed = {name: entry["p50_s"] for name, entry in policies.items() if entry["p50_s"] is not None}
    times = Chart(
        f"{conditions['num_latency_prompts']} of the prompts, one at a time",
        [replace(marks[name], x=[1e3 * p50_s]) for name, p50_s in timed.items()],
        x=Axis(f"p50 latency to the last token, ms ({conditions['latency']})"),
        y=accuracy,
    )
    write_picture([costs, times], path, num_columns=2)


def _curves(record: Mapping[str, Any], colors: Mapping[str, int]) -> Iterator[PlotSeries]:
    """Every setting of each router, and what choosing at random gives."""
    for name, points in record["curves"].items():
        costs = [cost for cost, _, _ in points]
        accuracy = [100 * accuracy for _, accuracy, _ in points]
        yield PlotSeries("", costs, accuracy, colors.get(name, 0))
    ends = [record["policies"][name] for name in ("always small", "always large")]
    right = [100 * end["accuracy"]["estimate"] for end in ends]
    yield PlotSeries("", [end["cost"] for end in ends], right, 0, is_dashed=True)


def _mark(name: str, entry: Mapping[str, Any], color: int) -> PlotSeries:
    low, value, high = ([100 * entry["accuracy"][key]] for key in ("low", "estimate", "high"))
    return PlotSeries(name, [entry["cost"]], value, color, kind="dots", low=low, high=high)
