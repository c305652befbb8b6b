"""`outrider cache`: the folder that keys and values are offloaded to, and named prompts."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.engine.errors import EngineError
from outrider.gateway.settings.tree import Settings, SettingsError, load_settings
from outrider.gateway.tools.commands.command_parts import ConfigFile
from outrider.gateway.tools.commands.database_cli import AsJson
from outrider.gateway.tools.commands.user_errors import user_errors
from outrider.gateway.tools.commands.warm_command import WARM_HELP, warm

if TYPE_CHECKING:
    from outrider.engine.cache.extent_folder import ExtentFolder

app = typer.Typer(
    name="cache",
    help="Keep prompts by name; look into the folder of keys and values (engine.kv_folder).",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
)

app.command("warm", help=WARM_HELP)(warm)

Folder = Annotated[
    Path | None, typer.Argument(help="The folder; engine.kv_folder of the settings by default.")
]
_MIB = 2**20


@app.command("ls")
def list_spaces(folder: Folder = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List what the folder holds, by model, and what lies there besides."""
    from outrider.engine.cache.extent_folder import other_files, space_folders
    from outrider.engine.cache.extent_space import read_about, stored_extents

    with _opened(folder, config) as (_, opened):
        rows: list[dict[str, Any]] = []
        for space in space_folders(opened.folder):
            about, files = read_about(space), list(stored_extents(space))
            blocks = sum(each.end - each.first for each in files if each.letter != "s")
            rows.append(
                {
                    "model": about.model,
                    "fingerprint": about.fingerprint,
                    "files": len(files),
                    "tokens": blocks * about.block_size,
                    "bytes": sum(each.num_bytes for each in files),
                    "last_used_s": max((each.used_s for each in files), default=None),
                }
            )
        others = [each.name for each in other_files(opened.folder)]
    if as_json:
        typer.echo(json.dumps({"spaces": rows, "left_alone": others}))
        return
    for row in rows:
        age = "" if row["last_used_s"] is None else f", used {_ago(row['last_used_s'])}"
        typer.echo(
            f"{row['model']} ({row['fingerprint'][:8]}): {row['tokens']:,} tokens in "
            f"{row['files']:,} files, {row['bytes'] / _MIB:,.1f} MiB{age}"
        )
    if not rows:
        typer.echo("no keys and values")
    for name in others:
        typer.echo(f"left alone, of another version or not ours: {name}")


@app.command("gc")
def collect(folder: Folder = None, config: ConfigFile = None) -> None:
    """Remove what has expired, what killed engines left half-written, and what is too much."""
    with _opened(folder, config) as (_, opened):
        num_removed = opened.collect()
        typer.echo(f"removed {num_removed:,} files; {opened.num_bytes / _MIB:,.1f} MiB are left")


@app.command("verify")
def verify(folder: Folder = None, config: ConfigFile = None) -> None:
    """Read every file and name those that are not what was written; exit status 1 if there are."""
    from outrider.engine.cache.extent_folder import check_extents
    from outrider.gateway.wiring.kv_folder import open_seal

    with _opened(folder, config) as (settings, opened):
        num_sound, num_damaged = 0, 0
        for path, error in check_extents(opened.folder, open_seal(settings)):
            if error is None:
                num_sound += 1
            else:
                num_damaged += 1
                typer.echo(f"{path}: {error}")
    typer.echo(f"{num_sound:,} files are sound, {num_damaged:,} are not")
    if num_damaged:
        typer.echo("an engine computes again what they held, and removes them when it meets them")
        raise typer.Exit(1)


@contextmanager
def _opened(folder: Path | None, config: Path | None) -> "Iterator[tuple[Settings, ExtentFolder]]":
    """Open the folder; errors become a message and an exit status."""
    from outrider.gateway.wiring.kv_folder import open_folder

    with user_errors(usage=(SettingsError,), failed=(EngineError,)):
        flags = {} if folder is None else {"engine.kv_folder": folder}
        settings = load_settings(config_file=config, flags=flags)
        place = settings.engine.kv_folder
        if place is None:
            raise SettingsError("no folder: name one, or set engine.kv_folder")
        if not place.expanduser().is_dir():
            raise SettingsError(f"{place} is no folder")
        opened = open_folder(settings)
        assert opened is not None, "the settings name a folder"
        yield settings, opened


def _ago(moment_s: float) -> str:
    age_s = max(time.time() - moment_s, 0.0)
    for size_s, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if age_s >= 2 * size_s:
            return f"{age_s / size_s:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"
