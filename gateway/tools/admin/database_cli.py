"""What commands on the database share: which one, what goes wrong, how it is said."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.settings.tree import SettingsError, load_settings

if TYPE_CHECKING:
    from gateway.settings.tree import Settings
    from gateway.storage.database import Database

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="Which database: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; "
        "otherwise the settings' database_url, or OUTRIDER_DATABASE_URL."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@contextmanager
def opened_database(
    database_url: str | None, config: Path | None, *, kept: str
) -> "Iterator[tuple[Settings, Database]]":
    """The settings and their database; what goes wrong becomes a message and an exit status.

    `kept`: what the command wants to find in it, for messages.
    """
    from gateway.errors.tree import GatewayError

    try:
        settings = load_settings(config_file=config)
        # Slow to load, and not needed for help.
        from gateway.storage.open import open_database

        database = open_database(settings, database_url=database_url)
        if database is None:
            raise SettingsError(
                f'database_url is "none", so there is nowhere to keep {kept}; name one with '
                "--database-url"
            )
        try:
            yield settings, database
        finally:
            database.close()
    except SettingsError as error:
        complain(str(error))
        raise typer.Exit(EXIT_USAGE) from None
    except GatewayError as error:
        complain(getattr(error, "detail", None) or str(error))
        raise typer.Exit(EXIT_FAILED) from None


def complain(message: str) -> None:
    """Say what is wrong, in red where there is colour."""
    for line in message.splitlines():
        typer.secho(f"outrider: {line}", fg=typer.colors.RED, err=True)


def checked(model: Any, wanted: dict[str, Any]) -> Any:
    """What is wanted, by the same rules as /admin. Raises SettingsError."""
    from pydantic import ValidationError

    try:
        return model.model_validate(wanted)
    except ValidationError as error:
        lines = []
        for detail in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in detail["loc"])
            what = detail["msg"].removeprefix("Value error, ")
            what = what if what != detail["msg"] else what.lower()
            lines.append(f"{where}: {what}" if where else what)
        raise SettingsError("\n".join(lines)) from None


def echo_json(document: Any) -> None:
    """A document on standard output, for programs."""
    typer.echo(json.dumps(document, indent=2))
