import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from outrider.gateway.tools.measuring.bench.compare import compare_results
from outrider.gateway.tools.measuring.bench.plots import (
    Axis,
    IntervalRow,
    PlotSeries,
    ReferenceLine,
    cdf,
    chart,
    linear_ticks,
    log_ticks,
    spans,
    tick_text,
)
from outrider.gateway.tools.measuring.bench.report_html import (
    ReportSection,
    comparison_page,
    report_page,
    write_comparison_report,
    write_report,
)
from outrider.gateway.tools.measuring.bench.results import ResultError
from tests.gateway.tools.measuring.bench.made_results import made_result, made_rows, made_search

_VOID = {"meta", "link", "br", "img", "hr"}


class _Reader(HTMLParser):
    """Notes texts and checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_a_page_stands_alone_and_trusts_no_data() -> None:
    result = made_result(
        made_rows(120, num_failed=3),
        search=made_search(),
        model="<script>alert(1)</script>",
        notes=["a note with <img src=x onerror=alert(2)>"],
        served_by='quote " and <i>',
    )
    page = report_page(result)
    reader = _read(page)
    assert "script" not in reader.tags
    assert "img" not in reader.tags
    names = {name for name, _ in reader.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not names & {"src", "href"}
    assert "url(" not in page
    assert "@import" not in page
    text = " ".join(reader.texts)
    assert "<b>overloaded</b>" in text
    assert "code <script>" in text
    for words in ("Time to first token.", "By category", "Search for the highest rate", "p99"):
        assert words in text
    assert "120 requests were answered" in text


def test_figures_are_those_of_the_summary() -> None:
    result = made_result(made_rows(200))
    text = " ".join(_read(report_page(result)).texts)
    summary = result.summary
    assert summary.ttft_ms is not None
    assert summary.attainment is not None
    assert f"{summary.ttft_ms.p99.value:.4g} ms" in text
    assert f"{summary.attainment.value:.1%} of all requests" in text
    assert "No request failed." in text
    assert "Search" not in text


def test_a_run_in_which_everything_failed_has_a_page() -> None:
    page = report_page(made_result(made_rows(10, num_failed=10)))
    text = " ".join(_read(page).texts)
    assert "0 of 10 requests were answered" in text
    assert "No data for: Distribution of the time to first token." in text


def test_sections_of_others_are_put_in() -> None:
    section = ReportSection(title="An <experiment>", html="<p>as it is</p>")
    page = report_page(made_result(made_rows(10)), sections=[section])
    assert "<h2>An &lt;experiment&gt;</h2>\n<p>as it is</p>" in page


def test_two_runs_have_a_page(tmp_path: Path) -> None:
    first = made_result(made_rows(80), arm="plain")
    second = made_result(made_rows(80, seed=1, slower=0.6), arm="<tree>")
    comparison = compare_results(first, second)
    text = " ".join(_read(comparison_page(first, second, comparison)).texts)
    assert "<tree> compared with plain" in text
    assert "<tree> is better in TTFT mean" in text
    assert text.count("Conditions") == 2
    path = tmp_path / "new" / "page.html"
    write_comparison_report(first, second, comparison, path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ResultError, match="cannot be written"):
        write_report(made_result(made_rows(5)), tmp_path / "file" / "page.html")


@pytest.mark.slow
def test_a_large_run_stays_small() -> None:
    assert len(report_page(made_result(made_rows(3000, num_tokens=4)))) < 300_000


# ---- charts -----------------------------------------------------------------------------------


def test_points_lie_where_the_axes_say() -> None:
    svg = chart(
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
    (mark,) = [one for one in root if one.attrib.get("class") == "mark"]
    at, mark_top, mark_bottom = (float(n) for n in re.findall(r"[\d.]+", mark.attrib["d"]))
    assert at == pytest.approx((left + right) / 2, abs=0.1)
    assert (mark_top, mark_bottom) == (top, bottom)


def test_a_log_axis_has_equal_distances_for_equal_ratios() -> None:
    svg = chart(
        [PlotSeries(label="", x=[1.0, 10.0, 100.0, 0.0], y=[1.0, 1.0, 1.0, 1.0])],
        x=Axis(label="x", scale="log"),
        y=Axis(label="y"),
        name="n",
    )
    found = re.search(r'class="line c1" d="M([\d.]+) [\d.]+L([\d.]+) [\d.]+L([\d.]+) [\d.]+"', svg)
    assert found is not None  # and 0, which has no logarithm, is left out
    first, second, third = (float(group) for group in found.groups())
    assert second - first == pytest.approx(third - second, abs=0.2)


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf")]])
def test_nothing_to_draw_is_said(values: list[float]) -> None:
    series = [PlotSeries(label="a", x=values, y=values)]
    svg = chart(series, x=Axis(label="x"), y=Axis(label="y"), name="the name")
    assert svg == '<p class="soft">No data for: the name.</p>'


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-9, 1e12])
def test_one_value_is_drawn(value: float) -> None:
    svg = chart(
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
        spans(rows, x=Axis(label="ratio", scale="log"), name="n", zero=1.0)
    )
    assert len([one for one in root if one.tag == "circle"]) == 3


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


def test_rows_without_a_start_do_not_break_the_course() -> None:
    rows = made_rows(10)
    held = msgspec.structs.replace(
        rows[0], sent_s=None, first_s=None, last_s=None, gaps_ms=[], error="unfinished"
    )
    _read(report_page(made_result([held, *rows[1:]])))


def test_the_conditions_are_folded() -> None:
    page = report_page(made_result(made_rows(20)))
    folded = page.partition("<h2>Conditions</h2>")[2].partition("</details>")[0]
    assert folded.strip().startswith("<details><summary>")
    assert 'class="table conditions"' in folded
