"""Charts as inline SVG, drawn here: a report needs no plotting package and no script.

Colours are CSS variables of `report.css` (`--c1` to `--c6`, `--ink`, `--soft`, `--grid`), so that a
chart is dark where the page is. Everything that comes from data is escaped.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

import numpy as np

from outrider.gateway.tools.reports.axes import (
    Floats,
    Points,
    Range,
    interval_range,
    points_of,
    ranges,
)
from outrider.gateway.tools.reports.charts import (
    AnyChart,
    Chart,
    IntervalChart,
    IntervalRow,
    ReferenceLine,
)

_WIDTH: Final = 560.0
_HEIGHT: Final = 320.0
_LEFT: Final = 58.0
_RIGHT: Final = 14.0
_TOP: Final = 20.0
_BOTTOM: Final = 46.0
_ROWS_LEFT: Final = 210.0
_ROW_HEIGHT: Final = 26.0
_KEY_HEIGHT: Final = 18.0
_MAX_LINE_POINTS: Final = 400
_MAX_DOTS: Final = 3000
_DOT: Final = "h.01"
_MAX_FEW: Final = 30
"""Most points whose dots are large."""
_GAP: Final = 20.0
_LETTER_WIDTH: Final = 6.9
"""Mean width of a letter in the legend, in units of the drawing."""
FONT_SIZE: Final = "12"
NAMESPACE: Final = "http://www.w3.org/2000/svg"
_STROKES: Final[Mapping[str, str]] = {
    "line": 'stroke-width="2" stroke-linejoin="round"',
    "dashed": 'stroke-width="1.6" stroke-dasharray="6 4"',
    "whisker": 'stroke-width="1"',
    "points": 'stroke-width="4.6" stroke-linecap="round" opacity="0.7"',
    "few": 'stroke-width="7" stroke-linecap="round"',
    "value": 'stroke-width="8" stroke-linecap="round"',
    "span": 'stroke-width="5" stroke-linecap="round" opacity="0.45"',
    "mark": 'stroke-width="1" stroke-dasharray="2 3"',
    "axis": 'stroke-width="1"',
    "grid": 'stroke-width="0.8"',
}
"""The stroke of each kind of line; the kinds that are not here are filled."""
_FILLS: Final[Mapping[str, str]] = {"area": 'opacity="0.16"', "bar": "", "arrow": ""}
_TEXTS: Final[Mapping[str, str]] = {
    "x": 'class="x soft" text-anchor="middle"',
    "y": 'class="y soft" text-anchor="end"',
    "name": 'class="name ink" text-anchor="middle"',
    "row": 'class="row ink" text-anchor="end"',
    "key": 'class="key ink"',
    "note": 'class="note soft" font-size="11"',
    "note-end": 'class="note soft" font-size="11" text-anchor="end"',
    "title": 'class="title ink" font-size="14"',
    "head": 'class="head ink" font-size="17"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """The shapes of a drawing and its height."""

    parts: Sequence[str]
    height: float
    name: str

    def svg(self, place: str = "") -> str:
        """Return the element. `place`: attributes for one within another."""
        label = f'role="img" aria-label="{escape(self.name)}"'
        box = f'viewBox="0 0 {_WIDTH:g} {_number(self.height)}"'
        head = f'class="chart" font-size="{FONT_SIZE}" {label} {box}{place}'
        return f"<svg {head}>{''.join(self.parts)}</svg>"


def drawing(chart: AnyChart) -> str:
    """Return an <svg> element; for a chart without points a sentence."""
    drawn = _drawn(chart)
    if drawn is None:
        return f'<p class="soft">No data for: {escape(chart.name)}.</p>'
    return drawn.svg()


def svg_file(
    charts: Iterable[AnyChart], *, title: str = "", note: str = "", num_columns: int = 1, style: str
) -> str:
    """Return the charts in rows, each below its name, as a file that stands alone."""
    drawings = [_drawn(chart) or _empty(chart.name) for chart in charts]
    parts, top = [], 12.0
    if title:
        parts.append(_text("head", _GAP, 24, title))
        top = 40.0
    for first in range(0, len(drawings), num_columns):
        row = drawings[first : first + num_columns]
        for number, drawn in enumerate(row):
            left = _GAP + number * (_WIDTH + _GAP)
            size = f' width="{_WIDTH:g}" height="{_number(drawn.height)}"'
            place = f' x="{_number(left)}" y="{_number(top + 16)}"'
            parts += [_text("title", left, top + 10, drawn.name), drawn.svg(place + size)]
        top += max(drawn.height for drawn in row) + 16 + _GAP
    for line in textwrap.wrap(note, 75 * num_columns):
        parts.append(_text("key", _GAP, top, line))
        top += 18.0
    width = _GAP + num_columns * (_WIDTH + _GAP)
    head = f'xmlns="{NAMESPACE}" class="chart alone" font-size="{FONT_SIZE}"'
    root = f'<svg {head} viewBox="0 0 {width:g} {_number(top)}">'
    return f"{root}<style>{style}</style>{''.join(parts)}</svg>"


def _drawn(chart: AnyChart) -> _Drawing | None:
    return _rows(chart) if isinstance(chart, IntervalChart) else _plane(chart)


def _plane(chart: Chart) -> _Drawing | None:
    kept = points_of(chart)
    if not kept:
        return None
    across, up = ranges(chart, kept, (_LEFT, _WIDTH - _RIGHT), (_HEIGHT - _BOTTOM, _TOP))
    plane = _Plane(across=across, up=up)
    shades = [mark for mark in chart.marks if mark.until is not None]
    keys = [*_keys(kept), *((one.label, "area", f"c{one.color}") for one in shades)]
    legend = list(_legend(keys))
    parts = [
        *(plane.shade(mark) for mark in shades),
        *plane.frame(),
        *(part for points in kept for part in plane.series(points)),
        *(plane.line(mark) for mark in chart.marks if mark.until is None),
        *(text for _, text in legend),
    ]
    num_rows = 1 + max((row for row, _ in legend), default=-1)
    return _Drawing(parts=parts, height=_HEIGHT + _KEY_HEIGHT * num_rows, name=chart.name)


def _rows(chart: IntervalChart) -> _Drawing | None:
    if not chart.rows:
        return None
    bottom = _TOP + _ROW_HEIGHT * len(chart.rows)
    across = interval_range(chart, (_ROWS_LEFT, _WIDTH - _RIGHT))
    parts = list(_bottom_axis(across, _TOP, bottom))
    if chart.zero is not None:
        at = _number(across.place(chart.zero))
        parts.append(_path("mark", "ink", f"M{at} {_TOP}V{_number(bottom)}"))
    for number, row in enumerate(chart.rows):
        parts += _row(row, across, _TOP + _ROW_HEIGHT * (number + 0.5))
    return _Drawing(parts=parts, height=bottom + _BOTTOM, name=chart.name)


def _empty(name: str) -> _Drawing:
    return _Drawing(parts=[_text("x", _WIDTH / 2, _TOP, "no data")], height=_BOTTOM, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """Both axes of a chart, and what is drawn on them."""

    across: Range
    up: Range

    def frame(self) -> Iterator[str]:
        """The grid with its figures, and the axes' names."""
        yield from _bottom_axis(self.across, self.up.end, self.up.start)
        for place, text in self.up.ticks():
            yield _path("grid", "rule", f"M{_LEFT} {_number(place)}H{_number(self.across.end)}")
            yield _text("y", _LEFT - 7, place + 4, text)
        middle = (self.up.start + self.up.end) / 2
        yield _text("name", 13.0, middle, self.up.axis.label, turned=True)

    def series(self, points: Points) -> Iterator[str]:
        """A series by its kind, its interval below it."""
        series, color = points.series, f"c{points.series.color}"
        points = _thinned(points, _MAX_DOTS if series.kind == "dots" else _MAX_LINE_POINTS)
        if series.kind == "bars":
            yield _path("bar", color, self._bars(points))
            return
        if series.high is not None:
            yield self._interval(points, color)
        if series.kind == "area":
            foot = np.full_like(points.y, self.up.low)
            yield _path("area", color, self._band(points.x, foot, points.y))
        if series.kind != "dots":
            yield _path("dashed" if series.is_dashed else "line", color, self._line(points))
        if series.kind in ("dots", "marked"):
            dots = "".join(f"M{one}{_DOT}" for one in self._pairs(points.x, points.y))
            yield _path("few" if points.x.size <= _MAX_FEW else "points", color, dots)

    def _interval(self, points: Points, color: str) -> str:
        low, high = (np.clip(b, self.up.low, self.up.high) for b in (points.low, points.high))
        if points.series.kind in ("line", "step"):
            return _path("area", color, self._band(points.x, low, high))
        ends = zip(self._pairs(points.x, low), self.up.places(high), strict=True)
        return _path("whisker", color, "".join(f"M{low}V{_number(high)}" for low, high in ends))

    def _line(self, points: Points) -> str:
        pairs = self._pairs(points.x, points.y)
        if points.series.kind != "step":
            return "M" + "L".join(pairs)
        return f"M{pairs[0]}" + "".join("H{}V{}".format(*one.split()) for one in pairs[1:])

    def _band(self, x: Floats, low: Floats, high: Floats) -> str:
        return "M" + "L".join([*self._pairs(x, low), *reversed(self._pairs(x, high))]) + "Z"

    def _bars(self, points: Points) -> str:
        feet = self._pairs(points.x - points.half_width, points.low)
        tops = self._pairs(points.x + points.half_width, points.y)
        corners = [(*foot.split(), *top.split()) for foot, top in zip(feet, tops, strict=True)]
        return "".join(
            f"M{left} {foot}V{top}H{right}V{foot}Z" for left, foot, right, top in corners
        )

    def _pairs(self, x: Floats, y: Floats) -> list[str]:
        places = zip(self.across.places(x), self.up.places(y), strict=True)
        return [f"{_number(a)} {_number(b)}" for a, b in places]

    def shade(self, mark: ReferenceLine) -> str:
        """The part between a mark's two ends."""
        along, across = (self.across, self.up) if mark.is_vertical else (self.up, self.across)
        start, end = (_number(along.place(one)) for one in mark.places)
        first, last = _number(across.start), _number(across.end)
        shape = f"M{start} {first}V{last}H{end}V{first}Z"
        if not mark.is_vertical:
            shape = f"M{first} {start}H{last}V{end}H{first}Z"
        return _path("area", f"c{mark.color}", shape)

    def line(self, mark: ReferenceLine) -> str:
        """A line with its words."""
        if mark.is_vertical:
            at = self.across.place(mark.place)
            is_left = at > (self.across.start + self.across.end) / 2
            side, style = (-5, "note-end") if is_left else (5, "note")
            drawn = _path(
                "mark", "ink", f"M{_number(at)} {_number(self.up.end)}V{_number(self.up.start)}"
            )
            return drawn + _text(style, at + side, self.up.end - 5, mark.label)
        at = self.up.place(mark.place)
        drawn = _path("mark", "ink", f"M{_LEFT} {_number(at)}H{_number(self.across.end)}")
        return drawn + _text("note-end", self.across.end - 4, at - 5, mark.label)


