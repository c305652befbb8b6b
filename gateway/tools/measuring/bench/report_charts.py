"""The charts of a benchmark's report: distributions, the run's course, and a search's curve."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.gateway.tools.measuring.bench.compare import Difference, RunComparison
from outrider.gateway.tools.measuring.bench.results import BenchResult, RequestRow, SearchReport
from outrider.gateway.tools.reports.charts import (
    Axis,
    Chart,
    IntervalChart,
    IntervalRow,
    PlotSeries,
    ReferenceLine,
    cdf,
)
from outrider.gateway.tools.reports.page import figure

_Floats = NDArray[np.float64]

_NUM_WINDOWS: Final = 60
_LATENESS_SHOWN: Final = 0.03
"""Smallest relative difference of mean latency, since due and since sent, that is drawn as two
lines."""


# ---- one run ----------------------------------------------------------------------------------


def run_figures(result: BenchResult) -> Iterator[str]:
    """The figures of one run, in the page's order."""
    rows = [row for row in result.measured if row.is_success]
    yield ttft_figure(result, rows)
    yield token_figure(result, rows)
    yield end_figure(result, rows)
    yield course_figure(result)
    yield load_figure(result)
    if result.search is not None:
        yield search_figure(result.search)


def ttft_figure(result: BenchResult, rows: Sequence[RequestRow]) -> str:
    """Distribution of the first tokens."""
    due = [row.ttft_ms for row in rows if row.ttft_ms is not None]
    sent = [row.sent_ttft_ms for row in rows if row.sent_ttft_ms is not None]
    name = "Distribution of the time to first token"
    drawn = _shares(name, _since(due, sent), result.objectives.ttft_ms)
    text = "The share of answers that had begun after so long."
    return figure(drawn, "Time to first token.", text)


def token_figure(result: BenchResult, rows: Sequence[RequestRow]) -> str:
    """Distributions of the gaps and of their means."""
    gaps = [gap for row in rows for gap in row.gaps_ms]
    means = [row.tpot_ms for row in rows if row.tpot_ms is not None]
    series = [
        _distribution("each gap between events (ITL)", gaps, color=3),
        _distribution("mean a token of an answer (TPOT)", means, color=1),
    ]
    name = "Distribution of the time between tokens"
    drawn = _shares(name, series, result.objectives.inter_token_ms)
    text = "An event may carry several tokens, so that gaps can be longer than the time of a token."
    return figure(drawn, "Between tokens.", text)


def end_figure(result: BenchResult, rows: Sequence[RequestRow]) -> str:
    """Distribution of the whole answers' times."""
    due = [row.e2e_ms for row in rows]
    sent = [row.sent_e2e_ms for row in rows if row.sent_e2e_ms is not None]
    name = "Distribution of the whole answer's time"
    drawn = _shares(name, _since(due, sent), result.objectives.e2e_ms)
    return figure(drawn, "Whole answers.", "The share of answers that were over after so long.")


def course_figure(result: BenchResult) -> str:
    """Each request's first token and end over the run."""
    rows = result.measured
    start_s = _start_s(rows)
    good = [row for row in rows if row.is_success]
    bad = [row for row in rows if not row.is_success]
    series = [
        _over_time("whole answer", good, [row.e2e_ms for row in good], start_s, color=3),
        _over_time("first token", good, [row.ttft_ms for row in good], start_s, color=1),
        _over_time("failed", bad, [row.e2e_ms for row in bad], start_s, color=4),
    ]
    drawn = Chart(
        "Latency of each request over the run",
        series,
        x=Axis("seconds since the start"),
        y=Axis("milliseconds", scale="log"),
        marks=_objective(result.objectives.ttft_ms, is_vertical=False),
    )
    text = "Each request at the moment when it was due. A rising cloud is a queue that grows."
    return figure(drawn, "The run's course.", text)


def load_figure(result: BenchResult) -> str:
    """Requests in flight, arriving and answered over the run."""
    rows = result.measured
    if not rows:
        return figure(_load_chart([]), "Load.", "No requests.")
    start_s = _start_s(rows)
    end_s = max(row.ended_s for row in rows)
    edges = np.linspace(0.0, max(end_s - start_s, 1e-3), _NUM_WINDOWS + 1)
    width_s = float(edges[1])
    due = np.array([row.scheduled_s - start_s for row in rows])
    ended = np.array([row.ended_s - start_s for row in rows])
    done = np.array([row.ended_s - start_s for row in rows if row.is_success])
    in_flight = _mean_in_flight(due, ended, edges)
    middles = (edges[1:] + edges[:-1]) / 2
    series = [
        PlotSeries("open requests", middles, in_flight, 3, kind="area"),
        _rate("due a second", due, edges, width_s, color=2),
        _rate("answered a second", done, edges, width_s, color=1),
    ]
    text = f"Means over {width_s:.2g} s; open: due and not over yet."
    return figure(_load_chart(series), "Load.", text)


def _load_chart(series: Sequence[PlotSeries]) -> Chart:
    name = "Requests open, due and answered over the run"
    return Chart(name, series, x=Axis("seconds since the start"), y=Axis("requests"))


