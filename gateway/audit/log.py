"""The audit log of a database: changes that are kept elsewhere go in, rows come out."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

from sqlalchemy import select

from outrider.gateway.audit.chain import AuditRow, Change, record
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import audit_log

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1000


class AuditLog:
    """Without a database it keeps nothing."""

    def __init__(
        self, database: Database | None = None, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """`wall_clock`: seconds since 1970 (UTC)."""
        self.database = database
        self._wall_clock = wall_clock

    def append(self, change: Change) -> None:
        """Append a change in a transaction of its own. Blocks. Raises DatabaseError."""
        if self.database is not None:
            with self.database.write() as connection:
                record(connection, change, self._wall_clock())

    @asynccontextmanager
    async def changing(self, change: Change) -> AsyncIterator[None]:
        """Record a change that no database keeps before it is made; what fails, once more.

        Raises DatabaseError, and then nothing is to be changed: no change goes unrecorded.
        """
        await asyncio.to_thread(self.append, change)
        try:
            yield
        except Exception as error:
            failed = replace(change, action=f"{change.action}.failed")
            await asyncio.to_thread(self.append, failed)
            logger.info("change failed action=%s error=%s", change.action, type(error).__name__)
            raise

    def page(self, *, after: int, limit: int, since_s: float = 0.0) -> list[AuditRow]:
        """Return the rows behind a sequence number. Blocks. Raises DatabaseError."""
        if self.database is None:
            return []
        query = select(audit_log).where(audit_log.c.sequence > after, audit_log.c.at >= since_s)
        with self.database.read() as connection:
            found = connection.execute(query.order_by(audit_log.c.sequence).limit(limit))
            return [AuditRow(**row) for row in found.mappings()]

    def rows(self, *, since_s: float = 0.0) -> Iterator[AuditRow]:
        """Yield all rows from a time on, the oldest first. Blocks. Raises DatabaseError."""
        after = 0
        while page := self.page(after=after, limit=_ROWS_AT_ONCE, since_s=since_s):
            yield from page
            after = page[-1].sequence
