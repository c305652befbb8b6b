"""`outrider usage export`: what clients owe by month, for invoices."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

import msgspec
import typer

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tools.commands.csv_cells import BYTE_ORDER_MARK, csv_line
from outrider.gateway.tools.commands.database_cli import AsJson, DatabaseFlags
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.usage_rows import RowFlags
from outrider.gateway.tools.commands.user_errors import user_errors

if TYPE_CHECKING:
    from outrider.gateway.tenancy.ledger.invoices import InvoiceLine

EXPORT_HELP: Final = """
Write what clients owe, by month, tier and price: a CSV for spreadsheets, or JSON.

[bold]Examples[/bold]

  outrider usage export --month 2026-01 --out january.csv

  outrider usage export --month 2026-01 --by team --by end_user --team research

  outrider usage export --since 2026-01-01 --until 2026-04-01 --json > quarter.json

A line has the prices as they were when its requests were answered, and the exact charge.
"""

GroupName = Literal["team", "key", "end_user"]
_GROUPS: Final[tuple[GroupName, ...]] = get_args(GroupName)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFlags:
    """What an export holds, and where it is written."""

    month: Annotated[
        str | None, typer.Option(metavar="YYYY-MM", help="Only this month of UTC.")
    ] = None
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="team|key|end_user",
            help="Lines for each of these; repeatable. Default: team and key.",
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default: standard output.")
    ] = None
    as_json: AsJson = False

    @property
    def groups(self) -> tuple[GroupName, ...]:
        """Return what the lines are grouped by. Raises SettingsError for another word."""
        words = self.by or ["team", "key"]
        for word in words:
            if word not in _GROUPS:
                raise SettingsError(f"--by {word}: it is one of {', '.join(_GROUPS)}")
        return tuple(group for group in _GROUPS if group in words)


@takes_flags
def export(flags: ExportFlags, rows: RowFlags, opened: DatabaseFlags) -> None:
    """Write the lines; the help is `EXPORT_HELP`."""
    from outrider.gateway.tenancy.ledger.invoices import invoice_lines, month_bounds

    with user_errors(usage=(SettingsError,)):
        groups, bounds = flags.groups, rows.bounds(time.time())
        if flags.month is not None:
            if bounds != (None, None):
                raise SettingsError("--month excludes --since and --until")
            try:
                bounds = month_bounds(flags.month)
            except (ValueError, OverflowError):
                raise SettingsError(f"--month {flags.month}: write it as 2026-01") from None
    with opened.opened(kept="ledger") as (settings, database), database.read() as connection:
        wanted = rows.filter(settings, database, bounds)
        lines = invoice_lines(connection, groups, wanted)
        with user_errors(failed=(OSError,)):
            _write(flags.out, _json(lines) if flags.as_json else _csv_lines(lines))


def _csv_lines(lines: "Iterable[InvoiceLine]") -> Iterator[str]:
    """Yield a header, then a line each; no totals, which a spreadsheet makes itself."""
    from outrider.gateway.tenancy.ledger.invoices import InvoiceLine

    yield BYTE_ORDER_MARK + csv_line(InvoiceLine.__struct_fields__)
    for line in lines:
        yield csv_line(msgspec.structs.astuple(line))


def _json(lines: "Iterable[InvoiceLine]") -> tuple[str, ...]:
    text = msgspec.json.format(msgspec.json.encode(list(lines))).decode()
    return (f"{text}\n",)


def _write(out: Path | None, texts: Iterable[str]) -> None:
    """Write the texts as they are, line ends included."""
    with nullcontext(sys.stdout.buffer) if out is None else out.open("wb") as file:
        file.writelines(text.encode() for text in texts)
        file.flush()