def search_figure(search: SearchReport) -> str:
    """Attainment and goodput of each rate that a search tried."""
    steps = sorted(search.steps, key=lambda step: step.rate_per_s)
    known = [
        (step.rate_per_s, step.summary.attainment)
        for step in steps
        if step.summary.attainment is not None
    ]
    rates = [rate for rate, _ in known]
    values = [share.value for _, share in known]
    low = [share.value if share.low is None else share.low for _, share in known]
    high = [share.value if share.high is None else share.high for _, share in known]
    marks = [ReferenceLine(search.target_attainment, "wanted", is_vertical=False)]
    if (best := search.best_rate_per_s) is not None:
        marks.append(ReferenceLine(best, f"{best:.3g} requests/s"))
    label = "attainment, 95 % intervals"
    drawn = Chart(
        "Attainment by rate",
        [PlotSeries(label, rates, values, kind="marked", low=low, high=high)],
        x=Axis("requests a second", scale="log"),
        y=Axis("met all objectives", is_share=True, low=0.0, high=1.05),
        marks=marks,
    )
    text = "The share of requests that met all objectives, at each rate that was tried."
    return figure(drawn, "How much it carries.", text)


# ---- two runs ---------------------------------------------------------------------------------


def comparison_figures(
    first: BenchResult, second: BenchResult, comparison: RunComparison
) -> Iterator[str]:
    """The differences with their intervals, then both distributions of each latency."""
    yield ratio_figure(comparison)
    labels = (comparison.first_label, comparison.second_label)
    sides = [[row for row in one.measured if row.is_success] for one in (first, second)]
    objectives = first.objectives
    for title, name, bound_ms in (
        ("Time to first token.", "ttft_ms", objectives.ttft_ms),
        ("Time a token.", "tpot_ms", objectives.inter_token_ms),
        ("Whole answers.", "e2e_ms", objectives.e2e_ms),
    ):
        series = []
        for label, rows, color in zip(labels, sides, (2, 1), strict=True):
            values = [value for row in rows if (value := getattr(row, name)) is not None]
            series.append(_distribution(label, values, color=color))
        words = title.rstrip(".").lower()
        drawn = _shares(f"Distributions of both sides: {words}", series, bound_ms)
        yield figure(drawn, title, "The share of answers that needed no longer.")


def ratio_figure(comparison: RunComparison) -> str:
    """Second over first, with intervals, of everything that has a ratio."""
    rows = [
        IntervalRow(
            entry.name,
            ratio.value if ratio.low is None else ratio.low,
            ratio.value,
            ratio.value if ratio.high is None else ratio.high,
            _verdict_color(entry),
        )
        for entry in comparison.differences
        if (ratio := entry.ratio) is not None and ratio.value > 0
    ]
    name = "Ratios of the second run to the first, with 95 % intervals"
    drawn = IntervalChart(name, rows, x=Axis("second over first", scale="log"), zero=1.0)
    text = (
        "The second over the first, with 95 % intervals. Teal: the second is better; red: worse; "
        "grey: no difference was seen, or there are too few samples."
    )
    return figure(drawn, "Ratios.", text)


def _verdict_color(entry: Difference) -> int:
    colors: Mapping[str, int] = {"better": 1, "worse": 4}
    return colors.get(entry.verdict, 0)


# ---- parts ------------------------------------------------------------------------------------


def _distribution(
    label: str, values: Sequence[float], *, color: int, is_dashed: bool = False
) -> PlotSeries:
    xs, shares = cdf(values)
    return PlotSeries(label, xs, shares, color, kind="step", is_dashed=is_dashed)


def _since(due: Sequence[float], sent: Sequence[float]) -> list[PlotSeries]:
    """Latencies from when a request was due, and from when it was sent where they differ."""
    series = [_distribution("from when it was due", due, color=1)]
    if _are_apart(due, sent):
        series.append(_distribution("from when it was sent", sent, color=2, is_dashed=True))
    return series


def _shares(name: str, series: Sequence[PlotSeries], bound_ms: float | None) -> Chart:
    x, y = Axis("milliseconds", scale="log"), Axis("share", is_share=True, low=0.0, high=1.03)
    return Chart(name, series, x=x, y=y, marks=_objective(bound_ms))


def _objective(bound_ms: float | None, *, is_vertical: bool = True) -> list[ReferenceLine]:
    if bound_ms is None:
        return []
    return [ReferenceLine(bound_ms, f"objective {bound_ms:g} ms", is_vertical=is_vertical)]


def _are_apart(due: Sequence[float], sent: Sequence[float]) -> bool:
    if not due or not sent:
        return False
    return float(np.mean(due)) > (1 + _LATENESS_SHOWN) * float(np.mean(sent))


def _start_s(rows: Sequence[RequestRow]) -> float:
    return min((row.scheduled_s for row in rows), default=0.0)


def _over_time(
    label: str,
    rows: Sequence[RequestRow],
    values: Sequence[float | None],
    start_s: float,
    *,
    color: int,
) -> PlotSeries:
    points = [
        (row.scheduled_s - start_s, value)
        for row, value in zip(rows, values, strict=True)
        if value is not None
    ]
    return PlotSeries(label, [x for x, _ in points], [y for _, y in points], color, kind="dots")


def _rate(
    label: str, times_s: _Floats, edges: _Floats, width_s: float, *, color: int
) -> PlotSeries:
    counts, _ = np.histogram(times_s, bins=edges)
    middles = (edges[1:] + edges[:-1]) / 2
    return PlotSeries(label, middles, counts / width_s, color)


def _mean_in_flight(due: _Floats, ended: _Floats, edges: _Floats) -> _Floats:
    """Return the mean number of requests in flight in each window. [num_windows]"""
    starts = np.clip(due[:, None], edges[:-1], edges[1:])  # [num_requests, num_windows]
    ends = np.clip(ended[:, None], edges[:-1], edges[1:])
    means: _Floats = (ends - starts).clip(min=0.0).sum(axis=0) / np.diff(edges)
    return means
