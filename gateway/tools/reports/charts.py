"""Charts as data; `svg` draws them for a page, `pictures` as files."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

SeriesKind = Literal["line", "step", "dots", "marked", "area", "bars"]
"""`step` holds a y until the next x. `area` is filled down to the axis. `dots` are not connected;
`marked` is a line with a dot at each point."""
Scale = Literal["linear", "log"]
ChartValues = Sequence[float] | NDArray[Any]

NUM_COLORS: Final = 6


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """Points in the order of drawing; those that are not finite are left out."""

    label: str  # in the legend; empty: not there
    x: ChartValues
    y: ChartValues
    color: int = 1  # 1 to 6, 0 for the soft grey
    _: KW_ONLY
    kind: SeriesKind = "line"
    low: ChartValues | None = None  # with `high` an interval; of bars alone their feet
    high: ChartValues | None = None  # a band about a line, whiskers at dots
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis without `low` starts at 0; other bounds that are None come from the data."""

    label: str
    _: KW_ONLY
    scale: Scale = "linear"
    low: float | None = None
    high: float | None = None
    is_share: bool = False  # written in percent
    ticks: Sequence[float] | None = None  # None: round figures


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A line across the chart: an objective, a target, a moment. With `until` all between them."""

    place: float
    label: str  # at the line; in the legend of what has an end
    _: KW_ONLY
    is_vertical: bool = True
    until: float | None = None
    color: int = 0  # of the shade

    @property
    def places(self) -> list[float]:
        """Its one end, or both."""
        return [self.place] if self.until is None else [self.place, self.until]


@dataclass(frozen=True, slots=True)
class IntervalRow:
    """A figure and how sure it is, in a row of its own.

    NaN: no figure. A bound that is not finite, or lies outside of the axis, is drawn as an arrow.
    """

    label: str
    low: float
    value: float
    high: float
    color: int = 1


@dataclass(frozen=True, slots=True)
class Chart:
    """Series on two axes."""

    name: str  # what a screen reader says of it, and the title of a picture
    series: Sequence[PlotSeries]
    _: KW_ONLY
    x: Axis
    y: Axis
    marks: Sequence[ReferenceLine] = ()


@dataclass(frozen=True, slots=True)
class IntervalChart:
    """One row an interval."""

    name: str  # as a chart's
    rows: Sequence[IntervalRow]
    _: KW_ONLY
    x: Axis
    zero: float | None = 0.0  # where "no difference" lies; None: no such line


AnyChart = Chart | IntervalChart


def bar(label: str, value: float, color: int) -> IntervalRow:
    """Return a row that is a bar from 0 to its figure."""
    return IntervalRow(label, 0.0, value, value, color)


def lines_by_case(
    name: str,
    entries: Mapping[float, Mapping[str, Any]],
    x: Axis,
    pick: Callable[[Any], float | None],
) -> Chart:
    """Return a line a case, of `pick(entries[x][case])` over x; None: no point."""
    cases = list(next(iter(entries.values())))
    found = {
        case: np.array([pick(entry[case]) for entry in entries.values()], dtype=np.float64)
        for case in cases
    }
    series = [
        PlotSeries(case, list(entries), found[case], number % NUM_COLORS + 1, kind="marked")
        for number, case in enumerate(cases)
    ]
    return Chart(name, series, x=x, y=Axis(""))


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
