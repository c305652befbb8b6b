import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.gateway.tools.reports import page
from outrider.gateway.tools.reports.axes import linear_ticks, log_ticks, tick_text
from outrider.gateway.tools.reports.charts import (
    Axis,
    Chart,
    IntervalChart,
    IntervalRow,
    PlotSeries,
    ReferenceLine,
    bar,
    cdf,
)
from outrider.gateway.tools.reports.svg import drawing, svg_file

TOP = 20.0
"""Where the y axis ends on a drawing."""


def drawn(
    series: Sequence[PlotSeries],
    *,
    x: Axis,
    y: Axis,
    name: str = "n",
    marks: Sequence[ReferenceLine] = (),
) -> str:
    return drawing(Chart(series=series, x=x, y=y, name=name, marks=marks))


def test_points_lie_where_the_axes_say() -> None:
    svg = drawn(
        [PlotSeries(label="a<b", x=[0.0, 10.0], y=[0.0, 100.0])],
        x=Axis(label="x", low=0.0, high=10.0),
        y=Axis(label="y", low=0.0, high=100.0),
        name='say "it"',
        marks=[ReferenceLine(place=5.0, label="half")],
    )
    root = ElementTree.fromstring(svg)  # well-formed
    assert root.attrib["aria-label"] == 'say "it"'
    (line,) = [
        one for one in root if one.attrib.get("class") == "line c1" and "L" in one.attrib["d"]
    ]
    left, bottom, right, top = (float(n) for n in re.findall(r"[\d.]+", line.attrib["d"]))
    (mark,) = [one for one in root if one.attrib.get("class") == "mark ink"]
    at, mark_top, mark_bottom = (float(n) for n in re.findall(r"[\d.]+", mark.attrib["d"]))
    assert at == pytest.approx((left + right) / 2, abs=0.1)
    assert (mark_top, mark_bottom) == (top, bottom)


def test_a_log_axis_has_equal_distances_for_equal_ratios() -> None:
    svg = drawn(
        [PlotSeries(label="", x=[1.0, 10.0, 100.0, 0.0], y=[1.0, 1.0, 1.0, 1.0])],
        x=Axis(label="x", scale="log"),
        y=Axis(label="y"),
        name="n",
    )
    found = re.search(
        r'class="line c1" [^>]*d="M([\d.]+) [\d.]+L([\d.]+) [\d.]+L([\d.]+) [\d.]+"', svg
    )
    assert found is not None  # and 0, which has no logarithm, is left out
    first, second, third = (float(group) for group in found.groups())
    assert second - first == pytest.approx(third - second, abs=0.2)


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf")]])
def test_nothing_to_draw_is_said(values: list[float]) -> None:
    series = [PlotSeries(label="a", x=values, y=values)]
    svg = drawn(series, x=Axis(label="x"), y=Axis(label="y"), name="the name")
    assert svg == '<p class="soft">No data for: the name.</p>'


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-9, 1e12])
def test_one_value_is_drawn(value: float) -> None:
    svg = drawn(
        [PlotSeries(label="a", x=[value], y=[value], kind="dots")],
        x=Axis(label="x"),
        y=Axis(label="y"),
        name="n",
    )
    assert "nan" not in svg
    assert "inf" not in svg
    ElementTree.fromstring(svg)


def test_intervals_have_a_row_each() -> None:
    rows = [IntervalRow(label=f"row {n}", low=0.8, value=0.9, high=1.1) for n in range(3)]
    root = ElementTree.fromstring(
        drawing(IntervalChart(rows=rows, x=Axis(label="ratio", scale="log"), name="n", zero=1.0))
    )
    assert len([one for one in root if one.attrib.get("class") == "value c1"]) == 3


def test_ticks_are_round_and_inside() -> None:
    assert linear_ticks(0.0, 10.0) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert linear_ticks(0.93, 1.02)[0] == pytest.approx(0.94)
    assert log_ticks(1.0, 100.0) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    assert log_ticks(1.0, 1e6) == [10.0**power for power in range(7)]
    assert all(7.0 <= tick <= 9.0 for tick in log_ticks(7.0, 9.0))
    assert [tick_text(v) for v in (0.05, 1200.0, 15_000.0, 2e6)] == ["0.05", "1200", "15k", "2M"]
    assert tick_text(0.25, is_share=True) == "25 %"


