"""The figure of chaos.py: outcomes, times and memory over the run, with its faults."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.chaos.chaos_faults import Struck
from benchmarks.chaos.chaos_findings import Sample
from benchmarks.chaos.chaos_traffic import Exchange, Outcome
from benchmarks.shared.record import percentile
from outrider.gateway.tools.reports.charts import (
    NUM_COLORS,
    Axis,
    Chart,
    PlotSeries,
    ReferenceLine,
)
from outrider.gateway.tools.reports.pictures import write_picture

_NUM_BINS: Final = 90
_COLORS: Final[dict[Outcome, int]] = {
    "answered": 1,
    "left": 0,
    "refused": 2,
    "ended in an error": 6,
    "broken": 4,
    "hung": 5,
    "garbled": 3,
}


def draw(
    exchanges: Sequence[Exchange], struck: Sequence[Struck], samples: Sequence[Sample], path: Path
) -> None:
    """Draw into a PNG file."""
    end_s = max(each.began_s + each.took_s for each in exchanges)
    width_s = end_s / _NUM_BINS
    bins: list[list[Exchange]] = [[] for _ in range(_NUM_BINS + 1)]
    for each in exchanges:
        bins[int((each.began_s + each.took_s) / width_s)].append(each)
    minutes = [(place + 0.5) * width_s / 60 for place in range(len(bins))]
    names = sorted({each.name for each in struck})
    colors = {name: number % NUM_COLORS + 1 for number, name in enumerate(names)}
    faults = [
        ReferenceLine(
            each.began_s / 60, each.name, until=each.ended_s / 60, color=colors[each.name]
        )
        for each in struck
    ]
    axis = Axis("minutes", high=end_s / 60)
    charts = (
        ("requests that ended, per second", _outcomes(bins, minutes, width_s), Axis("")),
        ("seconds from question to end", _times(bins, minutes), Axis("", scale="log")),
        ("memory and files", _memory(samples), Axis("")),
    )
    drawn = [Chart(name, list(series), x=axis, y=y, marks=faults) for name, series, y in charts]
    write_picture(drawn, path)


def _outcomes(
    bins: Sequence[Sequence[Exchange]], minutes: Sequence[float], width_s: float
) -> Iterator[PlotSeries]:
    below = np.zeros(len(bins))
    for outcome, color in _COLORS.items():
        found = [sum(each.outcome == outcome for each in part) / width_s for part in bins]
        top = below + np.array(found)
        if any(found):
            yield PlotSeries(outcome, minutes, top, color, kind="bars", low=below)
        below = top


def _times(bins: Sequence[Sequence[Exchange]], minutes: Sequence[float]) -> Iterator[PlotSeries]:
    answered = [[each.took_s for each in part if each.outcome == "answered"] for part in bins]
    for percent, color in ((50, 1), (99, 4)):
        found = [percentile(part, percent) if part else float("nan") for part in answered]
        yield PlotSeries(f"answers, p{percent}", minutes, found, color)


def _memory(samples: Sequence[Sample]) -> Iterator[PlotSeries]:
    figures = {
        "memory of the gateway, MB": [sample.gateway_bytes / 2**20 for sample in samples],
        "memory of the engine, MB": [sample.engine_bytes / 2**20 for sample in samples],
        "gateway's open files": [float(sample.num_files) for sample in samples],
    }
    at = [sample.at_s / 60 for sample in samples]
    for color, (label, found) in zip((1, 0, 2), figures.items(), strict=True):
        yield PlotSeries(label, at, found, color)
