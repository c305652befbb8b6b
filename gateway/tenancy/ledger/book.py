"""The interface between the code that answers requests and the ledger that records them."""

from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import Connection

from outrider.gateway.tenancy.ledger.row import LedgerRow


class Ledger(Protocol):
    """Takes rows at once and writes them later, in batches."""

    def add(self, row: LedgerRow) -> None:
        """Remember a row. Never blocks, never raises; costs some microseconds."""

    def store_in(self, connection: Connection, rows: Sequence[LedgerRow]) -> None:
        """Store rows as a part of another's transaction of the ledger's database. Blocks."""

    async def start(self) -> None:
        """Open, and replay the rows that an earlier process left in its journal."""

    async def flush(self) -> None:
        """Return when every row added so far is in the database."""

    async def close(self) -> None:
        """Flush and end; no added row is lost."""


class NullLedger:
    """Drops all rows. Implements `Ledger`."""

    def add(self, row: LedgerRow) -> None:
        """Forget the row."""

    def store_in(self, connection: Connection, rows: Sequence[LedgerRow]) -> None:
        """Forget the rows."""

    async def start(self) -> None:
        """Do nothing."""

    async def flush(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
