"""`outrider audit ls | export | verify`: the log of administrative changes."""

import csv
import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tenancy.ledger.timestamps import FORMS, parse_time
from outrider.gateway.tools.commands.csv_cells import tame
from outrider.gateway.tools.commands.database_cli import (
    DatabaseFlags,
    ShownDatabaseFlags,
    echo_json,
)
from outrider.gateway.tools.commands.flags import takes_flags
from outrider.gateway.tools.commands.user_errors import user_errors

if TYPE_CHECKING:
    from outrider.gateway.audit.chain import AuditRow

app = typer.Typer(
    name="audit",
    help="Administrative changes: list, export and verify their log.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
)

Since = Annotated[str | None, typer.Option(help=f"Start: {FORMS}.")]
_KEPT = "audit log"


@app.command("ls")
@takes_flags
def list_changes(*, since: Since = "7d", database: DatabaseFlags) -> None:
    """List who changed what, the oldest first; `export` does so for programs."""
    since_s = _moment(since)
    with database.opened(kept=_KEPT) as (_, opened):
        from outrider.gateway.audit.log import AuditLog

        has_any = False
        for row in AuditLog(opened).rows(since_s=since_s):
            has_any = True
            typer.echo(_line(row))
        if not has_any:
            typer.echo("no changes")


@app.command("export")
@takes_flags
def export(
    *,
    form: Annotated[
        Literal["csv", "jsonl"], typer.Option("--format", help="csv, or a JSON document a line.")
    ] = "csv",
    since: Since = None,
    database: DatabaseFlags,
) -> None:
    """Write the log to standard output; what is exported elsewhere cannot be altered here."""
    since_s = _moment(since)
    with database.opened(kept=_KEPT) as (_, opened):
        from outrider.gateway.audit.log import AuditLog
        from outrider.gateway.http.apis.audit import AuditReport, audit_report

        writer = csv.writer(sys.stdout, lineterminator="\n")
        if form == "csv":
            writer.writerow(AuditReport.__struct_fields__)
        for row in AuditLog(opened).rows(since_s=since_s):
            document = msgspec.to_builtins(audit_report(row))
            if form == "csv":
                writer.writerow([_cell(value) for value in document.values()])
            else:
                typer.echo(json.dumps(document))


@app.command("verify")
@takes_flags
def verify(
    *,
    head: Annotated[
        str | None,
        typer.Option(help="A hash that was printed earlier: a row with it must still be there."),
    ] = None,
    database: ShownDatabaseFlags,
) -> None:
    """Check the chain of hashes; exit status 1 if a row was edited, inserted or removed.

    Who may write the database can cut rows off at the end, or write a whole new chain. Keep the
    last hash elsewhere, and give it to the next check as --head.
    """
    with database.opened(kept=_KEPT) as (_, opened):
        from outrider.gateway.audit.verifying import verify_chain

        found = verify_chain(opened, head)
    if database.as_json:
        echo_json(found)
    else:
        for fault in found.faults:
            typer.echo(fault, err=True)
        typer.echo(f"{found.num_rows:,} rows; the last is {found.head_sequence} with the hash")
        typer.echo(found.head_hash)
        if not found.faults:
            typer.echo("the chain holds; keep this hash elsewhere, it shows a cut-off end")
    if found.faults:
        raise typer.Exit(1)


def _moment(text: str | None) -> float:
    with user_errors(usage=(SettingsError,)):
        try:
            return 0.0 if text is None else parse_time(text, time.time())
        except ValueError as error:
            raise SettingsError(f"--since: {error}") from None


def _line(row: "AuditRow") -> str:
    """Return a change in a line; what people chose is quoted as JSON."""
    when = datetime.fromtimestamp(row.at, UTC).isoformat(sep=" ", timespec="seconds")
    words = [f"{row.sequence:>6}", when.removesuffix("+00:00"), row.actor, row.action, row.target]
    if row.details is None:
        words.append("(erased)")
    elif row.before:
        words.append(f"{json.dumps(row.before)} -> {json.dumps(row.after)}")
    elif row.after:
        words.append(json.dumps(row.after))
    return " ".join(words)


def _cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, dict) else tame(value)
