"""`outrider doctor`: its flags and what it prints."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.command_parts import (
    Assignments,
    DeviceOption,
    PairFlags,
    Tiers,
    assigned,
    reports_user_errors,
    tier_flags,
    url_flags,
)
from outrider.gateway.tools.commands.flags import Sets, setting_flags, takes_flags
from outrider.gateway.tools.commands.user_errors import EXIT_FAILED

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags(PairFlags):
    """The configuration that is checked."""

    device: DeviceOption = None
    port: Annotated[
        int | None, typer.Option(help="Port that must be free."), Sets("server.port")
    ] = None
    tiers: Tiers = None
    assignments: Assignments = None
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False


@app.command("doctor")
@reports_user_errors
@takes_flags
def doctor(flags: DoctorFlags) -> None:
    """Check whether Outrider can run here; exit status 1 if something stands in its way."""
    from outrider.gateway.tools.commands.doctor.doctor import examine
    from outrider.gateway.tools.commands.terminal import make_console, print_check

    settings = load_settings(
        config_file=flags.config,
        flags=assigned(flags.assignments)
        | setting_flags(flags)
        | url_flags(flags.large, flags.small)
        | tier_flags(flags.tiers),
    )
    checks = []
    console = make_console()
    for check in examine(settings):
        checks.append(check)
        if not flags.as_json:
            print_check(console, check.status, check.name, check.detail, check.advice)
    is_well = all(check.status != "failed" for check in checks)
    if flags.as_json:
        document = {"ok": is_well, "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(document, indent=2))
    if not is_well:
        raise typer.Exit(EXIT_FAILED)
