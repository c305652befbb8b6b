"""The figure of bench_real_cascade: accuracy by the share that the large model answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain
from outrider.gateway.tools.reports.charts import Axis, Chart, PlotSeries
from outrider.gateway.tools.reports.pictures import write_picture


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_real_cascade's results into a PNG file."""
    record = plain(results)
    chart = Chart(
        "line: every threshold of the score; dots: as served; dashed: at random",
        [*_lines(record), *_dots(record)],
        x=Axis("the large model's share of the judged questions", is_share=True),
        y=Axis(f"right, % of {record['num_judged']} questions"),
    )
    write_picture([chart], path)


def _lines(record: Mapping[str, Any]) -> list[PlotSeries]:
    shares, right = zip(*record["curve"], strict=True)
    ends = [0, len(shares) - 1]
    return [
        PlotSeries("", shares, [100 * one for one in right], 1),
        PlotSeries(
            "", [shares[at] for at in ends], [100 * right[at] for at in ends], 0, is_dashed=True
        ),
    ]


def _dots(record: Mapping[str, Any]) -> list[PlotSeries]:
    dots = []
    for color, (name, entry) in enumerate(record["policies"].items(), 2):
        low, value, high = ([100 * entry["right"][key]] for key in ("low", "estimate", "high"))
        share = [entry["large_share_of_judged"]]
        dots.append(PlotSeries(name, share, value, color, kind="dots", low=low, high=high))
    return dots
