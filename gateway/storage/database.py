"""One database for worker threads: transactions that end, errors that name the remedy."""

import functools
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy import (
    URL,
    Connection,
    CursorResult,
    Engine,
    QueuePool,
    Table,
    create_engine,
    event,
    exc,
)

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.storage.migrating import migrate
from outrider.gateway.storage.tables import metadata
from outrider.gateway.storage.urls import describe, read_url

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

logger = logging.getLogger(__name__)

SqlDialect = Literal["sqlite", "postgresql"]

_BUSY_TIMEOUT_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 5
_STATEMENT_TIMEOUT_S: Final = 60
_LOCK_TIMEOUT_S: Final = 30
_POOL_SIZE: Final = 4
_MAX_REASON_CHARS: Final = 300
_WRITES: Final = "outrider_writes"


class DatabaseError(StorageError):
    """The database is unavailable. Clients learn no more than that; `detail` is for the
    operator."""

    def __init__(self, detail: str) -> None:
        super().__init__("The database is unavailable. Try again later.")
        self.detail = detail


class Database:
    """A database, opened at its first use. Blocks: in an event loop, use a thread.

    Safe for several threads, and for several processes on the same database.
    """

    name: str
    """The database's name in messages; without user and password."""
    dialect: SqlDialect
    path: Path | None
    """SQLite's file."""

    def __init__(self, url: str | None) -> None:
        """Store the URL without connecting; None: in memory, until it is closed.

        Raises SettingsError for an unusable one.
        """
        if url is None:
            self.name, self.dialect, self.path = "in memory", "sqlite", None
            self.engine = _memory_engine()
            return
        address = read_url(url)
        self.name = describe(address)
        self.dialect = "sqlite" if address.drivername == "sqlite" else "postgresql"
        self.path = Path(str(address.database)) if self.dialect == "sqlite" else None
        self.engine = _sqlite_engine(address) if self.path else _postgres_engine(address)

    @property
    def is_in_memory(self) -> bool:
        """True if what it holds ends with it."""
        return self.dialect == "sqlite" and self.path is None

    def migrate(self) -> None:
        """Make the tables, or bring them up to date; several processes may do so at once.

        Raises SettingsError for a database that a newer program has made, or that is no database;
        DatabaseError where it cannot be reached.
        """
        if self.path is not None:
            _make_private(self.path)
        try:
            with self.write() as connection:
                migrate(connection, self.name)
        except exc.ProgrammingError as error:
            raise SettingsError(f"database_url: {reason_of(error)}") from None
        except DatabaseError as error:
            if "file is not a database" not in error.detail:
                raise
            raise SettingsError(f"{self.name} is not an SQLite database") from None

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads. Raises DatabaseError where the database fails."""
        with self._translated(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction: committed at the end, rolled back after an exception.

        SQLite has one writer at a time, the others wait for it here. Raises DatabaseError where
        the database fails; IntegrityError (SQLAlchemy's) is passed on.
        """
        with (
            self._translated(),
            self.engine.execution_options(**{_WRITES: True}).begin() as connection,
        ):
            yield connection

    def vacuum(self) -> None:
        """Rewrite the file, so that nothing is left in it that was deleted. Raises DatabaseError.

        PostgreSQL frees what is left, and overwrites it later.
        """
        with self._translated(), self.engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            if self.dialect == "postgresql":
                driver.autocommit = True
            try:
                driver.execute("VACUUM")
                if self.dialect == "sqlite":
                    cleared = driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                    if cleared[0]:
                        raise sqlite3.OperationalError("its write-ahead log is being read")
            except sqlite3.Error as error:
                detail = f"the database {self.name} cannot be rewritten: {reason_of(error)}"
                raise DatabaseError(detail) from error
            finally:
                connection.invalidate()  # no other use gets this one

    def close(self) -> None:
        """Close all connections. Used again, it is opened again."""
        self.engine.dispose()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except exc.SQLAlchemyError as error:
            if not _is_outage(error):
                raise
            detail = f"the database {self.name} is unavailable: {reason_of(error)}"
            raise DatabaseError(detail) from error


