"""Rows, databases that can be cut off, and ledgers for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select

from outrider.gateway.settings.ledger import LedgerSettings
from outrider.gateway.storage.database import Database, DatabaseError
from outrider.gateway.storage.tables import ledger
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow
from outrider.gateway.tenancy.ledger.writer import JournaledLedger

NOON = 1_790_000_000.0 // 86_400 * 86_400 + 43_200
"""A day's noon, UTC."""

QUICK = LedgerSettings(flush_ms=5, batch_ms=20)


def row(number: int, **changes: Any) -> LedgerRow:
    """A row like others, but for its number."""
    facts: dict[str, Any] = {
        "row_id": f"row-{number:06d}",
        "request_id": f"request-{number:06d}",
        "ended_at": NOON + number / 1000,
        "kind": "answer",
        "outcome": "answered",
        "tier": "small",
        "num_prompt_tokens": 100,
        "num_completion_tokens": 10,
        "num_charged_tokens": 110,
    }
    return LedgerRow(**facts | changes)


class FrailDatabase(Database):
    """Can be away for a while."""

    is_away = False

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """As ever, if it is there."""
        if self.is_away:
            raise DatabaseError("the database is cut off")
        with super().write() as connection:
            yield connection


@contextmanager
def opened(url: str) -> Iterator[FrailDatabase]:
    """A database with its tables."""
    database = FrailDatabase(url)
    database.migrate()
    try:
        yield database
    finally:
        database.close()


def make_ledger(
    database: Database, journal: Path, settings: LedgerSettings = QUICK, **arguments: Any
) -> JournaledLedger:
    """One that is not started."""
    prices = arguments.pop("prices", PriceBook.free())
    return JournaledLedger(
        database=database, journal=journal, settings=settings, prices=prices, **arguments
    )


def stored_ids(database: Database) -> list[str]:
    """Return what has reached the database, in order."""
    with database.read() as connection:
        statement = select(ledger.c.row_id).order_by(ledger.c.row_id)
        return list(connection.execute(statement).scalars())


def ids(*numbers: int) -> list[str]:
    """Return what rows with these numbers are called."""
    return [row(number).row_id for number in numbers]
