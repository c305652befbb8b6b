"""Reports in Chromium: nothing that decides lies outside of the window."""

from pathlib import Path

import pytest

from outrider.gateway.tools.measuring.bench.compare import compare_results
from outrider.gateway.tools.measuring.bench.report_html import comparison_page
from outrider.gateway.tools.reports.page import write_page
from tests.gateway.tools.measuring.bench.made_results import made_result, made_rows
from tests.pages.conftest import PHONE, NewPage

DESK = {"width": 1280, "height": 900}
LONG = "speculation with thirty-two nodes and a depth of eight"


@pytest.mark.slow
@pytest.mark.parametrize("viewport", [DESK, PHONE])
def test_the_verdict_of_a_comparison_is_in_view(
    tmp_path: Path, new_page: NewPage, viewport: dict[str, int]
) -> None:
    first = made_result(made_rows(80), arm=f"plain, without {LONG}")
    second = made_result(made_rows(80, seed=1, slower=0.6), arm=LONG)
    path = tmp_path / "page.html"
    write_page(comparison_page(first, second, compare_results(first, second)), path)
    page = new_page(path.as_uri(), viewport=viewport)
    cells = page.locator("tr.better td:nth-child(2)")
    assert cells.first.inner_text() == "better"
    box = cells.first.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= viewport["width"]
    if viewport is DESK:
        table = page.locator(".comparison")
        assert table.evaluate("(node) => node.scrollWidth <= node.clientWidth")
