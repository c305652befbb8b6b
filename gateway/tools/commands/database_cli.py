"""Code that commands on the database share: open it, check input, print JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from outrider.gateway.settings.tree import SettingsError, load_settings
from outrider.gateway.tools.commands.command_parts import ConfigFile
from outrider.gateway.tools.commands.user_errors import user_errors

if TYPE_CHECKING:
    from outrider.gateway.settings.tree import Settings
    from outrider.gateway.storage.database import Database

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="The database: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; "
        "default: database_url of the settings, or OUTRIDER_DATABASE_URL."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFlags:
    """The database that a command works on."""

    database_url: DatabaseUrl = None
    config: ConfigFile = None

    @contextmanager
    def opened(self, *, kept: str) -> "Iterator[tuple[Settings, Database]]":
        """Open the database; errors become a message and an exit status.

        `kept`: what the command works on, for messages.
        """
        from outrider.gateway.contract.errors.tree import GatewayError

        with user_errors(usage=(SettingsError,), failed=(GatewayError,)):
            settings = load_settings(config_file=self.config)
            # Slow to load, and not needed for help.
            from outrider.gateway.storage.open import open_database

            database = open_database(settings, database_url=self.database_url)
            if database is None:
                raise SettingsError(
                    f'database_url is "none", so there is no {kept}; name a database with '
                    "--database-url"
                )
            from outrider.gateway.audit.actor import acting, system_user

            with closing(database), acting(system_user()):
                yield settings, database


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDatabaseFlags(DatabaseFlags):
    """The database, and how what is found in it is printed."""

    as_json: AsJson = False


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is lost for ever; ends the command on no. Programs are not asked."""
    if not yes and _is_terminal():
        typer.confirm(question, abort=True)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def checked(model: Any, wanted: dict[str, Any]) -> Any:
    """Validate input by the rules of /admin. Raises SettingsError."""
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
    """Print a document, or Structs, to standard output, for programs."""
    typer.echo(json.dumps(msgspec.to_builtins(document), indent=2))
