"""Charts as inline SVG, drawn here: a report needs no plotting package and no script.

Colours are CSS variables of the page (`--c1` to `--c6`, `--ink`, `--soft`, `--grid`), so that a
chart is dark where the page is. Everything that comes from data is escaped.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

SeriesKind = Literal["line", "step", "dots", "area"]
Scale = Literal["linear", "log"]

NUM_COLORS: Final = 6
_WIDTH: Final = 560.0
_HEIGHT: Final = 320.0
_LEFT: Final = 58.0
_RIGHT: Final = 14.0
_TOP: Final = 20.0
_BOTTOM: Final = 46.0
_NUM_TICKS: Final = 5
_MAX_LINE_POINTS: Final = 400
_MAX_DOTS: Final = 3000
_LETTER_WIDTH: Final = 6.9
"""Mean width of a letter in the legend, in units of the drawing."""
_LOG_STEPS: Final = (1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSeries:
    """Points in the order of drawing; those that are not finite are left out.

    `color`: 1 to 6, 0 for the soft grey. `step` holds a y until the next x; `area` is filled down
    to the axis; `dots` are not connected.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 1
    kind: SeriesKind = "line"
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """`low` and `high` None: from the data. A linear axis without `low` starts at 0."""

    label: str
    scale: Scale = "linear"
    low: float | None = None
    high: float | None = None
    is_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceLine:
    """A labelled line across the chart: an objective, a target, a moment."""

    place: float
    label: str
    is_vertical: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRow:
    """An interval on the x axis, in a row of its own: a figure and how sure it is.

    `value` is NaN where the figure lies outside of the chart.
    """

    label: str
    low: float
    value: float
    high: float
    color: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """Values that an axis shows, and its position on the drawing."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...] = field(default=())

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Coordinates of the drawing for these values."""
        if self.axis.scale == "log":
            span = math.log(self.high / self.low)
            shares = np.log(np.maximum(values, self.low) / self.low) / span
        else:
            shares = (values - self.low) / (self.high - self.low)
        placed: NDArray[np.float64] = self.start + shares * (self.end - self.start)
        return placed


def chart(
    series: Sequence[PlotSeries],
    *,
    x: Axis,
    y: Axis,
    name: str,
    marks: Sequence[ReferenceLine] = (),
) -> str:
    """An <svg> element; `name` is what a screen reader says of it. Without points: a sentence."""
    kept = [(one, *_finite(one, x.scale, y.scale)) for one in series]
    kept = [entry for entry in kept if entry[1].size]
    if not kept:
        return f'<p class="soft">No data for: {escape(name)}.</p>'
    right_marks = [mark.place for mark in marks if mark.is_vertical]
    top_marks = [mark.place for mark in marks if not mark.is_vertical]
    across = _range(x, [e[1] for e in kept], right_marks, _LEFT, _WIDTH - _RIGHT)
    up = _range(y, [e[2] for e in kept], top_marks, _HEIGHT - _BOTTOM, _TOP)
    legend = [one for one, _, _ in kept if one.label]
    parts = [
        *_frame(across, up),
        *(_draw(one, xs, ys, across, up) for one, xs, ys in kept),
        *(_mark(mark, across, up) for mark in marks),
    ]
    rows = list(_legend(legend))
    height = _HEIGHT + 18.0 * (1 + max((row for row, _ in rows), default=-1))
    return _svg([*parts, *(text for _, text in rows)], height, name)


