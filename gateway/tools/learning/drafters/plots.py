"""The pictures of `outrider draft tune` and `compare`: acceptance by depth, tokens per second."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("Agg")  # files only: a machine that serves models has no display

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.draft.training.compare import Compared, plain_tokens_per_s
from outrider.draft.training.tune import Tried, TuneReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (6.4, 4.0)
_DPI = 150
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9772b", "#8a8f98"


def draw_plots(report: TuneReport, folder: Path) -> list[Path]:
    """Write acceptance_by_depth.png and speed_by_tree_size.png; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "acceptance_by_depth.png": _acceptance(report),
        "speed_by_tree_size.png": _speed(report),
    }
    paths = []
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=_DPI)
        paths.append(folder / name)
    return paths


def draw_comparison(found: Sequence[Compared], path: Path) -> Path:
    """Write a picture of several drafters: acceptance by depth, and tokens per second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(2 * _SIZE_INCHES[0], _SIZE_INCHES[1]), layout="constrained")
    acceptance, speed = figure.subplots(1, 2)
    for axes in (acceptance, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    for drafter in found:
        levels = drafter.level_acceptance
        label = f"{drafter.name} ({drafter.kind}, {1e3 * drafter.level_s:.2f} ms a level)"
        acceptance.plot(range(1, len(levels) + 1), levels, marker="o", markersize=4, label=label)
    acceptance.set_title("First choices accepted where those above were", loc="left", fontsize=11)
    acceptance.set_ylim(0.0, 1.03)
    acceptance.set_xlabel("depth in tokens")
    acceptance.xaxis.set_major_locator(MaxNLocator(integer=True))
    acceptance.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    acceptance.legend(frameon=False)
    pace = plain_tokens_per_s(found)
    names = [drafter.name for drafter in found]
    rates = [drafter.tree_ratio * pace for drafter in found]
    bars = speed.barh(names, rates, color=[f"C{number}" for number in range(len(found))])
    speed.bar_label(bars, [f" {drafter.tree_ratio:.2f} x plain" for drafter in found])
    speed.axvline(pace, color=_GREY, linestyle="--", linewidth=1.2)
    speed.invert_yaxis()
    speed.margins(x=0.2)
    speed.set_title("Tokens per second with trees (dashed: plain)", loc="left", fontsize=11)
    figure.savefig(path, dpi=_DPI)
    return path


def _new_figure(title: str) -> "tuple[Figure, Axes]":
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e5e8", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _acceptance(report: TuneReport) -> Figure:
    """Plot acceptance by depth of the deepest full trees; adaptive trees end at varying depths."""
    full = [tried for tried in report.tried if not tried.choice.adaptive]
    shown = max(
        full or report.tried,
        key=lambda tried: (tried.choice.max_draft_nodes, tried.choice.max_draft_depth),
    )
    runs = shown.runs
    depths = min(len(run.accepted_per_depth) for run in runs)
    figure, axes = _new_figure("Acceptance by depth")
    numbers = range(1, depths + 1)
    axes.plot(
        numbers,
        _mean([run.level_acceptance for run in runs], depths),
        color=_BLUE,
        marker="o",
        markersize=4,
        label="a level, once the one above was accepted",
    )
    axes.plot(
        numbers,
        _mean([run.path_acceptance for run in runs], depths),
        color=_ORANGE,
        marker="o",
        markersize=4,
        label="the whole path so far",
    )
    axes.set_ylim(0.0, 1.03)
    axes.set_ylabel("share accepted")
    choice = shown.choice
    kind = "adaptive trees" if choice.adaptive else "full trees"
    axes.set_xlabel(
        f"depth in tokens ({kind} of {choice.max_draft_nodes} nodes, "
        f"{choice.max_branching} alternatives a token)"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    return figure


def _mean(rows: Sequence[Sequence[float]], length: int) -> list[float]:
    return [sum(row[place] for row in rows) / len(rows) for place in range(length)]


def _speed(report: TuneReport) -> Figure:
    figure, axes = _new_figure("Tokens per second by tree size")
    for adaptive, color, label in (
        (True, _BLUE, "adaptive: sized by cost up to the limit"),
        (False, _ORANGE, "full trees"),
    ):
        tried = report.of_limit("max_draft_nodes", adaptive=adaptive)
        if tried:
            _speed_line(axes, tried, report.plain_tokens_per_s, color, label)
    axes.axhline(report.plain_tokens_per_s, color=_GREY, linestyle="--", linewidth=1.2)
    axes.annotate(
        "plain decoding",
        (1.0, report.plain_tokens_per_s),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 4),
        textcoords="offset points",
        ha="right",
        color=_GREY,
    )
    axes.set_ylim(bottom=0.0, top=1.25 * axes.get_ylim()[1])  # room for the legend
    axes.set_xscale("log", base=2)
    sizes = sorted({t.choice.max_draft_nodes for t in report.tried if t.limit == "max_draft_nodes"})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("drafted tokens allowed in a tree")
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False, loc="upper left")
    return figure


def _speed_line(
    axes: "Axes", tried: Sequence[Tried], plain_tokens_per_s: float, color: str, label: str
) -> None:
    """The median over the rounds and how far they spread, at plain decoding's median pace.

    Each round's rate is taken relative to plain decoding in that round: what the machine did in
    between is no property of a tree.
    """
    sizes = [case.choice.max_draft_nodes for case in tried]
    middle = [case.ratio * plain_tokens_per_s for case in tried]
    low = [min(case.ratios) * plain_tokens_per_s for case in tried]
    high = [max(case.ratios) * plain_tokens_per_s for case in tried]
    axes.plot(sizes, middle, color=color, marker="o", markersize=4, label=label)
    axes.fill_between(sizes, low, high, color=color, alpha=0.15, lw=0)
