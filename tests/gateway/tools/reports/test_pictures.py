"""Pictures of charts as files."""

import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from outrider.gateway.settings import extras
from outrider.gateway.tools.reports.charts import (
    Axis,
    Chart,
    IntervalChart,
    IntervalRow,
    PlotSeries,
    ReferenceLine,
)
from outrider.gateway.tools.reports.page import style
from outrider.gateway.tools.reports.pictures import PALETTE, write_picture

KINDS: tuple[Any, ...] = ("line", "step", "dots", "marked", "area", "bars")
EVERYTHING = Chart(
    name="everything",
    series=[
        PlotSeries(
            kind,
            [1, 2, 4],
            [n + 1, n + 2, float("nan")],
            n,
            low=[n, n + 1, n + 2] if n % 2 else None,
            high=[n + 2, n + 3, n + 4] if n % 2 else None,
            kind=kind,
        )
        for n, kind in enumerate(KINDS)
    ],
    x=Axis(label="x", scale="log", ticks=[1, 2, 4]),
    y=Axis(label="y", is_share=True),
    marks=[
        ReferenceLine(place=2.0, label="a line"),
        ReferenceLine(place=2.0, label="across", is_vertical=False),
        ReferenceLine(place=1.0, until=2.0, label="a shade"),
    ],
)
EMPTY = Chart(name="empty", series=(), x=Axis(label="x"), y=Axis(label="y"))
ROWS = IntervalChart(
    name="rows",
    rows=[
        IntervalRow(label="unbounded", low=1.0, value=2.0, high=float("inf")),
        IntervalRow(label="none", low=0.0, value=float("nan"), high=0.0),
    ],
    x=Axis(label="x"),
)


def test_every_chart_becomes_a_png(tmp_path: Path) -> None:
    charts, path = [EVERYTHING, EMPTY, ROWS], tmp_path / "new" / "a.png"
    write_picture(charts, path, title="costs $1 and $2", note="n", num_columns=2)
    pixels = image.imread(path)[..., :3]
    assert pixels.shape[1] > pixels.shape[0], "two columns"
    shades = {tuple(color) for color in (pixels.reshape(-1, 3) * 255).round().astype(int).tolist()}
    for color in (PALETTE["ink"], PALETTE["c5"], PALETTE["c0"]):
        assert tuple(bytes.fromhex(color[1:])) in shades


def test_a_dot_is_as_large_as_a_line_is_wide(tmp_path: Path) -> None:
    """A path without length would vanish; a dot is drawn as a very short line with round ends."""
    dot = Chart("n", [PlotSeries("", [1.0], [1.0], 4, kind="dots")], x=Axis("x"), y=Axis("y"))
    pixels = image.imread(write_picture([dot], tmp_path / "a.png"))[..., :3]
    red = [one / 255 for one in bytes.fromhex(PALETTE["c4"][1:])]
    assert 40 < (abs(pixels - red) < 0.02).all(axis=-1).sum() < 120


def test_pictures_have_the_colours_of_pages() -> None:
    light = style().partition("prefers-color-scheme")[0]
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light))
    found |= {"rule": found.pop("grid"), "c0": found["soft"]}
    assert {name: found[name] for name in PALETTE} == PALETTE


def test_only_png_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.PathFinder, "find_spec", lambda name: None)
    path = write_picture([EVERYTHING, EMPTY], tmp_path / "new" / "a.svg")
    assert path.read_text(encoding="utf-8").startswith("<svg xmlns=")
    with pytest.raises(extras.MissingExtraError, match=r"pip install \"outrider\[bench\]\""):
        write_picture([EVERYTHING], tmp_path / "a.png")
