"""A comparison of two runs as tables for the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.gateway.tools.measuring.bench.compare import RunComparison
from outrider.gateway.tools.measuring.bench.figure_text import figure_text
from outrider.gateway.tools.measuring.bench.results import IntervalEstimate


def print_comparison(console: Console, comparison: RunComparison) -> None:
    """Print the differences as a table, then conditions and notes."""
    first, second = comparison.first_label, comparison.second_label
    head = f"{second} compared with {first}"
    if comparison.num_pairs:
        head += f", {comparison.num_pairs} pairs"
    table = Table(title=Text(head), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for name in (first, second, "difference", "95 % interval", "ratio", "95 % interval"):
        table.add_column(Text(name), justify="right")
    table.add_column(Text(f"{second} is"))
    for entry in comparison.differences:
        ratio = entry.ratio
        table.add_row(
            f"{entry.name}, {entry.unit}",
            figure_text(entry.first),
            figure_text(entry.second),
            f"{entry.difference.value:+.4g}",
            Text(interval_text(entry.difference)),
            "" if ratio is None else f"{ratio.value:.3f}",
            "" if ratio is None else Text(interval_text(ratio)),
            entry.verdict,
        )
    console.print(table)
    if (share := comparison.share_faster) is not None:
        where = interval_text(share)
        text = f"{second} answered sooner in {share.value:.1%} of the pairs {where}"
        console.print(text, markup=False)
    if comparison.conditions:
        _print_conditions(console, comparison)
    for note in comparison.notes:
        console.print(f"Note: {note}", markup=False)


def _print_conditions(console: Console, comparison: RunComparison) -> None:
    table = Table(title="Different conditions", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", comparison.first_label, comparison.second_label):
        table.add_column(Text(name), overflow="fold")
    for condition in comparison.conditions:
        # As texts: what a server says of itself is no markup.
        table.add_row(*(Text(text) for text in (condition.name, condition.first, condition.second)))
    console.print(table)


def interval_text(estimate: IntervalEstimate) -> str:
    """Write `[low, high]`; empty where there is no interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{figure_text(estimate.low)}, {figure_text(estimate.high)}]"