# ---- parts ------------------------------------------------------------------------------------


def _bottom_axis(across: Range, top: float, bottom: float) -> Iterator[str]:
    yield _path("axis", "soft", f"M{_number(across.start)} {_number(bottom)}H{across.end}")
    for place, text in across.ticks():
        yield _path("grid", "rule", f"M{_number(place)} {_number(top)}V{_number(bottom)}")
        yield _text("x", place, bottom + 17, text)
    yield _text("name", (across.start + across.end) / 2, bottom + 37, across.axis.label)


def _row(row: IntervalRow, across: Range, y: float) -> Iterator[str]:
    """An interval's name, its span, its figure, and arrows where it goes on."""
    yield _text("row", _ROWS_LEFT - 10, y + 4, row.label)
    if math.isnan(row.value):
        yield _text("x", (across.start + across.end) / 2, y + 4, "no data")
        return
    low, high = (_number(across.place(one)) for one in (row.low, row.high))
    at, color = _number(y), f"c{row.color}"
    yield _path("span", color, f"M{low} {at}H{high}")
    if row.low < across.low:
        yield _path("arrow", color, f"M{low} {at}l7 -5v10Z")
    if row.high > across.high:
        yield _path("arrow", color, f"M{high} {at}l-7 -5v10Z")
    if across.low <= row.value <= across.high:
        yield _path("value", color, f"M{_number(across.place(row.value))} {at}{_DOT}")


