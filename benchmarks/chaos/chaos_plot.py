"""The figure of chaos.py: outcomes, times and memory over the run, with its faults."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.chaos.chaos_faults import Struck
from benchmarks.chaos.chaos_findings import Sample
from benchmarks.chaos.chaos_traffic import Exchange, Outcome
from benchmarks.shared.record import percentile

_NUM_BINS: Final = 90
_COLOURS: Final[dict[Outcome, str]] = {
    "answered": "#0b6e99",
    "left": "#b8b8b8",
    "refused": "#e0a030",
    "ended in an error": "#d0602a",
    "broken": "#b00020",
    "hung": "#5a0010",
    "garbled": "#7a2a8a",
}
_SHADES: Final = ("#cfe3d4", "#f3d9d4", "#dcd6ee", "#f5ecc8", "#cfe0ee", "#e8d2e4")


def draw(
    exchanges: Sequence[Exchange], struck: Sequence[Struck], samples: Sequence[Sample], path: Path
) -> None:
    """Draw into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    outcomes, times, memory = figure.subplots(3, 1, sharex=True)
    end_s = max(each.began_s + each.took_s for each in exchanges)
    width_s = end_s / _NUM_BINS
    bins: list[list[Exchange]] = [[] for _ in range(_NUM_BINS + 1)]
    for each in exchanges:
        bins[int((each.began_s + each.took_s) / width_s)].append(each)
    minutes = [(place + 0.5) * width_s / 60 for place in range(len(bins))]
    below = [0.0] * len(bins)
    for outcome, colour in _COLOURS.items():
        counts = [sum(each.outcome == outcome for each in part) / width_s for part in bins]
        if any(counts):
            outcomes.bar(minutes, counts, width_s / 60, bottom=below, color=colour, label=outcome)
        below = [one + other for one, other in zip(below, counts, strict=True)]
    outcomes.set_ylabel("requests that ended, per second")
    answered = [[each.took_s for each in part if each.outcome == "answered"] for part in bins]
    for percent, colour in ((50, "#0b6e99"), (99, "#b00020")):
        found = [percentile(part, percent) if part else float("nan") for part in answered]
        times.plot(minutes, found, color=colour, label=f"answers, p{percent}")
    times.set_yscale("log")
    times.set_ylabel("seconds from question to end")
    at = [sample.at_s / 60 for sample in samples]
    for name, colour, of in (
        ("gateway", "#0b6e99", [sample.gateway_bytes / 2**20 for sample in samples]),
        ("engine", "#7a7a7a", [sample.engine_bytes / 2**20 for sample in samples]),
    ):
        memory.plot(at, of, color=colour, label=f"memory of the {name}, MB")
    memory.plot(
        at, [sample.num_files for sample in samples], color="#e0a030", label="gateway's open files"
    )
    memory.set_ylim(bottom=0, top=1.3 * max(sample.engine_bytes for sample in samples) / 2**20)
    memory.set_xlabel("minutes")
    names = sorted({each.name for each in struck})
    for axes in (outcomes, times, memory):
        for fault in struck:
            shade = _SHADES[names.index(fault.name) % 6]
            axes.axvspan(fault.began_s / 60, fault.ended_s / 60, color=shade)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    for place, name in enumerate(names):
        outcomes.text(
            0.3 + 0.115 * place, 1.03, name, transform=outcomes.transAxes, fontsize=8,
            bbox={"facecolor": _SHADES[place % 6], "edgecolor": "none"},
        )  # fmt: skip
    figure.savefig(path, dpi=100)
