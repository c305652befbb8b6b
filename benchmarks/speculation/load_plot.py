"""The figure of bench_load: rates, ratios and gaps by the number of clients, and the load step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.record import plain

_OFF, _ON = "#7a7a7a", "#0b6e99"
_RATIOS = {"tokens_per_s": "tokens/s", "token_p50": "time per token, p50", "token_p99": "p99"}
_LEAST_RATIO = 0.98


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bench_load's results into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record = plain(results)
    points = record["points"]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    rates, ratios, gaps, step = figure.subplots(2, 2).flat
    clients = [int(name) for name in points]
    for side, colour in (("off", _OFF), ("on", _ON)):
        label = f"speculation {side}"
        rate = [points[str(number)][side]["tokens_per_s"] for number in clients]
        rates.plot(clients, rate, "o-", color=colour, label=label)
        gap_s = [points[str(number)][side]["gap_s"]["p99"] for number in clients]
        gaps.plot(
            clients,
            [float("nan") if gap is None else 1e3 * gap for gap in gap_s],
            "o-",
            color=colour,
            label=label,
        )
    _draw_ratios(ratios, points, clients)
    for axes, title in (
        (rates, "tokens per second, all clients"),
        (ratios, "speculation on over off (above 1: faster), 95 % intervals"),
        (gaps, "gap between chunks, p99, ms"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, [str(number) for number in clients])
        axes.minorticks_off()
        axes.set_xlabel("clients")
        axes.set_title(title, fontsize=10)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    _draw_step(step, record.get("step"))
    figure.savefig(path, dpi=110)


def _draw_ratios(axes: Any, points: Mapping[str, Any], clients: list[int]) -> None:
    for place, (part, label) in enumerate(_RATIOS.items()):
        known = [number for number in clients if points[str(number)]["ratio"][part] is not None]
        intervals = [points[str(number)]["ratio"][part] for number in known]
        middle = [interval["estimate"] for interval in intervals]
        bars = [
            [abs(interval["estimate"] - interval[end]) for interval in intervals]
            for end in ("low", "high")
        ]
        shifted = [number * 2 ** (0.06 * (place - 1)) for number in known]
        axes.errorbar(shifted, middle, yerr=bars, fmt="o-", capsize=2, label=label, linewidth=1)
    axes.axhline(_LEAST_RATIO, color="black", linewidth=0.8, linestyle=":", label="0.98")


def _draw_step(axes: Any, step: Mapping[str, Any] | None) -> None:
    if step is None:
        axes.set_axis_off()
        return
    for place, (side, colour) in enumerate((("off", _OFF), ("on", _ON))):
        rate = [report[side]["tokens_per_s"] for report in step.values()]
        where = [number + 0.4 * place - 0.2 for number in range(len(step))]
        bars = axes.bar(where, rate, width=0.38, color=colour, label=f"speculation {side}")
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(step)), list(step))
    axes.set_xlabel("phase of the load step (clients)")
    axes.set_title("load step, tokens per second", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