def insert_new(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
) -> CursorResult[Any] | None:
    """Insert the rows (dicts) whose primary key is new; skip the others."""
    if not rows:
        return None
    statement = insert_into(table, connection.dialect.name).on_conflict_do_nothing()
    return connection.execute(statement, [dict(row) for row in rows])


def insert_into(table: Table, dialect: str) -> "postgresql.Insert | sqlite.Insert":
    """Return the dialect's own INSERT, which has an ON CONFLICT. Imports that dialect alone."""
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)


def reason_of(error: BaseException) -> str:
    """Return the driver's message on one line, without the statement and its values."""
    origin = error
    if isinstance(error, exc.DBAPIError) and error.orig is not None:
        origin = error.orig
    words = " ".join(str(origin).split()) or type(origin).__name__
    return words[:_MAX_REASON_CHARS]


def _is_outage(error: exc.SQLAlchemyError) -> bool:
    """Return whether the database failed, rather than the statement."""
    if isinstance(error, exc.DBAPIError) and error.connection_invalidated:
        return True
    # SQLite's driver says of a damaged file no more than that it is an error of the database.
    return type(error) is exc.DatabaseError or isinstance(
        error, exc.OperationalError | exc.InterfaceError | exc.InternalError | exc.TimeoutError
    )


def _memory_engine() -> Engine:
    """SQLite in memory, with all tables: one connection, which threads use in turn."""
    engine = create_engine(
        "sqlite://",
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=_BUSY_TIMEOUT_S,
        connect_args={"check_same_thread": False},
    )
    event.listen(engine, "connect", _add_tables)
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _add_tables(connection: sqlite3.Connection, _: object) -> None:
    connection.deserialize(_empty_tables())


@functools.cache
def _empty_tables() -> bytes:
    """An SQLite database of all tables, without rows."""
    with closing(sqlite3.connect(":memory:")) as made:
        metadata.create_all(create_engine("sqlite://", creator=lambda: made), checkfirst=False)
        return made.serialize()


def _sqlite_engine(address: URL) -> Engine:
    engine = create_engine(
        address,
        pool_size=_POOL_SIZE,
        pool_timeout=_BUSY_TIMEOUT_S,
        connect_args={"timeout": _BUSY_TIMEOUT_S},
    )
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _postgres_engine(address: URL) -> Engine:
    defaults: dict[str, Any] = {
        # A server that has vanished from the network is given up after half a minute.
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 4,
        "tcp_user_timeout": 30_000,
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "application_name": "outrider",
        "prepare_threshold": None,  # poolers between us hand each transaction another connection
        "options": f"-c statement_timeout={_STATEMENT_TIMEOUT_S}s "
        f"-c lock_timeout={_LOCK_TIMEOUT_S}s",
    }
    return create_engine(
        address,
        pool_size=_POOL_SIZE,
        pool_timeout=_BUSY_TIMEOUT_S,
        pool_pre_ping=True,  # a server that was started again has dropped our connections
        connect_args={k: v for k, v in defaults.items() if k not in address.query},
    )


def _make_private(path: Path) -> None:
    """Have the file made with rights for its owner only; its companions get the same.

    Raises DatabaseError where it cannot be made or written.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise DatabaseError(f"the database {path} cannot be opened: {error.strerror}") from None


def _set_up_sqlite(connection: sqlite3.Connection, _: object) -> None:
    """Set the options that SQLite keeps per connection."""
    connection.isolation_level = None  # Python's module begins transactions late, and unasked
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {round(_BUSY_TIMEOUT_S * 1000)}")
        _use_wal(cursor)
        # With a write-ahead log this loses no commit when a process dies; when the machine does,
        # the last ones, and never the file.
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
    finally:
        cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Write-ahead logging: readers and the writer do not wait for each other.

    The change itself does not heed the busy timeout, so it is tried again while others open the
    same new file.
    """
    deadline_s = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    """Take the writer's lock at once: two that began by reading would block each other."""
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
