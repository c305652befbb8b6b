"""The figure of bench_routing_quality: accuracy against cost, and against p50 and p95 latency."""

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

    def times(quantile: str) -> Chart:
        timed = {name: entry[f"{quantile}_s"] for name, entry in policies.items()}
        known = {name: took_s for name, took_s in timed.items() if took_s is not None}
        return Chart(
            f"{conditions['num_latency_prompts']} of the prompts, one at a time",
            [replace(marks[name], x=[1e3 * took_s]) for name, took_s in known.items()],
            x=Axis(f"{quantile} latency to the last token, ms ({conditions['latency']})"),
            y=accuracy,
        )

    charts = [costs, times("p50"), times("p95")]
    if "gain_per_cost" in record:
        charts.append(_equal_costs(record["gain_per_cost"]["at_equal_cost"], accuracy))
    write_picture(charts, path, num_columns=2)


def _equal_costs(found: Mapping[str, Any], accuracy: Axis) -> Chart:
    """Accuracy at equal cost, by what gains are counted per."""
    series = []
    for per, is_dashed in (("request", True), ("token cost", False)):
        for way, color in (("text", 3), ("16 held", 1), ("whole answers", 4)):
            costs = [float(cost) for cost in found[per]]
            right = [100 * entry[way] for entry in found[per].values()]
            name = f"{way}, gain per {per}"
            series.append(PlotSeries(name, costs, right, color, is_dashed=is_dashed))
    return Chart(
        "at equal cost; settings of the other half of the prompts",
        series,
        x=Axis("mean cost of a request, always large = 1"),
        y=accuracy,
    )


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
