import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.gateway.tools.learning.routers.commands import app
from outrider.router.dataset import LabelledPrompts
from outrider.router.estimator import train_router
from tests.gateway.tools.reports.read_page import ReadPage
from tests.router.conftest import labelled_sums, write_jsonl

EVIL = '<script>alert("x")</script> & "What is 9 + 9?" \N{SNOWMAN}'


def with_prompt(data: LabelledPrompts, prompt: str) -> LabelledPrompts:
    """The first prompt that only the large model answers is another one."""
    assert data.strong is not None
    place = int((data.strong > data.weak).argmax())
    prompts = [prompt if row == place else old for row, old in enumerate(data.prompts)]
    return LabelledPrompts(prompts=prompts, weak=data.weak, strong=data.strong, sha256=data.sha256)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    train_router(labelled_sums(300, seed=8)).scorer.save(folder / "my <router>")
    data = write_jsonl(folder / "held-out.jsonl", with_prompt(labelled_sums(60, seed=9), EVIL))
    out = folder / "new" / "report.html"
    arguments = ["report", "--router", folder / "my <router>", "--data", data, "--out", out]
    result = CliRunner().invoke(app, [*map(str, arguments), "--resamples", "20"])
    assert result.exit_code == 0, result.output
    return out.read_text(encoding="utf-8")


def test_page_is_whole_and_needs_nothing_else(page: str) -> None:
    parsed = ReadPage(page)
    parsed.assert_alone()
    assert parsed.tags.count("svg") == 3
    assert "$" not in re.sub(r"<pre>.*?</pre>|<summary>.*?</summary>", "", page)
    assert not re.search(r"url\(|@import", page)


def test_data_in_the_report_is_escaped(page: str) -> None:
    text = "".join(ReadPage(page).texts)
    assert EVIL in text
    assert "Router report: my <router>" in text
    assert "<script" not in page
    assert "default-src 'none'" in page, "what runs or loads nothing needs no more"


def test_figures_and_mistakes_are_there(page: str) -> None:
    text = ReadPage(page).text
    for part in (
        "judged on 60 prompts of held-out.jsonl",
        "APGR",
        "CPT(80 %)",
        "always small",
        "oracle",
        "The small model answered, the large one would have been better",
        "The large model answered, and was no better",
        "How it was trained",
    ):
        assert part in text
    assert page.count('<tr class="chosen">') == 2


def test_pictures_take_the_page_s_colours(page: str) -> None:
    pictures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    styled = [tuple(each.split()) for each in re.findall(r'class="([^"]+)"', pictures)]
    assert {style for style, *_ in styled} >= {"chart", "line", "area", "bar", "whisker"}
    for color in {color for _, *colors in styled for color in colors}:
        assert f".{color} {{ color: var(" in page
    assert not re.search(r"#[0-9a-f]{6}\b", pictures)
    assert "prefers-color-scheme: dark" in page
    for name in re.findall(r"var\(--(\w+)\)", page):
        # Light, dark, and where it is a page's ground also in print.
        assert page.count(f"--{name}:") == (3 if name == "page" else 2)


def test_path_of_the_machine_is_not_in_it(page: str, tmp_path: Path) -> None:
    assert str(tmp_path.parent) not in page
