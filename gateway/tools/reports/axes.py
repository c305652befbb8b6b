"""Axes of charts: bounds, ticks and their words."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.tools.reports.charts import (
    Axis,
    Chart,
    ChartValues,
    IntervalChart,
    PlotSeries,
    Scale,
)

Floats = NDArray[np.float64]
DrawnSpan = tuple[float, float]
"""The start and end of an axis on the drawing."""

_NUM_TICKS: Final = 5
_LOG_STEPS: Final = (1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values that an axis shows, and its position on the drawing."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Each tick's coordinate and words: the axis' own, or round figures."""
        make = log_ticks if self.axis.scale == "log" else linear_ticks
        ticks = make(self.low, self.high) if self.axis.ticks is None else self.axis.ticks
        for tick in ticks:
            yield self.place(tick), tick_text(tick, is_share=self.axis.is_share)

    def places(self, values: Floats) -> Floats:
        """Coordinates of the drawing for these values."""
        if self.axis.scale == "log":
            shares = np.log(np.maximum(values, self.low) / self.low)
            shares = shares / math.log(self.high / self.low)
        else:
            shares = (values - self.low) / (self.high - self.low)
        placed: Floats = self.start + shares * (self.end - self.start)
        return placed

    def place(self, value: float) -> float:
        """Return the coordinate of one value; of one outside of the axis, its end."""
        return float(self.places(np.array([min(max(value, self.low), self.high)]))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """The points of a series that an axis can show; each array has [num_points]."""

    series: PlotSeries
    x: Floats
    y: Floats
    low: Floats  # see PlotSeries; 0 where it has none
    high: Floats

    @property
    def half_width(self) -> float:
        """Half of a bar's width: of the least distance of two; 0 for what is no bar."""
        if self.series.kind != "bars":
            return 0.0
        return float(np.diff(self.x).min()) / 2 if self.x.size > 1 else 0.5

    def at(self, places: NDArray[Any]) -> "Points":
        """Return the points at these places, or where a mask is true."""
        arrays = {name: getattr(self, name)[places] for name in ("x", "y", "low", "high")}
        return Points(series=self.series, **arrays)


def points_of(chart: Chart) -> list[Points]:
    """Return the series that have points which the axes can show."""
    found = [_points(one, chart.x.scale, chart.y.scale) for one in chart.series]
    return [one for one in found if one.x.size]


def _points(series: PlotSeries, x_scale: Scale, y_scale: Scale) -> Points:
    x, y = _floats(series.x), _floats(series.y)
    low, high = (np.zeros_like(y) if b is None else _floats(b) for b in (series.low, series.high))
    kept = np.isfinite(x) & np.isfinite(y)
    for values, scale in ((x, x_scale), (y, y_scale)):
        if scale == "log":
            kept &= values > 0
    return Points(series=series, x=x, y=y, low=low, high=high).at(kept)


def _floats(values: ChartValues) -> Floats:
    return np.asarray(values, dtype=np.float64)


# ---- bounds -----------------------------------------------------------------------------------


def ranges(
    chart: Chart, kept: Sequence[Points], across: DrawnSpan, up: DrawnSpan
) -> tuple[Range, Range]:
    """Return what the x axis and the y axis show, and where."""
    xs = [one.x + half for one in kept for half in (-one.half_width, one.half_width)]
    ys = [one.y for one in kept]
    ys += [one.low for one in kept if one.series.low is not None]
    ys += [one.high for one in kept if one.series.high is not None]
    marks = [
        _floats([place for one in chart.marks if one.is_vertical == is_x for place in one.places])
        for is_x in (True, False)
    ]
    return _range(chart.x, [*xs, marks[0]], across), _range(chart.y, [*ys, marks[1]], up)


def interval_range(chart: IntervalChart, across: DrawnSpan) -> Range:
    """Return what the axis of intervals shows: all that is finite; about 1 where nothing is."""
    values = [bound for row in chart.rows for bound in (row.low, row.value, row.high)]
    values += [] if chart.zero is None else [chart.zero]
    found = [one for one in values if math.isfinite(one)] or [1.0]
    return _range(chart.x, [_floats(found)], across, holds_zero=False)


def _range(
    axis: Axis, values: Iterable[Floats], span: DrawnSpan, *, holds_zero: bool = True
) -> Range:
    shown = np.concatenate(list(values))
    shown = shown[np.isfinite(shown)]
    is_log = axis.scale == "log"
    if is_log:
        shown = shown[shown > 0]
    bottom = min(float(shown.min()), 0.0) if holds_zero and not is_log else float(shown.min())
    low = bottom if axis.low is None else axis.low
    high = float(shown.max()) if axis.high is None else axis.high
    if is_log:
        low, high = low / 1.08, high * 1.08
        if high < low * 1.3:
            low, high = low / 1.15, high * 1.15
    elif high <= low:
        low, high = (low, low + 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
    elif axis.high is None:
        margin = 0.04 * (high - low)
        low, high = (low if bottom >= 0 and holds_zero else low - margin), high + margin
    return Range(axis=axis, low=low, high=high, start=span[0], end=span[1])


# ---- ticks ------------------------------------------------------------------------------------


def tick_text(value: float, *, is_share: bool = False) -> str:
    """A figure as short as an axis wants it: 0.05, 3, 1200, 15k, 40 %."""
    if is_share:
        return f"{value * 100:.3g} %"
    if abs(value) >= 10_000:
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"


def linear_ticks(low: float, high: float) -> list[float]:
    """Round figures (1, 2, 2.5 or 5 times a power of ten) between the two, about five."""
    raw = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1.0, 2.0, 2.5, 5.0, 10.0) if s * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times them where that is not too many.

    Round figures of equal distance where there would be fewer than three.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [step * 10.0**power for power in decades for step in _LOG_STEPS]
    shown = [tick for tick in fine if low <= tick * 1.0000001 and tick <= high * 1.0000001]
    if len(shown) < 3:
        return linear_ticks(low, high)
    if len(shown) <= 2 * _NUM_TICKS:
        return shown
    return [10.0**power for power in decades if low <= 10.0**power <= high]