def test_a_distribution_keeps_its_ends() -> None:
    xs, shares = cdf([float(n) for n in range(1000)], num_points=50)
    assert len(xs) <= 50
    assert (xs[0], xs[-1], shares[-1]) == (0.0, 999.0, 1.0)
    assert shares[0] == 0.001
    assert cdf([]) == ([], [])


def _paths(svg: str, style: str) -> list[str]:
    return [
        one.attrib["d"]
        for one in ElementTree.fromstring(svg).iter()
        if one.attrib.get("class", "").startswith(style)
    ]


def test_bars_stand_on_the_feet_that_they_are_given() -> None:
    below = PlotSeries(label="", x=[0, 1], y=[2, 4], kind="bars", color=1)
    above = PlotSeries(label="", x=[0, 1], y=[3, 5], low=[2, 4], kind="bars", color=2)
    svg = drawn([below, above], x=Axis(label="x"), y=Axis(label="y"))
    first, second = (
        re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", *_paths(svg, f"bar c{n}")) for n in (1, 2)
    )
    assert [foot for foot, _ in second] == [top for _, top in first]


@pytest.mark.parametrize(("kind", "style"), [("line", "area"), ("marked", "whisker")])
def test_an_interval_is_a_band_about_a_line_and_whiskers_at_dots(kind: Any, style: str) -> None:
    series = PlotSeries(
        label="a", x=[0, 1, float("nan")], y=[2, 4, 6], low=[1, 3, 5], high=[3, 5, 7], kind=kind
    )
    svg = drawn([series], x=Axis(label="x"), y=Axis(label="y", low=0.0, high=4.0))
    (path,) = _paths(svg, f"{style} c1")
    heights = {float(y) for y in re.findall(r"(?:V|[ML][\d.]+ )([\d.]+)", path)}
    assert len(heights) == 3, "1, 3 and the axis' end; what has no place is left out"
    assert min(heights) == TOP


def test_an_interval_that_goes_on_has_an_arrow() -> None:
    rows = [
        IntervalRow(label="inside", low=-0.1, value=0.0, high=0.1),
        IntervalRow(label="beyond", low=-0.1, value=0.5, high=float("inf")),
        IntervalRow(label="none", low=float("nan"), value=float("nan"), high=float("nan")),
    ]
    svg = drawing(IntervalChart(name="n", rows=rows, x=Axis(label="x", low=-0.2, high=0.2)))
    root = ElementTree.fromstring(svg)
    assert len(_paths(svg, "arrow c1")) == 1
    assert len(_paths(svg, "value")) == 1
    assert "no data" in [one.text for one in root]
    assert "nan" not in svg
    assert "inf" not in svg.replace("inside", "")


def test_shades_of_one_name_are_in_the_legend_once() -> None:
    marks = [ReferenceLine(place=at, until=at + 1.0, label="a fault", color=2) for at in (0.0, 5.0)]
    series = PlotSeries(label="a", x=[0, 9], y=[1, 1], kind="dots")
    svg = drawn([series], x=Axis(label="x"), y=Axis(label="y"), marks=marks)
    texts = [one.text for one in ElementTree.fromstring(svg)]
    assert texts.count("a fault") == 1
    assert len(_paths(svg, "area c2")) == 3, "two shades and their key"


def test_a_file_stands_alone() -> None:
    chart = Chart(
        name="a < b",
        series=[PlotSeries("the series", [1, 2], [1, 2])],
        x=Axis(label="x"),
        y=Axis(label="y"),
    )
    rows = IntervalChart(name="rows", rows=[bar("a", 2.0, 1)], x=Axis(label="x"))
    empty = replace(chart, name="empty", series=())
    root = ElementTree.fromstring(svg_file([chart, rows, empty], style=page.style()))
    inner = [one for one in root if one.tag.endswith("svg")]
    assert [one.attrib["aria-label"] for one in inner] == ["a < b", "rows", "empty"]
    assert [one.text for one in inner[2]] == ["no data"]
    assert float(inner[1].attrib["y"]) >= float(inner[0].attrib["height"])
    assert "the series" in [one.text for one in inner[0]]
