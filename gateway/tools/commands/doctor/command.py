"""`outrider doctor`: its flags and what it prints."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from outrider.gateway.settings.tree import load_settings
from outrider.gateway.tools.commands.command import (
    Assignments,
    ConfigFile,
    DeviceOption,
    LargeOption,
    LargeRevision,
    Small,
    SmallRevision,
    Tiers,
    assigned,
    model_flags,
    reports_user_errors,
    tier_flags,
)
from outrider.gateway.tools.commands.user_errors import EXIT_FAILED

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command("doctor")
@reports_user_errors
def doctor(  # noqa: PLR0913 - a flag each
    config: ConfigFile = None,
    large: LargeOption = None,
    small: Small = None,
    large_revision: LargeRevision = None,
    small_revision: SmallRevision = None,
    device: DeviceOption = None,
    port: Annotated[int | None, typer.Option(help="Port that must be free.")] = None,
    tiers: Tiers = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check whether Outrider can run here; exit status 1 if something stands in its way."""
    from outrider.gateway.tools.commands.doctor.doctor import examine
    from outrider.gateway.tools.commands.terminal import make_console, print_check

    flags = {
        **model_flags(large, small),
        "models.large_revision": large_revision,
        "models.small_revision": small_revision,
        "engine.device": device,
        "server.port": port,
        **tier_flags(tiers or []),
    }
    checks = []
    console = make_console()
    given = {key: value for key, value in flags.items() if value is not None}
    settings = load_settings(config_file=config, flags=assigned(assignments or []) | given)
    for check in examine(settings):
        checks.append(check)
        if not as_json:
            print_check(console, check.status, check.name, check.detail, check.advice)
    is_well = all(check.status != "failed" for check in checks)
    if as_json:
        document = {"ok": is_well, "checks": [asdict(check) for check in checks]}
        typer.echo(json.dumps(document, indent=2))
    if not is_well:
        raise typer.Exit(EXIT_FAILED)
