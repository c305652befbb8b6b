"""A ledger that records nothing."""

from gateway.ledger.row import LedgerRow


class NullLedger:
    """Forgets everything. Implements `Ledger`."""

    def add(self, row: LedgerRow) -> None:
        """Forget the row."""

    async def start(self) -> None:
        """Nothing to open."""

    async def flush(self) -> None:
        """Nothing to write."""

    async def close(self) -> None:
        """Nothing to end."""
