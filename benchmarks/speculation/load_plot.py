"""The figure of bench_load: rates, ratios and gaps by the number of clients, and the load step."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.shared.record import plain
from outrider.gateway.tools.reports.charts import (
    AnyChart,
    Axis,
    Chart,
    IntervalChart,
    PlotSeries,
    ReferenceLine,
    bar,
    lines_by_case,
)
from outrider.gateway.tools.reports.pictures import write_picture

_SIDES: Final = {"speculation off": "off", "speculation on": "on"}
_RATIOS: Final = {
    "tokens_per_s": "tokens/s",
    "token_p50": "time per token, p50",
    "token_p99": "p99",
}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_load's results into a PNG file."""
    write_picture(_charts(plain(results)), path, num_columns=2)


def _charts(record: Mapping[str, Any]) -> Iterator[AnyChart]:
    points = {float(number): entry for number, entry in record["points"].items()}
    sides = {x: {name: one[side] for name, side in _SIDES.items()} for x, one in points.items()}
    clients = Axis("clients", scale="log", ticks=list(points))
    yield lines_by_case(
        "tokens per second, all clients", sides, clients, lambda entry: entry["tokens_per_s"]
    )
    yield Chart(
        "speculation on over off (above 1: faster), 95 % intervals",
        list(_ratios(points)),
        x=clients,
        y=Axis(""),
        marks=[ReferenceLine(0.98, "0.98", is_vertical=False)],
    )
    yield lines_by_case("gap between chunks, p99, ms", sides, clients, _gap_ms)
    if (step := record.get("step")) is not None:
        rows = [
            bar(f"{phase}, {name}: {report[side]['tokens_per_s']:.0f}", rate, color)
            for phase, report in step.items()
            for color, (name, side) in enumerate(_SIDES.items(), start=1)
            for rate in [report[side]["tokens_per_s"]]
        ]
        axis = Axis("", low=0.0)
        yield IntervalChart("load step, tokens per second", rows, x=axis, zero=None)


def _gap_ms(entry: Mapping[str, Any]) -> float | None:
    gap_s = entry["gap_s"]["p99"]
    return None if gap_s is None else 1e3 * gap_s


def _ratios(points: Mapping[float, Any]) -> Iterator[PlotSeries]:
    for place, (part, label) in enumerate(_RATIOS.items()):
        found = {number: entry["ratio"][part] for number, entry in points.items()}
        known = {number: ratio for number, ratio in found.items() if ratio is not None}
        low, value, high = (
            [ratio[key] for ratio in known.values()] for key in ("low", "estimate", "high")
        )
        x = [number * 2 ** (0.06 * (place - 1)) for number in known]  # side by side
        yield PlotSeries(label, x, value, place + 1, kind="marked", low=low, high=high)
