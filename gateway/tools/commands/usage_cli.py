"""`outrider usage`: usage, costs, charges and savings; `outrider usage export` in its module."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tenancy.ledger.dimensions import Dimension
from outrider.gateway.tools.commands.csv_cells import csv_line
from outrider.gateway.tools.commands.database_cli import AsJson, DatabaseFlags
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.usage_export import EXPORT_HELP, export
from outrider.gateway.tools.commands.usage_rows import RowFlags
from outrider.gateway.tools.commands.user_errors import user_errors

if TYPE_CHECKING:
    from outrider.gateway.tenancy.ledger.usage_report import (
        SavingsReport,
        UsageGroup,
        UsageReport,
        UsageSums,
    )

app = typer.Typer(name="usage", rich_markup_mode="rich", add_completion=False)
app.command("export", help=EXPORT_HELP)(export)

USAGE_HELP: Final = """
Show usage, its cost and the clients' charges.

[bold]Examples[/bold]

  outrider usage  [dim]# by tier, all of it[/dim]

  outrider usage --by key --since 7d

  outrider usage --by day --key my-app --since 2026-01-01 --csv > january.csv

  outrider usage --by kind --tier small --json

  outrider usage --by end_user --key my-app

Rows are in the database a second or so after an answer has ended. Times are UTC.
"""

_TITLES: Final = (
    "requests", "attempts", "prompt", "cached", "completion", "cost", "charge", "cost/M",
)  # fmt: skip
_MAX_GROUPS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFlags:
    """How rows are summed and printed."""

    by: Annotated[Dimension, typer.Option(help="Group by this.")] = "tier"
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for spreadsheets.")] = False
    as_json: AsJson = False


@app.callback(invoke_without_command=True, help=USAGE_HELP)
@takes_flags
def usage(context: typer.Context, flags: UsageFlags, rows: RowFlags, opened: DatabaseFlags) -> None:
    """Show usage; the help is `USAGE_HELP`."""
    if context.invoked_subcommand is not None:
        return
    # Databases take half a second to import, which other commands need not wait for.
    from outrider.gateway.tenancy.ledger.usage_report import UsageQuestion, usage_report

    with user_errors(usage=(SettingsError,)):
        if flags.as_csv and flags.as_json:
            raise SettingsError("--csv and --json exclude each other: choose one")
        bounds = rows.bounds(time.time())
    with opened.opened(kept="ledger") as (settings, database):
        wanted = rows.filter(settings, database, bounds)
        question = UsageQuestion(by=flags.by, wanted=wanted, limit=_MAX_GROUPS, with_costs=True)
        report = usage_report(database, question)
    if flags.as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report)).decode())
    elif flags.as_csv:
        typer.echo(_as_csv(report), nl=False)
    else:
        _print(report)


def _print(report: "UsageReport") -> None:
    """A table, and below it what was saved."""
    from rich.markup import escape
    from rich.table import Table

    from outrider.gateway.tools.commands.terminal import make_console, print_whole

    console = make_console()
    if not report.totals.attempts:
        console.print("no usage")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(report.by)
    for title in _TITLES:
        table.add_column(title, justify="right")
    for group in report.data:
        table.add_row(escape(_title(group)), *_cells(group))
    table.add_section()
    table.add_row("total", *_cells(report.totals), style="bold")
    print_whole(console, table)
    for line in _closing_lines(report):
        console.print(line, soft_wrap=True)


def _cells(sums: "UsageSums") -> list[str]:
    per_million = sums.cost_usd_per_million_tokens
    counts = (
        sums.requests,
        sums.attempts,
        sums.prompt_tokens,
        sums.cached_tokens,
        sums.completion_tokens,
    )
    return [
        *(f"{count:,}" for count in counts),
        _usd(sums.cost_usd or 0.0),
        _usd(sums.charge_usd),
        "" if per_million is None else _usd(per_million),
    ]


def _closing_lines(report: "UsageReport") -> Iterator[str]:
    dear = report.totals.cost_usd_per_million_charged_tokens
    if dear is not None:
        yield f"a million tokens that clients pay for cost us {_usd(dear)}, all else included"
    if report.savings is None:
        yield (
            "savings are not known: no price of the large model is. Set routing.prices.large, or "
            "the price of the upstream tier that answers in its place."
        )
    else:
        yield _savings_line(report.savings)


def _savings_line(saved: "SavingsReport") -> str:
    from rich.markup import escape

    if saved.saved_share is None:
        return f"nothing saved: {escape(saved.tier)} would have cost nothing"
    word = "saved" if saved.saved_usd >= 0 else "lost"
    return (
        f"{word} {_usd(abs(saved.saved_usd))} ({abs(saved.saved_share):.1%}): had "
        f"{escape(saved.tier)} answered everything, it would have cost {_usd(saved.always_usd)}"
    )


def _as_csv(report: "UsageReport") -> str:
    """A header, then a line for each group; no totals, which a spreadsheet makes itself."""
    from outrider.gateway.tenancy.ledger.usage_report import UsageSums

    fields = UsageSums.__struct_fields__
    lines = [csv_line((report.by, "name", *fields))]
    for group in report.data:
        sums = (getattr(group, field) for field in fields)
        lines.append(csv_line((group.group, group.name, *sums)))
    return "".join(lines)


def _title(group: "UsageGroup") -> str:
    if group.name is not None:
        return f"{group.name} ({group.group})"
    return group.group or "(none)"


def _usd(amount: float) -> str:
    """Cents for sums one pays, enough digits for a single token."""
    return f"${amount:,.2f}" if amount >= 100 or not amount else f"${amount:,.4g}"
