"""Databases: their tables come to be once, transactions end, failures say what to do."""

import multiprocessing
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, insert, inspect, select, text, update
from sqlalchemy.exc import IntegrityError

from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.storage import tables
from outrider.gateway.storage.database import Database, DatabaseError, insert_new
from outrider.gateway.storage.open import open_database
from outrider.gateway.tenancy.ledger.row import LedgerRow
from tests.services import PostgresServer


def opened(url: str) -> Database:
    database = Database(url)
    database.migrate()
    return database


@pytest.mark.slow_cases
def test_migrations_make_exactly_the_tables(database_url: str) -> None:
    database = opened(database_url)
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
    database.close()


def test_the_version_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", "outrider.gateway.storage:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [tables.SCHEMA_VERSION]


def test_the_ledger_has_a_column_for_each_field() -> None:
    assert set(tables.ledger.columns.keys()) == {*LedgerRow.__struct_fields__, "day"}


def _migrate_at(url: str, barrier: Any) -> None:
    database = Database(url)
    barrier.wait()
    database.migrate()
    database.close()


@pytest.mark.slow
def test_several_processes_may_begin_at_once(database_url: str) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    workers = [context.Process(target=_migrate_at, args=(database_url, barrier)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0] * 4
    database = Database(database_url)
    with database.read() as connection:
        assert set(tables.metadata.tables) <= set(inspect(connection).get_table_names())
        versions = connection.execute(text("SELECT version_num FROM alembic_version")).all()
        assert versions == [(tables.SCHEMA_VERSION,)]
    database.close()


def test_a_newer_database_is_refused_and_left_alone(database_url: str) -> None:
    database = opened(database_url)
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(
        SettingsError, match=rf"newer Outrider.* version 9999.* up to {tables.SCHEMA_VERSION}"
    ):
        database.migrate()
    with database.read() as connection:
        assert (
            connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
        )
    database.close()


def test_a_failed_block_changes_nothing(database_url: str) -> None:
    database = opened(database_url)

    def break_off() -> None:
        with database.write() as connection:
            connection.execute(insert(tables.secrets).values(name="a", value="b"))
            raise ZeroDivisionError

    def insert_twice() -> None:
        with database.write() as connection:
            for _ in range(2):
                connection.execute(insert(tables.secrets).values(name="a", value="b"))

    with pytest.raises(ZeroDivisionError):
        break_off()
    with pytest.raises(IntegrityError):
        insert_twice()
    with database.read() as connection:
        assert connection.execute(select(tables.secrets)).all() == []
    database.close()


@pytest.mark.slow_cases
def test_writers_in_threads_lose_no_update(database_url: str) -> None:
    database = opened(database_url)
    with database.write() as connection:
        connection.execute(insert(tables.key_version).values(id=1, version=0))

    def count() -> None:
        for _ in range(25):
            with database.write() as connection:
                # Reads first, as transactions do that could stand in each other's way.
                query = select(tables.key_version.c.version).with_for_update()
                version = connection.execute(query).scalar_one()
                connection.execute(update(tables.key_version).values(version=version + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as connection:
        assert connection.execute(select(tables.key_version.c.version)).scalar() == 100
    database.close()


def test_rows_that_are_there_are_passed_over(database_url: str) -> None:
    database = opened(database_url)
    rows = [{"name": name, "value": "1"} for name in "ab"]
    with database.write() as connection:
        insert_new(connection, tables.secrets, rows)
        insert_new(connection, tables.secrets, [])
        insert_new(connection, tables.secrets, [*rows, {"name": "c", "value": "2"}])
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(tables.secrets)).scalar() == 3
    database.close()


def test_the_file_is_its_owners_alone_and_keeps_a_log_ahead(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path}/my.db")
    with database.write() as connection:
        connection.execute(insert(tables.secrets).values(name="a", value="b"))
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 1
        files = list(tmp_path.iterdir())
        assert len(files) == 3
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    database.close()


def test_readers_do_not_wait_for_the_writer(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path}/my.db")
    with database.write() as writer:
        writer.execute(insert(tables.secrets).values(name="a", value="b"))
        with database.read() as reader:
            assert reader.execute(select(tables.secrets)).all() == []
    database.close()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember the milk " * 100)
    database = Database(f"sqlite:///{tmp_path}/notes.txt")
    with pytest.raises(SettingsError, match="not an SQLite database"):
        database.migrate()
    database.close()


def test_a_full_disk_is_an_outage_and_not_a_bug(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path}/my.db")

    def fill() -> None:
        with database.write() as connection:
            pages = connection.execute(text("PRAGMA page_count")).scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
            for n in range(1000):
                row = {"name": str(n), "value": "x" * 1000}
                connection.execute(insert(tables.secrets).values(row))

    with pytest.raises(DatabaseError) as outage:
        fill()
    assert "full" in outage.value.detail
    assert "full" not in str(outage.value)  # what clients are told
    with database.read() as connection:
        assert connection.execute(select(tables.secrets)).all() == []
    database.close()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        url = f"postgresql://me:geheim@127.0.0.1:{port}/x"
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}/x is unavailable") as refusal:
            open_database(Settings(database_url=url))
    assert "geheim" not in str(refusal.value)
    assert "does without" in str(refusal.value)


def test_an_option_that_does_not_exist(postgres_url: str) -> None:
    with pytest.raises(SettingsError, match="fastness"):
        open_database(Settings(database_url=f"{postgres_url}?fastness=11"))


def test_connections_that_broke_are_made_again(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    database = opened(postgres_url)
    with database.write() as connection:
        connection.execute(insert(tables.secrets).values(name="a", value="b"))
    postgres_server.drop_connections()
    with database.read() as connection:
        assert connection.execute(select(tables.secrets.c.value)).scalar() == "b"

    def be_cut_off() -> None:
        with database.read() as connection:
            postgres_server.drop_connections()
            connection.execute(select(tables.secrets))

    with pytest.raises(DatabaseError):
        be_cut_off()
    with database.read() as connection:
        assert connection.execute(select(tables.secrets.c.value)).scalar() == "b"
    database.close()


def test_the_settings_may_want_none(tmp_path: Path) -> None:
    assert open_database(Settings(database_url="none")) is None
    url = f"sqlite:///{tmp_path}/given.db"
    database = open_database(Settings(database_url="none"), database_url=url)
    assert database is not None
    assert database.path == tmp_path / "given.db"
    assert database.name == url
    database.close()


def test_the_default_database_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    database = open_database(Settings())
    assert database is not None
    assert database.path == tmp_path / "outrider" / "outrider.db"
    database.close()
