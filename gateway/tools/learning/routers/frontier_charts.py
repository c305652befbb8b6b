"""Accuracy over dollars and latency: a router's settings beside single models and an oracle."""

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.gateway.tools.reports.charts import Axis, Chart, PlotSeries
from outrider.gateway.tools.reports.pictures import write_picture
from outrider.router.frontier import Answerer, Frontier

_SCALES: tuple[tuple[str, str, Callable[[Answerer], float | None]], ...] = (
    ("accuracy_dollars.png", "mean cost of a request, USD", lambda one: one.cost_usd),
    ("accuracy_p50.png", "p50 latency to the last token, s", lambda one: one.p50_s),
    ("accuracy_p95.png", "p95 latency to the last token, s", lambda one: one.p95_s),
)


def draw_frontier(bounds: Frontier, folder: Path) -> list[Path]:
    """Write a picture for each scale that the data have; returns their paths."""
    return [
        write_picture([frontier_chart(bounds, label, scale)], folder / name)
        for name, label, scale in _SCALES
        if scale(bounds.setting) is not None
    ]


def _singles(bounds: Frontier) -> str:
    return ", ".join(f"always {name}" for name in bounds.singles)


def frontier_chart(
    bounds: Frontier, label: str, scale: Callable[[Answerer], float | None]
) -> Chart:
    """Accuracy over one scale."""

    def series(
        name: str, answerers: Sequence[Answerer], color: int, kind: str = "line"
    ) -> PlotSeries:
        found = [(place, one.accuracy) for one in answerers if (place := scale(one)) is not None]
        return PlotSeries(
            name,
            [place for place, _ in found],
            [accuracy for _, accuracy in found],
            color,
            kind="dots" if kind == "dots" else "line",
            is_dashed=kind == "dashed",
        )

    everyone = [
        *bounds.singles.values(),
        *bounds.random,
        *bounds.settings,
        bounds.oracle,
        bounds.setting,
    ]
    low = min(one.accuracy for one in everyone)
    high = max(one.accuracy for one in everyone)
    margin = 0.06 * max(high - low, 0.05)
    return Chart(
        "Accuracy for what users pay",
        [
            series("this router's settings", bounds.settings, 1),
            series("at random", bounds.random, 0, "dashed"),
            series(_singles(bounds), list(bounds.singles.values()), 5, "dots"),
            series("oracle", (bounds.oracle,), 2, "dots"),
            series("this router's own", (bounds.setting,), 4, "dots"),
        ],
        x=Axis(label),
        y=Axis("accuracy of the answers", low=low - margin, high=high + margin),
    )
