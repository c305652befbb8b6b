"""Stores rows and prices in the database; repeating an insert changes nothing."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, delete, select
from sqlalchemy.exc import DataError, IntegrityError

from outrider.gateway.storage.database import Database, insert_into, insert_new, reason_of
from outrider.gateway.storage.tables import ledger, price_versions
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow, fitted

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE: Final = 50
"""Rows of one transaction. Making them ready for the driver keeps the interpreter for half a
millisecond, during which no answer proceeds."""
_ROWS_DELETED_AT_ONCE: Final = 2000
_DATA_ERRORS: Final = (DataError, IntegrityError, OverflowError, ValueError)
"""Errors of values that no column can hold. Any other error may pass with time."""

OnRejected = Callable[[LedgerRow, str], None]
"""Called with a row that the database will never take, and the reason."""


class RowStore:
    """The ledger's tables, for writing. Blocks; for one thread."""

    def __init__(self, database: Database, on_rejected: OnRejected) -> None:
        self._database = database
        self._on_rejected = on_rejected

    def store(self, rows: Sequence[LedgerRow]) -> None:
        """Insert rows that are new. Raises StorageError where the database is unavailable.

        Other errors of the driver mean that the tables are not as they should be.
        """
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            try:
                self._insert(part)
            except _DATA_ERRORS as error:
                logger.warning(
                    "rows are stored one by one rows=%d reason=%s", len(part), reason_of(error)
                )
                self._store_singly(part)

    def store_prices(self, prices: PriceBook, now_s: float) -> None:
        """Store the prices under their version. Raises StorageError."""
        row = {
            "version": prices.version,
            "document": prices.document.decode(),
            "created_at": now_s,
        }
        with self._database.write() as connection:
            insert_new(connection, price_versions, [row])

    def delete_before(self, before_s: float) -> int:
        """Delete rows of attempts that ended before then, in small batches; return their number.

        Raises StorageError.
        """
        oldest = select(ledger.c.row_id).where(ledger.c.ended_at < before_s)
        statement = delete(ledger).where(
            ledger.c.row_id.in_(oldest.limit(_ROWS_DELETED_AT_ONCE).scalar_subquery())
        )
        num_deleted = 0
        while True:
            with self._database.write() as connection:  # others write in between
                count = connection.execute(statement).rowcount
            num_deleted += count
            if count < _ROWS_DELETED_AT_ONCE:
                return num_deleted

    def _store_singly(self, rows: Sequence[LedgerRow]) -> None:
        for row in rows:
            try:
                self._insert([row])
            except _DATA_ERRORS as error:
                self._on_rejected(row, reason_of(error))

    def _insert(self, rows: Sequence[LedgerRow]) -> None:
        with self._database.write() as connection:
            self.store_in(connection, rows)

    def store_in(self, connection: Connection, rows: Sequence[LedgerRow]) -> None:
        """Insert rows that are new, as a part of another's transaction."""
        sql, values_of = self._statement
        values = [values_of(fitted(row)) for row in rows]
        # Past SQLAlchemy's own handling of each value, which costs as much as the insert.
        if values:
            connection.exec_driver_sql(sql, values)

    @cached_property
    def _statement(self) -> tuple[str, Callable[[LedgerRow], Any]]:
        """Return the statement for the driver, and a row's values as it takes them."""
        statement = insert_into(ledger, self._database.dialect).on_conflict_do_nothing()
        compiled = statement.compile(dialect=self._database.engine.dialect)
        if compiled.positiontup is None:
            return str(compiled), _named_values
        return str(compiled), attrgetter(*compiled.positiontup)


def in_batches(rows: Iterable[LedgerRow]) -> Iterator[list[LedgerRow]]:
    """Yield the rows in batches of one transaction."""
    rest = iter(rows)
    while batch := list(islice(rest, _ROWS_AT_ONCE)):
        yield batch


def _named_values(row: LedgerRow) -> dict[str, Any]:
    """Return a row's columns by name."""
    return {**msgspec.structs.asdict(row), "day": row.day}
