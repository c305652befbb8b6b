"""Charts as a file of their own: an SVG, or a PNG that matplotlib draws from the same shapes."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from outrider.gateway.settings.extras import need_extra
from outrider.gateway.tools.reports.charts import AnyChart
from outrider.gateway.tools.reports.page import style
from outrider.gateway.tools.reports.svg import FONT_SIZE, NAMESPACE, svg_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Shape

_SOFT: Final = "#5d6a6e"
_NUMBERED: Final = (_SOFT, "#0f766e", "#c2620f", "#2563a8", "#a8321f", "#7c4bb0", "#6b7a1e")
PALETTE: Final = {
    "ink": "#1c2325",
    "soft": _SOFT,
    "rule": "#dfe3e4",
    **{f"c{number}": color for number, color in enumerate(_NUMBERED)},
}
"""The colours of report.css where it is light, by their classes."""
_UNITS_PER_INCH: Final = 100.0
_POINTS_PER_INCH: Final = 72.0
_DPI: Final = 150
_STEP: Final = re.compile(r"([MmLlHhVvZ])([-\d. ]*)")


def write_picture(
    charts: Iterable[AnyChart],
    path: Path,
    *,
    title: str = "",
    note: str = "",
    num_columns: int = 1,
) -> Path:
    """Write the charts in rows, as SVG or PNG by the path's suffix; returns the path.

    Raises MissingExtraError for a PNG without matplotlib, OSError where it cannot be written.
    """
    svg = svg_file(charts, title=title, note=note, num_columns=num_columns, style=style())
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(svg, encoding="utf-8")
    else:
        _paint(ElementTree.fromstring(svg), path)
    return path


def _paint(root: ElementTree.Element, path: Path) -> None:
    need_extra("bench", "A picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = map(float, root.attrib["viewBox"].split()[2:])
    figure = Figure(figsize=(width / _UNITS_PER_INCH, height / _UNITS_PER_INCH))
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0.0, width), ylim=(height, 0.0))
    axes.set_axis_off()
    for left, top, element in _elements(root):
        color = PALETTE[element.attrib["class"].split()[-1]]
        if element.tag.endswith("path"):
            _paint_path(axes, element, color, left, top)
        else:
            _paint_text(axes, element, color, left, top)
    figure.savefig(path, dpi=_DPI, format="png")


def _elements(
    parent: ElementTree.Element, left: float = 0.0, top: float = 0.0
) -> Iterator[tuple[float, float, ElementTree.Element]]:
    """Each path and text, with where its coordinates begin."""
    for element in parent:
        if element.tag == f"{{{NAMESPACE}}}svg":
            place = (float(element.attrib["x"]), float(element.attrib["y"]))
            yield from _elements(element, left + place[0], top + place[1])
        elif not element.tag.endswith("style"):
            yield left, top, element


def _paint_path(
    axes: "Axes", element: ElementTree.Element, color: str, left: float, top: float
) -> None:
    from matplotlib.patches import PathPatch

    given = element.attrib
    looks: dict[str, Any] = {"facecolor": color, "edgecolor": "none"}
    if given["fill"] == "none":
        looks = {"facecolor": "none", "edgecolor": color}
        looks["linewidth"] = _points(given["stroke-width"])
        looks["capstyle"] = given.get("stroke-linecap", "butt")
        if dashes := given.get("stroke-dasharray"):
            looks["linestyle"] = (0.0, [_points(one) for one in dashes.split()])
    looks["alpha"] = float(given.get("opacity", 1.0))
    # Snapped to pixels, a dot would have no length and vanish.
    axes.add_patch(PathPatch(_shape(given["d"], left, top), snap=False, **looks))


def _shape(steps: str, left: float, top: float) -> "Shape":
    """Read the steps of a path: M, L, H, V, Z and their relatives."""
    from matplotlib.path import Path as Shape

    places, codes = [], []
    x = y = 0.0
    for name, text in _STEP.findall(steps):
        numbers = [float(one) for one in text.split()]
        base_x, base_y = (x, y) if name.islower() else (left, top)
        if name in "MmLlHh":
            x = base_x + numbers[0]
        if name in "MmLlVv":
            y = base_y + numbers[-1]
        places.append((x, y))
        codes.append({"M": Shape.MOVETO, "Z": Shape.CLOSEPOLY}.get(name.upper(), Shape.LINETO))
    return Shape(places, codes)


def _paint_text(
    axes: "Axes", element: ElementTree.Element, color: str, left: float, top: float
) -> None:
    given = element.attrib
    axes.text(
        left + float(given["x"]),
        top + float(given["y"]),
        (element.text or "").replace("$", r"\$"),  # no formulas
        color=color,
        size=_points(given.get("font-size", FONT_SIZE)),
        ha={"middle": "center", "end": "right"}.get(given.get("text-anchor", ""), "left"),
        va="baseline",
        rotation=90.0 if "transform" in given else 0.0,
        rotation_mode="anchor",
    )


def _points(units: str) -> float:
    """Return units of the drawing in points, in which matplotlib measures lines and letters."""
    return float(units) / _UNITS_PER_INCH * _POINTS_PER_INCH
