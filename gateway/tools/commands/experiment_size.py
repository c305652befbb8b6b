"""`outrider experiment size`: how many requests an experiment will take, before it is started."""

from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tools.commands.database_cli import AsJson, echo_json
from outrider.gateway.tools.commands.user_errors import user_errors

SIZE_HELP = """
How many requests it takes until an experiment is decided, if its arms differ as you say.

[bold]Examples[/bold]

  outrider experiment size --from 0.90 --to 0.93  [dim]# attainment, errors or successes: shares[/dim]

  outrider experiment size --metric ttft --from 300 --to 270 --variation 0.7  [dim]# means, in any unit[/dim]

  outrider experiment size --from 0.90 --to 0.95 --requests-per-user 10 --correlation 0.1 --per-day 5000

What you expect comes from an earlier report, or `outrider bench`. A smaller difference takes far
longer: half of it, four times as many requests.
"""  # noqa: E501 - what is typed stands on one line


def size(  # noqa: PLR0913 - a flag each
    control: Annotated[float, typer.Option("--from", help="The control's value.")],
    arm: Annotated[float, typer.Option("--to", help="The arm's, as it may be.")],
    metric: Annotated[
        str, typer.Option(help="attainment (any share), or ttft, tpot, e2e, cost: means.")
    ] = "attainment",
    weight: Annotated[
        float, typer.Option(min=0.001, max=0.999, help="The arm's share of the requests.")
    ] = 0.5,
    arms: Annotated[int, typer.Option(min=2, max=16, help="Arms, with the control.")] = 2,
    alpha: Annotated[float, typer.Option(min=1e-6, max=0.5, help="As the experiment's.")] = 0.05,
    variation: Annotated[
        float,
        typer.Option(min=0.001, help="Of means: standard deviation of a request over the mean."),
    ] = 0.7,
    requests_per_user: Annotated[
        float, typer.Option(min=1.0, help="Requests of one unit: a user, key or conversation.")
    ] = 1.0,
    correlation: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="How alike requests of one unit are: 0 to 1."),
    ] = 0.0,
    per_day: Annotated[
        float | None, typer.Option(min=1.0, help="Requests a day that take part: shows days.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate experiments; the help is `SIZE_HELP`."""
    with user_errors(usage=(SettingsError,)):
        from outrider.gateway.experiments.statistics.size import SizeQuestion, requests_needed

        means = ("ttft", "tpot", "e2e", "cost")
        if metric not in ("attainment", *means):
            known = ", ".join(("attainment", *means))
            raise SettingsError(f"--metric {metric}: unknown; available: {known}")
        try:
            question = SizeQuestion(
                kind="mean" if metric in means else "share",
                control=control,
                arm=arm,
                weight=weight,
                alpha=alpha,
                num_comparisons=arms - 1,
                variation=variation,
                requests_per_unit=requests_per_user,
                correlation=correlation,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from None
        needed = requests_needed(question)
    if as_json:
        echo_json({"requests": {f"{share:g}": count for share, count in needed.items()}})
    else:
        _print_needed(needed, arms, per_day)


def _print_needed(needed: dict[float, int | None], arms: int, per_day: float | None) -> None:
    from rich.table import Table

    from outrider.gateway.tools.commands.terminal import make_console

    console: Console = make_console()
    titles = ["decided", "requests of control and arm"]
    titles += [f"requests of all {arms} arms"] if arms > 2 else []
    titles += ["days"] if per_day else []
    table = Table()
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    for share, count in needed.items():
        row: list[Any] = [f"{share:.0%} of experiments"]
        if count is None:
            row += ["more than 100 million"] + ["-"] * (len(titles) - 2)
        else:
            total = count * arms / 2
            row.append(f"{_rounded(count):,}")
            row += [f"{_rounded(total):,}"] if arms > 2 else []
            row += [f"{total / per_day:.1f}"] if per_day else []
        table.add_row(*row)
    console.print(table)
    console.print("Simulated with the report's own intervals, which allow a look at any time.")


def _rounded(count: float) -> int:
    """Return two figures: the simulation knows no more."""
    return int(float(f"{count:.2g}"))
