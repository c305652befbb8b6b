"""`outrider config`: show the settings in effect, write a file of them."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.gateway.settings.concealing import without_headers, without_passwords
from outrider.gateway.settings.tree import (
    DEFAULT_FILE,
    Settings,
    SettingsError,
    load_settings,
    to_toml,
)
from outrider.gateway.tools.commands.command_parts import ConfigFile, reports_user_errors

app = typer.Typer(
    name="config", help="Show and write settings.", no_args_is_help=True, add_completion=False
)


@app.command("show")
@reports_user_errors
def config_show(config: ConfigFile = None) -> None:
    """Print the settings in effect: file and environment over the defaults.

    Keys, passwords in addresses and the values of tiers' headers are concealed.
    """
    settings = load_settings(config_file=config)
    for line in to_toml(without_headers(settings)).splitlines():
        typer.echo(line if line.startswith("#") else without_passwords(line))


@app.command("init")
@reports_user_errors
def config_init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path(DEFAULT_FILE),
) -> None:
    """Write a settings file with every default and what it means."""
    text = to_toml(Settings())
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise SettingsError(f"{path} exists already; name another file") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}")
