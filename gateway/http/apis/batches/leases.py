"""Batches as the process that works on them reads and writes them.

One process works on a batch: its lease ends unless it is renewed. Whatever is written says whose
lease it is under, so a process that was away too long writes nothing more.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import delete, insert, not_, select
from sqlalchemy import update as changed
from sqlalchemy.exc import IntegrityError

from outrider.gateway.http.apis.batches.records import OPEN, BatchRecord, FileRecord
from outrider.gateway.storage.database import Database, insert_new
from outrider.gateway.storage.tables import batch_results, batches, files, price_versions
from outrider.gateway.tenancy.ledger.book import Ledger
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import LedgerRow

LEASE_S: Final = 15.0
_RESULTS_AT_ONCE: Final = 200


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

    def claim(self, held: Collection[str], *, is_idle: bool = True) -> BatchRecord | None:
        """Take the oldest batch that nobody works on; without idle capacity, of short work.

        `held`: tenants whose batches have to wait.
        """
        now_s = self._wall_clock()
        wanted = (
            select(batches)
            .where(
                batches.c.status.in_(OPEN),
                batches.c.owned_until < now_s,
                batches.c.tenant.not_in(tuple(held)),
            )
            .order_by(batches.c.created_at)
            .limit(1)
        )
        if not is_idle:
            is_long = (batches.c.status == "in_progress") & (batches.c.expires_at > now_s)
            wanted = wanted.where(not_(is_long))
        with self._database.read() as connection:  # which keeps nobody from writing
            if connection.execute(wanted).first() is None:
                return None
        with self._database.write() as connection:
            row = connection.execute(wanted.with_for_update(skip_locked=True)).mappings().first()
            if row is None:
                return None
            record = BatchRecord(**row)
            mine = {"owner": self._owner, "owned_until": now_s + LEASE_S}
            connection.execute(changed(batches).where(batches.c.id == record.id).values(mine))
        return msgspec.structs.replace(record, **mine)

    def renew(self) -> dict[str, BatchRecord]:
        """Extend all leases of this process, and return the batches by id."""
        is_own = (batches.c.owner == self._owner) & batches.c.status.in_(OPEN)
        until_s = self._wall_clock() + LEASE_S
        with self._database.write() as connection:
            connection.execute(changed(batches).where(is_own).values(owned_until=until_s))
            rows = connection.execute(select(batches).where(is_own)).mappings().all()
        return {row["id"]: BatchRecord(**row) for row in rows}

    def release(self, batch_id: str, after_s: float = 0.0) -> None:
        """Let another process go on with a batch, or this one, so much later."""
        mine = (batches.c.id == batch_id) & (batches.c.owner == self._owner)
        values = {"owner": None, "owned_until": self._wall_clock() + after_s}
        with self._database.write() as connection:
            connection.execute(changed(batches).where(mine).values(values))

    def update(
        self, batch_id: str, *, was: Collection[str] = OPEN, **values: Any
    ) -> BatchRecord | None:
        """Change a batch that is in one of the states `was`, and return it; None: it is in none.

        Raises LeaseLostError.
        """
        mine = (batches.c.id == batch_id) & (batches.c.owner == self._owner)
        with self._database.write() as connection:
            is_changed = connection.execute(
                changed(batches).where(mine, batches.c.status.in_(tuple(was))).values(values)
            ).rowcount
            row = connection.execute(select(batches).where(mine)).mappings().first()
        if row is None:
            raise LeaseLostError(batch_id)
        return BatchRecord(**row) if is_changed else None

    def done_lines(self, batch_id: str) -> set[int]:
        """Return the lines whose requests are over."""
        wanted = select(batch_results.c.line).where(batch_results.c.batch_id == batch_id)
        with self._database.read() as connection:
            return set(connection.execute(wanted).scalars())

    def commit(self, batch_id: str, results: Sequence[LineResult]) -> None:
        """Store results with their ledger's rows: all of it or, with LeaseLostError, nothing."""
        rows = [row for result in results for row in result.rows]
        told = [row for row in rows if row.charge_nanos or row.num_charged_tokens]
        sums = {
            "num_failed": sum(result.is_error for result in results),
            "num_completed": sum(not result.is_error for result in results),
            **{name: sum(getattr(row, name) for row in told) for name in _USAGE},
        }
        values = {name: batches.c[name] + number for name, number in sums.items()}
        mine = (batches.c.id == batch_id) & (batches.c.owner == self._owner)
        try:
            with self._database.write() as connection:
                statement = changed(batches).where(mine, batches.c.status.in_(OPEN))
                if connection.execute(statement.values(values)).rowcount != 1:
                    raise LeaseLostError(batch_id)
                stored = [
                    {
                        "batch_id": batch_id,
                        "line": each.line,
                        "is_error": each.is_error,
                        "result": each.result,
                    }
                    for each in results
                ]
                connection.execute(insert(batch_results), stored)
                self._ledger.store_in(connection, rows)
        except IntegrityError as error:
            raise LeaseLostError(batch_id) from error

    def results(self, batch_id: str, *, is_error: bool) -> Iterator[str]:
        """Yield the lines of a file, in the order of the input's."""
        last = -1
        while True:
            wanted = (
                select(batch_results.c.line, batch_results.c.result)
                .where(
                    batch_results.c.batch_id == batch_id,
                    batch_results.c.is_error == is_error,
                    batch_results.c.line > last,
                )
                .order_by(batch_results.c.line)
                .limit(_RESULTS_AT_ONCE)
            )
            with self._database.read() as connection:
                rows = connection.execute(wanted).all()
            for row in rows:
                last = row.line
                yield row.result
            if len(rows) < _RESULTS_AT_ONCE:
                return

    def finish(self, batch_id: str, written: Sequence[FileRecord], **values: Any) -> BatchRecord:
        """End a batch whose files are written. Raises LeaseLostError."""
        mine = (batches.c.id == batch_id) & (batches.c.owner == self._owner)
        values |= {"owner": None, "owned_until": 0.0}
        with self._database.write() as connection:
            statement = changed(batches).where(mine, batches.c.status.in_(OPEN)).values(values)
            if connection.execute(statement).rowcount != 1:
                raise LeaseLostError(batch_id)
            if written:
                connection.execute(
                    insert(files), [msgspec.structs.asdict(each) for each in written]
                )
            connection.execute(delete(batch_results).where(batch_results.c.batch_id == batch_id))
            row = connection.execute(select(batches).where(batches.c.id == batch_id))
            return BatchRecord(**row.mappings().one())


_USAGE: Final = (
    "num_prompt_tokens",
    "num_cached_tokens",
    "num_completion_tokens",
    "num_reasoning_tokens",
)