def _thinned(points: Points, most: int) -> Points:
    """At most so many of them, spread evenly, the first and the last always."""
    if points.x.size <= most:
        return points
    return points.at(np.linspace(0, points.x.size - 1, most).round().astype(np.int64))


_Key = tuple[str, str, str]
"""Words, style and colour of an entry of the legend."""


def _keys(kept: Sequence[Points]) -> Iterator[_Key]:
    styles = {"bars": "bar", "dots": "few"}
    for points in kept:
        series = points.series
        style = styles.get(series.kind, "dashed" if series.is_dashed else "line")
        yield series.label, style, f"c{series.color}"


def _legend(keys: Sequence[_Key]) -> Iterator[tuple[int, str]]:
    """The row and the elements of each entry; as many a row as there is room for."""
    x, row = _LEFT, 0
    shapes = {"few": f"m9 0{_DOT}", "bar": "v4h18v-8h-18Z", "area": "v4h18v-8h-18Z"}
    for label, style, color in dict.fromkeys(key for key in keys if key[0]):
        width = 26.0 + _LETTER_WIDTH * len(label) + 16.0
        if x > _LEFT and x + width > _WIDTH:
            x, row = _LEFT, row + 1
        y = _HEIGHT + _KEY_HEIGHT * row + 6.0
        shape = f"M{_number(x)} {_number(y - 4)}{shapes.get(style, 'h18')}"
        yield row, _path(style, color, shape) + _text("key", x + 24, y, label)
        x += width


def _path(style: str, color: str, shape: str) -> str:
    if style in _STROKES:
        looks = f'fill="none" stroke="currentColor" {_STROKES[style]}'
    else:
        looks = f'fill="currentColor" {_FILLS[style]}'.rstrip()
    return f'<path class="{style} {color}" {looks} d="{shape}"/>'


def _text(style: str, x: float, y: float, words: str, *, turned: bool = False) -> str:
    place = f'x="{_number(x)}" y="{_number(y)}"'
    if turned:
        place += f' transform="rotate(-90 {_number(x)} {_number(y)})"'
    return f'<text {_TEXTS[style]} fill="currentColor" {place}>{escape(words)}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
