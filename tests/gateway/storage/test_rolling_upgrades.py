"""An older gateway goes on writing while a newer one has brought the database up to date."""

import itertools
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from outrider.gateway.storage.database import Database

Columns = dict[str, dict[str, bool]]


def columns(connection: Connection) -> Columns:
    """By table and name: whether an insert may leave it out."""
    found = inspect(connection)
    return {
        table: {
            each["name"]: bool(each["nullable"]) or each["default"] is not None
            for each in found.get_columns(table)
        }
        for table in found.get_table_names()
    }


def test_each_migration_lets_older_programs_insert_and_read(tmp_path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", "outrider.gateway.storage:migrations")
    revisions = [each.revision for each in ScriptDirectory.from_config(config).walk_revisions()]
    database = Database(f"sqlite:///{tmp_path / 'old.db'}")
    states: list[Columns] = []
    for revision in reversed(revisions):
        with database.write() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
            states.append(columns(connection))
    database.close()
    for before, after in itertools.pairwise(states):
        for table, known in before.items():
            assert set(known) <= set(after[table]), f"{table} lost a column that is still read"
            new = set(after[table]) - set(known)
            needed = [name for name in new if not after[table][name]]
            assert needed == [], f"{table}: older programs do not know {needed}"
