"""Bringing a database's tables up to date, under a lock."""

from typing import Final

from sqlalchemy import Connection, inspect, text

from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.storage.tables import SCHEMA_VERSION

_LOCK: Final = 0x6F75747269646572
"""The number of PostgreSQL's advisory lock for migrations: the letters of our name."""
_VERSION_TABLE: Final = "alembic_version"


def migrate(connection: Connection, name: str) -> None:
    """Run the migrations that this database has not seen, in the transaction of `connection`.

    That transaction must be the only one that writes (SQLite's are); on PostgreSQL the others wait
    here. `name`: the database's, for messages. Raises SettingsError for a database that a newer
    program has made.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    version = _version_of(connection)
    if version == SCHEMA_VERSION:
        return
    # Slow to load, and rarely needed.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "outrider.gateway.storage:migrations")
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if version is not None and version not in known:
        raise SettingsError(
            f"the database {name} was made by a newer Outrider: its tables have version "
            f"{version}, and this program supports versions up to {SCHEMA_VERSION}. Install the "
            "newer program, or set database_url to another database."
        )
    config.attributes["connection"] = connection
    command.upgrade(config, SCHEMA_VERSION)


def _version_of(connection: Connection) -> str | None:
    """Return the last migration applied to this database; None for a new one."""
    if not inspect(connection).has_table(_VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {_VERSION_TABLE}")).scalar()