def spans(entries: Sequence[IntervalRow], *, x: Axis, name: str, zero: float | None = 0.0) -> str:
    """One row an interval, with a dot at its figure; `zero`: where "no difference" lies."""
    if not entries:
        return f'<p class="soft">No data for: {escape(name)}.</p>'
    left, row_height = 210.0, 26.0
    height = _TOP + row_height * len(entries) + _BOTTOM
    values = np.array([(e.low, e.value, e.high) for e in entries], dtype=np.float64)
    marks = [] if zero is None else [zero]
    around = Axis(label=x.label, scale=x.scale, low=x.low, high=x.high, is_share=x.is_share)
    across = _range(around, [values.ravel()], marks, left, _WIDTH - _RIGHT, holds_zero=False)
    bottom = height - _BOTTOM
    parts = list(_bottom_axis(across, _TOP, bottom))
    if zero is not None:
        at = _number(float(across.place(np.array([zero]))[0]))
        parts.append(f'<path class="mark" d="M{at} {_TOP}V{_number(bottom)}"/>')
    for row, entry in enumerate(entries):
        y = _TOP + row_height * (row + 0.5)
        low, value, high = (_number(float(place)) for place in across.place(values[row]))
        dot = f'<circle class="dot c{entry.color}" cx="{value}" cy="{_number(y)}" r="4"/>'
        parts.append(
            f'<text class="row" x="{left - 10}" y="{_number(y + 4)}">{escape(entry.label)}</text>'
            f'<path class="span c{entry.color}" d="M{low} {_number(y)}H{high}"/>'
            f"{dot if math.isfinite(entry.value) else ''}"
        )
    return _svg(parts, height, name)


def cdf(values: Sequence[float], *, num_points: int = 240) -> tuple[list[float], list[float]]:
    """The values at equally spaced shares, and the shares: a distribution function for `step`.

    The extremes are always among them. Empty for no values.
    """
    ordered = np.sort(np.asarray([v for v in values if math.isfinite(v)], dtype=np.float64))
    if not ordered.size:
        return [], []
    ranks = np.unique(np.linspace(0, ordered.size - 1, min(num_points, ordered.size)).round())
    indexes = ranks.astype(np.int64)
    shares = (indexes + 1) / ordered.size
    return ordered[indexes].tolist(), shares.tolist()


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


# ---- parts ------------------------------------------------------------------------------------


