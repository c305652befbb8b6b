"""Final output of `outrider draft`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.gateway.tools.commands.terminal import make_console, print_whole
from outrider.gateway.tools.reports.grids import Grid

if TYPE_CHECKING:
    from outrider.draft.training.compare import Compared
    from outrider.draft.training.distill import DistillReport
    from outrider.draft.training.head_distil import HeadReport
    from outrider.draft.training.tune import TuneReport

COMPARED_TITLE: Final = (
    "First choices accepted where those above were, in % by depth; speed over plain"
)


def print_training(report: "DistillReport", out: Path, large: str) -> None:
    """Print the drafter's size, its agreement with the large model, and how to try it."""
    typer.echo(f"Wrote {out}: {report.num_parameters:,} parameters, {report.steps:,} steps")
    typer.echo(
        f"On {report.num_held_out:,} held-out sequences ({report.after.num_tokens:,} tokens), the "
        "large model's first choice is"
    )
    for name, found in (("before", report.before), ("after", report.after)):
        typer.echo(
            f"  {name:<7} the drafter's first {found.first:6.1%}, among its first three "
            f"{found.top3:6.1%}"
        )
    typer.echo(f"Try it: outrider serve --large {large} --small {out}")


def print_head(report: "HeadReport", out: Path, large: str) -> None:
    """Print the head's size, how deep its chains agree, and how to try it."""
    typer.echo(f"Wrote {out}: {report.num_parameters:,} parameters, {report.steps:,} steps")
    typer.echo(
        f"On {report.num_held_out:,} held-out sequences ({report.after.num_roots:,} places), by "
        "depth: first choice right below right ones"
    )
    for name, found in (("before", report.before), ("after", report.after)):
        typer.echo(f"  {name:<7}" + "".join(f" {share:6.1%}" for share in found.levels))
    typer.echo(f"Its vocabulary has {report.coverage:.2%} of these answers' tokens.")
    typer.echo(f"Try it: outrider serve --large {large} --drafter {out}")


def print_tuning(report: "TuneReport") -> None:
    """A row for everything that was tried, the best ones in green."""
    console = make_console()
    table = Table(
        title="Limits of a tree (≤: sized by the cost of passes)",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("depth", "nodes", "branch", "front", "tok/s", "x plain"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("nodes used", "hits", "large ms", "small ms"):
        table.add_column(name, justify="right")
    limit = report.tried[0].limit
    for tried in report.tried:
        if tried.limit != limit:
            table.add_section()
            limit = tried.limit
        choice, run = tried.choice, tried.runs[-1]
        table.add_row(
            str(choice.max_draft_depth),
            f"≤ {choice.max_draft_nodes}" if choice.adaptive else str(choice.max_draft_nodes),
            str(choice.max_branching),
            str(choice.max_frontier),
            f"{tried.ratio * report.plain_tokens_per_s:.1f}",
            f"{tried.ratio:.2f}",
            f"{run.mean_nodes:.1f}",
            f"{run.acceptance_rate:.1%}",
            f"{1e3 * run.pass_s['large']:.2f}",
            f"{1e3 * run.pass_s['small']:.2f}",
            style="bold green" if choice == report.best else None,
        )
    console.print(table)
    if report.gain <= 1.0:
        console.print("Drafting does not pay off on this machine: the settings file turns it off.")


def print_comparison(found: "Sequence[Compared]") -> None:
    """Print a row a drafter, the fastest in green."""
    console = make_console()
    print_whole(console, compared_grid(found).terminal(COMPARED_TITLE))
    console.print(pace_text(found))


def compared_grid(found: "Sequence[Compared]") -> Grid:
    """A row a drafter: size, cost of a level, acceptance by depth, speed."""
    from outrider.draft.training.compare import plain_tokens_per_s

    pace = plain_tokens_per_s(found)
    depth = max(len(drafter.level_acceptance) for drafter in found)
    best = max(drafter.tree_ratio for drafter in found)
    rows = []
    for drafter in found:
        levels = [f"{100 * share:.0f}" for share in drafter.level_acceptance]
        rows.append(
            [
                drafter.name,
                drafter.kind,
                f"{1e3 * drafter.level_s:.2f}",
                *levels,
                *[""] * (depth - len(levels)),
                f"{drafter.chain_ratio:.2f}",
                f"{drafter.tree_ratio:.2f}",
                f"{drafter.tree_ratio * pace:.0f}",
            ]
        )
    depths = map(str, range(1, depth + 1))
    return Grid(
        head=["drafter", "kind", "ms", *depths, "chains", "trees", "tok/s"],
        rows=rows,
        kinds=["chosen" if drafter.tree_ratio == best else "" for drafter in found],
        name="drafters",
    )


def pace_text(found: "Sequence[Compared]") -> str:
    """Say what plain decoding does, and what the columns are."""
    from outrider.draft.training.compare import plain_tokens_per_s

    pace = plain_tokens_per_s(found)
    return f"Plain decoding: {pace:.1f} tok/s. ms: a level. Trees are sized by cost."
