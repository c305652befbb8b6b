"""A process that adds rows to a ledger, for tests that kill it.

Arguments: the database's URL, the journal's folder, a word for its rows, how many, and how to end:
`close`, or `wait` to be killed. It writes the id and the time of each row behind its `add`.
"""

import asyncio
import sys
import time
from pathlib import Path

from outrider.gateway.settings.ledger import LedgerSettings
from outrider.gateway.storage.database import Database
from tests.gateway.tenancy.ledger.ledgers import make_ledger, row

FLUSH_S = 0.1


async def run(url: str, journal: Path, word: str, num_rows: int, ending: str) -> None:
    """Add rows, one each millisecond."""
    database = Database(url)
    settings = LedgerSettings(flush_ms=FLUSH_S * 1000, batch_ms=250)
    book = make_ledger(database, journal, settings)
    await book.start()
    for number in range(num_rows):
        row_id = f"{word}-{number:06d}"
        book.add(row(number, row_id=row_id))
        sys.stdout.write(f"{row_id} {time.monotonic()}\n")
        sys.stdout.flush()
        await asyncio.sleep(0.001)
    if ending == "wait":
        await asyncio.sleep(60)
    await book.close()
    database.close()


if __name__ == "__main__":
    URL, FOLDER, WORD, NUM_ROWS, ENDING = sys.argv[1:]
    asyncio.run(run(URL, Path(FOLDER), WORD, int(NUM_ROWS), ENDING))
