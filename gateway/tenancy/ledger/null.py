"""A ledger that records nothing."""

from outrider.gateway.tenancy.ledger.row import LedgerRow


class NullLedger:
    """Drops all rows. Implements `Ledger`."""

    def add(self, row: LedgerRow) -> None:
        """Forget the row."""

    async def start(self) -> None:
        """Do nothing."""

    async def flush(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
