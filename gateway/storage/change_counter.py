"""A table of one row that counts the changes of other tables, so that readers notice them."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Table, select, update

from outrider.gateway.storage.database import Database, insert_new


class ChangeCounter:
    """Counts the changes of some tables in `counter`, which has the columns id and version."""

    def __init__(self, database: Database, counter: Table) -> None:
        self._database = database
        self._counter = counter

    def read(self) -> int:
        """Return a number that is another one after every change. Raises DatabaseError."""
        with self._database.read() as connection:
            return self.value(connection)

    def value(self, connection: Connection) -> int:
        """Return that number within a transaction; 0 before the first change."""
        return connection.execute(select(self._counter.c.version)).scalar() or 0

    @contextmanager
    def changing(self) -> Iterator[Connection]:
        """Open a transaction that changes the tables; one at a time, on PostgreSQL by that row.

        Raises DatabaseError.
        """
        counter = self._counter
        with self._database.write() as connection:
            insert_new(connection, counter, [{"id": 1, "version": 0}])
            connection.execute(update(counter).values(version=counter.c.version + 1))
            yield connection
