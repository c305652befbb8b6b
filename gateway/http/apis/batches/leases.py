"""Batches as the process that works on them reads and writes them.

One process works on a batch: its lease ends unless it is renewed. Whatever is written says whose
lease it is under, so a process that was away too long writes nothing more.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from outrider.gateway.http.apis.batches.records import OPEN, BatchRecord, FileRecord
from outrider.gateway.storage.database import Database, insert_new
from outrider.gateway.storage.tables import batch_results, batches, files, price_versions
from outrider.gateway.tenancy.ledger.book import Ledger
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow

LEASE_S: Final = 15.0
_RESULTS_AT_ONCE: Final = 20
"""A few: each may have megabytes."""
_USAGE: Final = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_completion_tokens",
    "num_reasoning_tokens",
)


class LeaseLostError(Exception):
    """Another process works on the batch, or nobody does any more."""


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a batch that is over. `result`: its line of the output or error file."""

    line: int
    is_error: bool
    result: str
    rows: tuple[LedgerRow, ...] = ()


class BatchLeases:
    """The leases of one process. Blocks: in an event loop, use a thread."""

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        prices: PriceBook,
        owner: str,
        wall_clock: Callable[[], float],
    ) -> None:
        """`prices`: of the ledger's rows. `owner`: a name that no other process has."""
        self._database = database
        self._ledger = ledger
        self._prices = prices
        self._owner = owner
        self._wall_clock = wall_clock

    def store_prices(self) -> None:
        """Store the prices of batches under their version. Raises DatabaseError."""
        row = {
            "version": self._prices.version,
            "document": self._prices.document.decode(),
            "created_at": self._wall_clock(),
        }
        with self._database.write() as connection:
            insert_new(connection, price_versions, [row])

    def claim(self, held: Collection[str]) -> BatchRecord | None:
        """Take the oldest batch that nobody works on. `held`: tenants whose batches have to wait.

        None also where another process took it at the same moment.
        """
        now_s = self._wall_clock()
        is_free = batches.c.status.in_(OPEN) & (batches.c.owned_until < now_s)
        oldest = (
            select(batches.c.id)
            .where(is_free, batches.c.tenant.not_in(tuple(held)))
            .order_by(batches.c.created_at)
            .limit(1)
        )
        with self._database.read() as connection:  # which keeps nobody from writing
            batch_id = connection.execute(oldest).scalar()
        if batch_id is None:
            return None
        mine = {"owner": self._owner, "owned_until": now_s + LEASE_S}
        with self._database.write() as connection:
            taken = update(batches).where(batches.c.id == batch_id, is_free).values(mine)
            return _read(connection, batch_id) if connection.execute(taken).rowcount else None

    def renew(self) -> dict[str, BatchRecord]:
        """Extend all leases of this process, and return the batches by id."""
        is_own = (batches.c.owner == self._owner) & batches.c.status.in_(OPEN)
        until_s = self._wall_clock() + LEASE_S
        with self._database.write() as connection:
            connection.execute(update(batches).where(is_own).values(owned_until=until_s))
            rows = connection.execute(select(batches).where(is_own)).mappings().all()
        return {row["id"]: BatchRecord(**row) for row in rows}

    def release(self, batch_id: str, after_s: float = 0.0) -> None:
        """Let another process go on with a batch, or this one, so much later."""
        values = {"owner": None, "owned_until": self._wall_clock() + after_s}
        with self._database.write() as connection:
            connection.execute(update(batches).where(self._is_mine(batch_id)).values(values))

    def update(self, batch_id: str, was: str, **values: Any) -> BatchRecord:
        """Change a batch that is in the state `was`, and return it as it is then.

        Raises LeaseLostError.
        """
        mine = self._is_mine(batch_id)
        with self._database.write() as connection:
            connection.execute(update(batches).where(mine, batches.c.status == was).values(values))
            found = connection.execute(select(batches).where(mine)).mappings().first()
        if found is None:
            raise LeaseLostError(batch_id)
        return BatchRecord(**found)

    def done_lines(self, batch_id: str) -> set[int]:
        """Return the lines whose requests are over."""
        wanted = select(batch_results.c.line).where(batch_results.c.batch_id == batch_id)
        with self._database.read() as connection:
            return set(connection.execute(wanted).scalars())

    def commit(self, batch_id: str, result: LineResult) -> None:
        """Store a result with its ledger's rows: all of it or, with LeaseLostError, nothing."""
        told = [row for row in result.rows if row.charge_nanos or row.num_charged_tokens]
        counted = {name: sum(getattr(row, name) for row in told) for name in _USAGE}
        counted["num_failed" if result.is_error else "num_completed"] = 1
        values = {name: batches.c[name] + number for name, number in counted.items()}
        stored = {
            "batch_id": batch_id,
            "line": result.line,
            "is_error": result.is_error,
            "result": result.result,
        }
        try:
            with self._database.write() as connection:
                self._change(connection, batch_id, values)
                connection.execute(insert(batch_results), [stored])
                self._ledger.store_in(connection, result.rows)
        except IntegrityError as error:
            raise LeaseLostError(batch_id) from error

    def results(self, batch_id: str, *, is_error: bool) -> Iterator[list[str]]:
        """Yield the lines of a file, some at a time, in the order of the input's."""
        last = -1
        own = (batch_results.c.batch_id == batch_id) & (batch_results.c.is_error == is_error)
        wanted = select(batch_results.c.line, batch_results.c.result).order_by(batch_results.c.line)
        while True:
            more = wanted.where(own, batch_results.c.line > last).limit(_RESULTS_AT_ONCE)
            with self._database.read() as connection:
                rows = connection.execute(more).all()
            if not rows:
                return
            last = rows[-1].line
            yield [row.result for row in rows]

    def finish(self, batch_id: str, written: Sequence[FileRecord], **values: Any) -> BatchRecord:
        """End a batch whose files are written. Raises LeaseLostError."""
        with self._database.write() as connection:
            self._change(connection, batch_id, values)
            if written:
                connection.execute(
                    insert(files), [msgspec.structs.asdict(each) for each in written]
                )
            connection.execute(delete(batch_results).where(batch_results.c.batch_id == batch_id))
            is_it = batches.c.id == batch_id
            connection.execute(update(batches).where(is_it).values(owner=None, owned_until=0.0))
            return _read(connection, batch_id)

    def _is_mine(self, batch_id: str) -> ColumnElement[bool]:
        return (batches.c.id == batch_id) & (batches.c.owner == self._owner)

    def _change(self, connection: Connection, batch_id: str, values: dict[str, Any]) -> None:
        """Change a batch that is not over. Raises LeaseLostError."""
        is_going_on = self._is_mine(batch_id) & batches.c.status.in_(OPEN)
        if not connection.execute(update(batches).where(is_going_on).values(values)).rowcount:
            raise LeaseLostError(batch_id)


def _read(connection: Connection, batch_id: str) -> BatchRecord:
    found = connection.execute(select(batches).where(batches.c.id == batch_id))
    return BatchRecord(**found.mappings().one())
