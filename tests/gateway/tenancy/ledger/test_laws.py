"""Whatever fails in whatever order: each row that was added is in the database once, at last."""

import asyncio
import errno
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.tenancy.ledger import journal as journal_module
from outrider.gateway.tenancy.ledger.ledger_metrics import LedgerMetrics
from outrider.gateway.tenancy.ledger.queries import UsageFilter, total_usage
from outrider.gateway.tenancy.ledger.row import LedgerRow
from tests.databases import with_tables
from tests.gateway.tenancy.ledger.ledgers import FrailDatabase, make_ledger, opened, row

Event = Literal["cut", "mend", "fill_disk", "free_disk", "restart", "flush"]
EVENTS: Sequence[Event] = ("cut", "mend", "fill_disk", "free_disk", "restart", "flush")
write_all = journal_module._write_all


class Disk:
    """Stands in for writing to a file."""

    is_full = False

    def write(self, file: int, data: bytes) -> None:
        """Half of it, where there is no room."""
        if self.is_full:
            write_all(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data)


async def play(
    database: FrailDatabase, folder: Path, disk: Disk, steps: Sequence[Event | int]
) -> list[LedgerRow]:
    """Do all steps, then mend everything; numbers are rows to add."""
    added: list[LedgerRow] = []
    registry = CollectorRegistry()
    metrics = LedgerMetrics(registry)
    book = make_ledger(database, folder, metrics=metrics)
    await book.start()
    for step in (*steps, "free_disk", "restart", "mend", "restart"):
        match step:
            case "cut" | "mend":
                database.is_away = step == "cut"
            case "fill_disk" | "free_disk":
                disk.is_full = step == "fill_disk"
            case "restart":
                # Neither journal nor database: then a clean stop has to lose what is in memory.
                disk.is_full = disk.is_full and not database.is_away
                await book.close()
                book = make_ledger(database, folder, metrics=metrics)
                await book.start()
            case "flush":
                with suppress(StorageError):
                    await book.flush()
            case int(count):
                rows = [row(len(added) + k, cost_nanos=1 + k) for k in range(count)]
                added += rows
                for one in rows:
                    book.add(one)
    await book.close()
    assert registry.get_sample_value("outrider_ledger_dropped_rows_total") == 0
    return added


@settings(max_examples=12)
@given(st.lists(st.sampled_from(EVENTS) | st.integers(1, 150), max_size=8))
def test_each_row_is_stored_once(steps: list[Event | int]) -> None:
    disk = Disk()
    journal_module._write_all = disk.write
    try:
        with (
            tempfile.TemporaryDirectory() as name,
            opened(with_tables(Path(name) / "test.db")) as database,
        ):
            folder = Path(name) / "journal"
            added = asyncio.run(play(database, folder, disk, steps))
            with database.read() as connection:
                total = total_usage(connection, UsageFilter())
            assert list(folder.iterdir()) == []
    finally:
        journal_module._write_all = write_all
    assert total.attempts == total.requests == len(added)
    assert total.cost_nanos == sum(one.cost_nanos for one in added)
    assert total.tokens["prompt"] == 100 * len(added)
