"""Addresses of databases: the supported ones, and their form in messages."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from outrider.gateway.settings.extras import need_extra
from outrider.gateway.settings.tree import SettingsError

NO_DATABASE: Final = "none"

_SQLITE: Final = frozenset({"sqlite", "sqlite+pysqlite"})
_POSTGRES: Final = frozenset({"postgres", "postgresql", "postgresql+psycopg"})
_FORMS: Final = 'sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME, or "none"'


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for this program's state, by the XDG rules. It need not exist."""
    environ = os.environ if environ is None else environ
    home = environ.get("XDG_STATE_HOME", "")
    # A relative one is to be passed over, the rules say.
    base = Path(home) if Path(home).is_absolute() else Path("~/.local/state").expanduser()
    return base / "outrider"


def default_database_url(environ: Mapping[str, str] | None = None) -> str:
    """Return the default database: outrider.db in the state folder, which is made.

    Raises SettingsError where the folder cannot be made.
    """
    try:
        folder = state_folder(environ)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(
            f"the folder of the default database cannot be made: {reason}. "
            f"Set database_url to {_FORMS}."
        ) from None
    return URL.create("sqlite", database=str(folder / "outrider.db")).render_as_string()


def read_url(text: str) -> URL:
    """Return a database's address with the driver that we use.

    Raises SettingsError, without the password, for invalid addresses and for other databases.
    """
    try:
        url = make_url(text.strip())
    except (ArgumentError, ValueError):
        raise SettingsError(
            f"database_url is not the address of a database; use {_FORMS}. "
            "Write special characters of a password as %XX, such as %40 for @."
        ) from None
    if url.drivername in _SQLITE:
        return _sqlite_url(url)
    if url.drivername in _POSTGRES:
        return _postgres_url(url)
    raise SettingsError(f"database_url: {url.drivername} cannot be used; use {_FORMS}")


def describe(url: URL) -> str:
    """Return the address for logs and messages: no user, no password, no options."""
    if url.drivername == "sqlite":
        return f"sqlite:///{url.database}"
    host = url.host or url.query.get("host") or "localhost"
    port = f":{url.port}" if url.port else ""
    return f"postgresql://{host}{port}/{url.database or ''}"


def _sqlite_url(url: URL) -> URL:
    if url.host or url.username or url.query:
        raise SettingsError(
            "database_url: SQLite takes only a file: sqlite:///FILE, with four slashes for a "
            "full path"
        )
    if not url.database or ":memory:" in url.database or url.database.startswith("file:"):
        raise SettingsError(
            'database_url: SQLite needs a file: sqlite:///FILE. To store nothing, write "none".'
        )
    path = Path(url.database).expanduser().absolute()
    if not path.parent.is_dir():
        raise SettingsError(
            f"database_url: the folder {path.parent} does not exist; create it first"
        )
    if path.is_dir():
        raise SettingsError(f"database_url: {path} is a folder; name a file in it")
    return URL.create("sqlite", database=str(path))


def _postgres_url(url: URL) -> URL:
    need_extra("postgres", "database_url: PostgreSQL")
    return url.set(drivername="postgresql+psycopg")
