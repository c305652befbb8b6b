"""Writes rows to a journal at once, and from there to the database in batches.

Two threads, so that a slow database never delays the journal. One drains added rows into the open
segment of the journal, the other seals it and stores its rows. Both always use the same code path:
reading back after a crash is the same as reading back every second.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.settings.ledger import LedgerSettings
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.ledger.journal import Journal, read_segment, write_aside
from outrider.gateway.tenancy.ledger.ledger_metrics import LedgerMetrics
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import DAY_S, LedgerRow
from outrider.gateway.tenancy.ledger.storing import RowStore, in_batches

logger = logging.getLogger(__name__)

_MAX_ROWS_IN_MEMORY: Final = 100_000
_ROWS_AT_ONCE: Final = 1000
_MAX_WAIT_S: Final = 30.0
_ADOPTING_PAUSE_S: Final = 60.0
_REPEAT_LOG_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 20.0

Ticket = Future[None]


class JournaledLedger:
    """Loses at most one flush interval's rows when the process is killed, none otherwise.

    Implements `Ledger`. While the database is away, rows stay in the journal; while the journal
    cannot be written, in memory, up to a bound.
    """

    def __init__(
        self,
        *,
        database: Database,
        journal: Path,
        settings: LedgerSettings,
        prices: PriceBook,
        metrics: LedgerMetrics | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`journal` is a folder of this database's alone; `wall_clock` is seconds since 1970."""
        self._settings = settings
        self._prices = prices
        self._metrics = metrics
        self._wall_clock = wall_clock
        self._clock = clock
        self._journal = Journal(journal, lambda: secrets.token_hex(4))
        self._store = RowStore(database, self._reject)
        self._incoming: deque[LedgerRow] = deque()
        self._num_refused = 0
        self._asked: deque[Ticket] = deque()
        self._journaled: deque[Ticket] = deque()
        self._closing = threading.Lock()  # held by the one of several closers that ends it
        self._lock = threading.Lock()  # of the following rows
        self._stuck: list[LedgerRow] = []
        self._num_pending = 0
        self._wants_journal = threading.Event()
        self._wants_database = threading.Event()
        self._is_closing = False
        self._is_journal_ended = False
        self._is_closed = False
        self._threads: tuple[threading.Thread, ...] = ()
        self._has_stored_prices = False
        self._adopts_at_s = 0.0
        self._cleans_at_s = 0.0
        self._complained_at_s: float | None = None

    def add(self, row: LedgerRow) -> None:
        """Remember a row. Never blocks, never raises; from any thread."""
        if len(self._incoming) < _MAX_ROWS_IN_MEMORY and not self._is_closed:
            self._incoming.append(row)
        else:
            self._num_refused += 1

    def store_in(self, connection: Connection, rows: Sequence[LedgerRow]) -> None:
        """Store rows as a part of another's transaction; they are in no journal. Blocks."""
        self._store.store_in(connection, rows)
        if self._metrics is not None:
            self._metrics.taken(rows)

    async def start(self) -> None:
        """Open the journal, and store the rows that earlier processes left in theirs.

        An unavailable database is waited for later. Raises SettingsError for a journal's folder
        that cannot be used.
        """
        await asyncio.to_thread(self._open_journal)
        self._threads = tuple(
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in (
                (self._keep_journal, "ledger-journal"),
                (self._fill_database, "ledger-database"),
            )
        )
        for thread in self._threads:
            thread.start()
        try:
            await self.flush()
        except StorageError as error:
            logger.warning("the ledger begins without its database error=%s", error)

    async def flush(self) -> None:
        """Return when every row added so far is in the database.

        Raises StorageError where that is not possible now; the rows are kept.
        """
        if not self._threads or self._is_closing:
            raise StorageError("The ledger is not open.")
        ticket = Ticket()
        self._asked.append(ticket)
        self._wants_journal.set()
        await asyncio.wrap_future(ticket)

    async def close(self) -> None:
        """Store all added rows, and end. While the database is unavailable they stay in the
        journal."""
        if not self._threads:
            return
        self._is_closing = True
        self._wants_journal.set()
        self._wants_database.set()
        await asyncio.to_thread(self._join)
        self._threads = ()

    def _join(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._end()
            self._is_closed = True

    def _end(self) -> None:
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            # The lock on the journal ends with the process; the next one stores the remaining rows.
            logger.warning("the database does not answer; rows stay in the journal")
            return
        self._drain()  # rows added while the last batch was stored: for the next process
        if self._stuck:
            logger.error(
                "rows are lost rows=%d reason=neither the journal nor the database takes them",
                len(self._stuck),
            )
            self._count_dropped(len(self._stuck))
        self._journal.close()

    # ---- the journal's thread

    def _open_journal(self) -> None:
        try:
            self._journal.open()
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise SettingsError(
                f"the ledger's journal cannot be kept in {self._journal.folder}: "
                f"{error.strerror}. Set ledger.journal to a folder that can be written."
            ) from None
        except OSError as error:
            self._complain(error)

    def _keep_journal(self) -> None:
        """Drain the added rows every flush interval, until closed."""
        flush_s = self._settings.flush_ms / 1000
        while not self._is_journal_ended:
            if not self._is_closing:
                self._wants_journal.wait(flush_s)
            self._wants_journal.clear()
            is_last = self._is_closing
            # Tickets first: rows added before them are then drained after them.
            tickets = [self._asked.popleft() for _ in range(len(self._asked))]
            self._drain()
            self._journaled.extend(tickets)
            self._is_journal_ended = is_last
            if tickets or is_last:
                self._wants_database.set()

    def _drain(self) -> None:
        """Move the added rows into the journal."""
        count = _ROWS_AT_ONCE
        while count == _ROWS_AT_ONCE:
            count = min(len(self._incoming), _ROWS_AT_ONCE)
            rows = [self._incoming.popleft() for _ in range(count)]
            with self._lock:
                self._stuck.extend(rows)
                while self._stuck and self._append(self._stuck[:_ROWS_AT_ONCE]):
                    del self._stuck[:_ROWS_AT_ONCE]
                num_surplus = len(self._stuck[_MAX_ROWS_IN_MEMORY:])
                del self._stuck[_MAX_ROWS_IN_MEMORY:]
                self._num_pending += count - num_surplus
            self._notify(rows, num_surplus)

    def _append(self, rows: list[LedgerRow]) -> bool:
        try:
            self._journal.append(rows)
        except Exception as error:  # noqa: BLE001 - whatever it is: the rows must not be lost
            self._complain(error)
            return False
        if self._complained_at_s is not None:
            self._complained_at_s = None
            logger.warning("the journal of the ledger can be written again rows=%d", len(rows))
        return True

    def _notify(self, rows: list[LedgerRow], num_surplus: int) -> None:
        num_refused, self._num_refused = self._num_refused, 0
        if num_surplus + num_refused:
            logger.error("rows are lost rows=%d reason=too many wait", num_surplus + num_refused)
            self._count_dropped(num_surplus + num_refused)
        if self._metrics is not None:
            self._metrics.taken(rows)
            self._metrics.pending(self._num_pending)

    def _complain(self, error: Exception) -> None:
        """Log an error, but not every tenth of a second."""
        if self._metrics is not None:
            self._metrics.failed("journal")
        now_s = self._clock()
        if self._complained_at_s is None or now_s - self._complained_at_s >= _REPEAT_LOG_S:
            self._complained_at_s = now_s
            logger.error(
                "the journal of the ledger cannot be written folder=%s error=%s rows_in_memory=%d",
                self._journal.folder,
                error,
                len(self._stuck),
            )

    def _count_dropped(self, num_rows: int) -> None:
        if self._metrics is not None:
            self._metrics.dropped(num_rows)

    # ---- the database's thread

    def _fill_database(self) -> None:
        """Store every batch interval, less often while the database is down, until closed."""
        batch_s = self._settings.batch_ms / 1000
        wait_s = batch_s
        is_last = False
        while not is_last:
            self._wants_database.wait(wait_s)
            self._wants_database.clear()
            is_last = self._is_journal_ended
            tickets = [self._journaled.popleft() for _ in range(len(self._journaled))]
            try:
                self._store_all()
            except Exception as error:  # noqa: BLE001 - it is tried again, whatever it is
                wait_s = min(2 * wait_s, max(batch_s, _MAX_WAIT_S))
                self._database_failed(error, wait_s)
                _resolve(tickets, StorageError("The ledger's database cannot be written now."))
            else:
                wait_s = batch_s
                _resolve(tickets, None)
        _resolve([*self._journaled, *self._asked], StorageError("The ledger is closed."))

    def _store_all(self) -> None:
        """Store all journaled rows. Raises the first error met."""
        if not self._has_stored_prices:
            self._store.store_prices(self._prices, self._wall_clock())
            self._has_stored_prices = True
        with self._lock:
            segments = self._journal.sealed()
            stuck, self._stuck = self._stuck, []
        try:
            self._store.store(stuck)
        except BaseException:
            with self._lock:
                self._stuck = stuck + self._stuck
            raise
        self._stored(len(stuck))
        self._stored(self._store_segments(segments))
        self._adopt()
        self._clean()

    def _store_segments(self, paths: Iterable[Path]) -> int:
        """Store the rows of segments; return their number. Files that cannot be read are
        skipped."""
        num_rows = 0
        failure: OSError | None = None
        for path in paths:
            try:
                num_rows += self._store_segment(path)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return num_rows

    def _store_segment(self, path: Path) -> int:
        """Store a segment and delete it; return the number of its rows."""
        num_rows = 0
        for rows in in_batches(read_segment(path)):
            self._store.store(rows)
            num_rows += len(rows)
        path.unlink(missing_ok=True)
        return num_rows

    def _stored(self, num_rows: int) -> None:
        with self._lock:
            self._num_pending -= num_rows
        if self._metrics is not None:
            self._metrics.pending(self._num_pending)

    def _adopt(self) -> None:
        """Store the rows of dead processes."""
        now_s = self._clock()
        if now_s < self._adopts_at_s:
            return
        try:
            for orphan in self._journal.orphans():
                try:
                    num_rows = self._store_segments(orphan.segments)
                finally:
                    orphan.release()
                if num_rows:
                    logger.info(
                        "stored rows from the journal of an earlier process rows=%d", num_rows
                    )
        except OSError as error:  # not a reason to keep our own rows waiting
            logger.error("a journal that was left cannot be read error=%s", error)
        self._adopts_at_s = now_s + _ADOPTING_PAUSE_S

    def _clean(self) -> None:
        """Delete rows that are too old, once a day."""
        now_s = self._clock()
        if self._settings.retention_days is None or now_s < self._cleans_at_s:
            return
        before_s = self._wall_clock() - self._settings.retention_days * DAY_S
        num_rows = self._store.delete_before(before_s)
        if num_rows:
            logger.info("deleted old rows of the ledger rows=%d", num_rows)
        self._cleans_at_s = now_s + DAY_S

    def _database_failed(self, error: Exception, wait_s: float) -> None:
        if self._metrics is not None:
            self._metrics.failed("database")
        logger.error(
            "the ledger cannot be written error=%s rows_waiting=%d next_try_s=%.1f",
            getattr(error, "detail", None) or f"{type(error).__name__}: {error}",
            self._num_pending,
            wait_s,
        )

    def _reject(self, row: LedgerRow, reason: str) -> None:
        """Set aside a row that keeps all others from being stored."""
        write_aside(self._journal.folder, row, reason)


def _resolve(tickets: list[Ticket], error: Exception | None) -> None:
    """Wake the waiting tasks; some may have been cancelled."""
    for ticket in tickets:
        if not ticket.set_running_or_notify_cancel():
            continue
        if error is None:
            ticket.set_result(None)
        else:
            ticket.set_exception(error)