def _finite(
    series: PlotSeries, x_scale: Scale, y_scale: Scale
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    xs = np.asarray(series.x, dtype=np.float64)
    ys = np.asarray(series.y, dtype=np.float64)
    kept = np.isfinite(xs) & np.isfinite(ys)
    for values, scale in ((xs, x_scale), (ys, y_scale)):
        if scale == "log":
            kept &= values > 0
    return xs[kept], ys[kept]


def _range(
    axis: Axis,
    values: Iterable[NDArray[np.float64]],
    marks: Sequence[float],
    start: float,
    end: float,
    *,
    holds_zero: bool = True,
) -> _Range:
    shown = np.concatenate([*values, np.asarray(marks, dtype=np.float64)])
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
    ticks = log_ticks(low, high) if is_log else linear_ticks(low, high)
    return _Range(axis=axis, low=low, high=high, start=start, end=end, ticks=tuple(ticks))


def _frame(across: _Range, up: _Range) -> Iterator[str]:
    yield from _bottom_axis(across, up.end, up.start)
    for tick, place in zip(up.ticks, up.place(np.array(up.ticks)), strict=True):
        text = tick_text(tick, is_share=up.axis.is_share)
        yield (
            f'<path class="grid" d="M{_LEFT} {_number(place)}H{_number(across.end)}"/>'
            f'<text class="y" x="{_LEFT - 7}" y="{_number(place + 4)}">{text}</text>'
        )
    middle = (up.start + up.end) / 2
    yield (
        f'<text class="name" x="13" y="{_number(middle)}" '
        f'transform="rotate(-90 13 {_number(middle)})">{escape(up.axis.label)}</text>'
    )


def _bottom_axis(across: _Range, top: float, bottom: float) -> Iterator[str]:
    yield f'<path class="axis" d="M{_number(across.start)} {_number(bottom)}H{across.end}"/>'
    for tick, place in zip(across.ticks, across.place(np.array(across.ticks)), strict=True):
        text = tick_text(tick, is_share=across.axis.is_share)
        yield (
            f'<path class="grid" d="M{_number(place)} {_number(top)}V{_number(bottom)}"/>'
            f'<text class="x" x="{_number(place)}" y="{_number(bottom + 17)}">{text}</text>'
        )
    middle = (across.start + across.end) / 2
    yield (
        f'<text class="name" x="{_number(middle)}" y="{_number(bottom + 37)}">'
        f"{escape(across.axis.label)}</text>"
    )


def _draw(
    series: PlotSeries,
    xs: NDArray[np.float64],
    ys: NDArray[np.float64],
    across: _Range,
    up: _Range,
) -> str:
    if series.kind == "dots":
        xs, ys = _thinned(xs, _MAX_DOTS), _thinned(ys, _MAX_DOTS)
    elif xs.size > _MAX_LINE_POINTS:
        xs, ys = _thinned(xs, _MAX_LINE_POINTS), _thinned(ys, _MAX_LINE_POINTS)
    places = list(zip(across.place(xs), up.place(ys), strict=True))
    style = "dashed " if series.is_dashed else ""
    color = f"c{series.color}"
    if series.kind == "dots":
        path = "".join(f"M{_number(x)} {_number(y)}h0" for x, y in places)
        return f'<path class="points {color}" d="{path}"/>'
    path = f"M{_number(places[0][0])} {_number(places[0][1])}"
    for x, y in places[1:]:
        corner = f"H{_number(x)}V{_number(y)}" if series.kind == "step" else ""
        path += corner or f"L{_number(x)} {_number(y)}"
    if series.kind == "area":
        ends = f"V{_number(up.start)}H{_number(places[0][0])}Z"
        return (
            f'<path class="area {color}" d="{path}{ends}"/><path class="line {color}" d="{path}"/>'
        )
    return f'<path class="{style}line {color}" d="{path}"/>'


def _thinned(values: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """At most so many of them, spread evenly, the first and the last always."""
    if values.size <= most:
        return values
    return values[np.linspace(0, values.size - 1, most).round().astype(np.int64)]


def _mark(mark: ReferenceLine, across: _Range, up: _Range) -> str:
    label = escape(mark.label)
    if mark.is_vertical:
        at = float(across.place(np.array([mark.place]))[0])
        is_left = at > (across.start + across.end) / 2
        side, anchor = (-5, "end") if is_left else (5, "start")
        return (
            f'<path class="mark" d="M{_number(at)} {_number(up.end)}V{_number(up.start)}"/>'
            f'<text class="note" text-anchor="{anchor}" x="{_number(at + side)}" '
            f'y="{_number(up.end - 5)}">{label}</text>'
        )
    at = float(up.place(np.array([mark.place]))[0])
    return (
        f'<path class="mark" d="M{_LEFT} {_number(at)}H{_number(across.end)}"/>'
        f'<text class="note" text-anchor="end" x="{_number(across.end - 4)}" '
        f'y="{_number(at - 5)}">{label}</text>'
    )


def _legend(series: Sequence[PlotSeries]) -> Iterator[tuple[int, str]]:
    """The row and the element of each entry; as many a row as there is room for."""
    x, row = _LEFT, 0
    for one in series:
        width = 26.0 + _LETTER_WIDTH * len(one.label) + 16.0
        if x > _LEFT and x + width > _WIDTH:
            x, row = _LEFT, row + 1
        y = _HEIGHT + 18.0 * row + 6.0
        dashed = "dashed " if one.is_dashed else ""
        yield (
            row,
            f'<path class="{dashed}line c{one.color}" d="M{_number(x)} {_number(y - 4)}h18"/>'
            f'<text class="key" x="{_number(x + 24)}" y="{_number(y)}">{escape(one.label)}</text>',
        )
        x += width


def _svg(parts: Sequence[str], height: float, name: str) -> str:
    head = f'role="img" aria-label="{escape(name)}" viewBox="0 0 {_WIDTH:g} {_number(height)}"'
    return f'<svg class="chart" {head}>{"".join(parts)}</svg>'


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
