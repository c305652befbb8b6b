from pathlib import Path

import msgspec
import pytest

from outrider.gateway.tools.measuring.bench.compare import compare_results
from outrider.gateway.tools.measuring.bench.report_html import (
    ReportSection,
    comparison_page,
    report_page,
)
from outrider.gateway.tools.reports.page import ReportError, write_page
from tests.gateway.tools.measuring.bench.made_results import made_result, made_rows, made_search
from tests.gateway.tools.reports.read_page import ReadPage


def test_a_page_stands_alone_and_trusts_no_data() -> None:
    result = made_result(
        made_rows(120, num_failed=3),
        search=made_search(),
        model="<script>alert(1)</script>",
        notes=["a note with <img src=x onerror=alert(2)>"],
        served_by='quote " and <i>',
    )
    page = report_page(result)
    reader = ReadPage(page)
    reader.assert_alone()
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
    text = " ".join(ReadPage(report_page(result)).texts)
    summary = result.summary
    assert summary.ttft_ms is not None
    assert summary.attainment is not None
    assert f"{summary.ttft_ms.p99.value:.4g} ms" in text
    assert f"{summary.attainment.value:.1%} of all requests" in text
    assert "No request failed." in text
    assert "Search" not in text


def test_a_run_in_which_everything_failed_has_a_page() -> None:
    page = report_page(made_result(made_rows(10, num_failed=10)))
    text = " ".join(ReadPage(page).texts)
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
    text = " ".join(ReadPage(comparison_page(first, second, comparison)).texts)
    assert "<tree> compared with plain" in text
    assert "<tree> is better in TTFT mean" in text
    assert text.count("Conditions") == 2
    path = tmp_path / "new" / "page.html"
    write_page(comparison_page(first, second, comparison), path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ReportError, match="cannot be written"):
        write_page(report_page(made_result(made_rows(5))), tmp_path / "file" / "page.html")


@pytest.mark.slow
def test_a_large_run_stays_small() -> None:
    assert len(report_page(made_result(made_rows(3000, num_tokens=4)))) < 300_000


def test_rows_without_a_start_do_not_break_the_course() -> None:
    rows = made_rows(10)
    held = msgspec.structs.replace(
        rows[0], sent_s=None, first_s=None, last_s=None, gaps_ms=[], error="unfinished"
    )
    ReadPage(report_page(made_result([held, *rows[1:]])))


def test_the_conditions_are_folded() -> None:
    page = report_page(made_result(made_rows(20)))
    folded = page.partition("<h2>Conditions</h2>")[2].partition("</details>")[0]
    assert folded.strip().startswith("<details><summary>")
    assert 'class="table conditions"' in folded
