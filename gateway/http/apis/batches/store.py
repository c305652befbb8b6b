"""Files and batches in the database, with contents in a folder, as clients ask for them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Select, Table, delete, func, insert, or_, select
from sqlalchemy import update as changed

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    RateLimitError,
)
from outrider.gateway.http.apis.batches.folder import FileFolder
from outrider.gateway.http.apis.batches.objects import Purpose
from outrider.gateway.http.apis.batches.records import OPEN, BatchRecord, FileRecord
from outrider.gateway.settings.batches import BatchSettings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import batch_results, batches, files

Order = Literal["asc", "desc"]
Record = TypeVar("Record", FileRecord, BatchRecord)
_MAX_QUOTED_CHARS: Final = 64
_ROWS_AT_ONCE: Final = 500
_FULL_RETRY_S: Final = 60.0


class BatchStore:
    """Blocks: in an event loop, use a thread. Safe for several threads and processes.

    What belongs to another tenant is answered as unknown.
    """

    def __init__(
        self,
        database: Database,
        folder: FileFolder,
        settings: BatchSettings,
        wall_clock: Callable[[], float],
    ) -> None:
        """`wall_clock`: seconds since 1970."""
        self.database = database
        self.folder = folder
        self.settings = settings
        self.wall_clock = wall_clock

    # ---- files

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Path, BinaryIO]]:
        """Open a new file for `add_file`."""
        with self.folder.writing() as opened:
            yield opened

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raise BadRequestError where a tenant has no room for a file of this size."""
        with self.database.read() as connection:
            self._check_room(connection, tenant, num_bytes)

    def add_file(self, record: FileRecord, part: Path) -> None:
        """Keep a file that was written. Raises BadRequestError where its tenant has no room."""
        self.folder.put(part, record.id)
        try:
            with self.database.write() as connection:
                self._check_room(connection, record.tenant, record.num_bytes)
                connection.execute(insert(files), [msgspec.structs.asdict(record)])
        except BaseException:
            self.folder.remove(record.id)
            raise

    def _check_room(self, connection: Connection, tenant: str, num_bytes: int) -> None:
        total = select(func.coalesce(func.sum(files.c.num_bytes), 0))
        held = connection.execute(total.where(files.c.tenant == tenant)).scalar_one()
        most = self.settings.max_bytes_per_tenant
        if int(held) + num_bytes > most:
            raise BadRequestError(
                f"file: your files may have {most:,} bytes in all, and {int(held):,} are there. "
                "Delete files that you need no more.",
                param="file",
                code="storage_full",
            )

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file that has not expired. Raises NotFoundError."""
        lasts = files.c.expires_at > self.wall_clock()
        row = self._row(files, tenant, file_id, lasts)
        if row is None:
            raise NotFoundError(f"No such File object: {file_id[:_MAX_QUOTED_CHARS]}", param="id")
        return FileRecord(**row)

    def files(
        self, tenant: str, *, purpose: Purpose | None, limit: int, order: Order, after: str | None
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of files, and whether more follow. Raises BadRequestError for `after`."""
        wanted = select(files).where(
            files.c.tenant == tenant, files.c.expires_at > self.wall_clock()
        )
        if purpose is not None:
            wanted = wanted.where(files.c.purpose == purpose)
        return self._page(files, FileRecord, wanted, tenant, limit, order, after)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFoundError, or ConflictError while a batch needs it."""
        record = self.file(tenant, file_id)
        needed = select(batches.c.id).where(
            batches.c.input_file_id == record.id, batches.c.status.in_(OPEN)
        )
        with self.database.write() as connection:
            if (batch_id := connection.execute(needed.limit(1)).scalar()) is not None:
                raise ConflictError(f"{record.id} is the input of {batch_id}: cancel that first.")
            connection.execute(delete(files).where(files.c.id == record.id))
        self.folder.remove(record.id)

    # ---- batches

    def add_batch(self, record: BatchRecord) -> None:
        """Keep a new batch. Raises NotFoundError for its file, RateLimitError for too many."""
        used = self.file(record.tenant, record.input_file_id)
        if used.purpose != "batch":
            raise BadRequestError(
                "input_file_id: the purpose of the file must be batch.", param="input_file_id"
            )
        waiting = select(func.count()).where(
            batches.c.tenant == record.tenant, batches.c.status.in_(OPEN)
        )
        most = self.settings.max_batches_per_tenant
        with self.database.write() as connection:
            if connection.execute(waiting).scalar_one() >= most:
                raise RateLimitError(
                    f"{most:,} of your batches are not over yet, and more may not be.",
                    retry_after_s=_FULL_RETRY_S,
                    code="batch_limit_exceeded",
                )
            connection.execute(insert(batches), [msgspec.structs.asdict(record)])

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises NotFoundError."""
        row = self._row(batches, tenant, batch_id)
        if row is None:
            shown = batch_id[:_MAX_QUOTED_CHARS]
            raise NotFoundError(f"No batch found with id '{shown}'.", param="batch_id")
        return BatchRecord(**row)

    def batches(
        self, tenant: str, *, limit: int, after: str | None
    ) -> tuple[list[BatchRecord], bool]:
        """Return a page of batches, and whether more follow. Raises BadRequestError for `after`."""
        wanted = select(batches).where(batches.c.tenant == tenant)
        return self._page(batches, BatchRecord, wanted, tenant, limit, "desc", after)

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Have a batch end. Raises NotFoundError, or ConflictError where it ends anyway."""
        self.batch(tenant, batch_id)
        statement = (
            changed(batches)
            .where(batches.c.id == batch_id, batches.c.status.in_(("validating", "in_progress")))
            .values(status="cancelling", cancelling_at=self.wall_clock())
        )
        with self.database.write() as connection:
            was_changed = connection.execute(statement).rowcount == 1
        found = self.batch(tenant, batch_id)
        if not was_changed and found.status != "cancelling":
            raise ConflictError(f"Cannot cancel a batch with status '{found.status}'.")
        return found

    # ---- what has expired

    def sweep(self) -> int:
        """Delete what has expired, and what killed processes left; return the number of files."""
        now_s = self.wall_clock()
        kept_from_s = now_s - self.settings.ttl_s
        over = or_(
            *(
                batches.c[f"{status}_at"] < kept_from_s
                for status in ("completed", "failed", "expired", "cancelled")
            )
        )
        inputs = select(batches.c.input_file_id).where(batches.c.status.in_(OPEN))
        old = select(files.c.id).where(files.c.expires_at <= now_s, files.c.id.not_in(inputs))
        with self.database.write() as connection:
            connection.execute(delete(batches).where(over))
            expired = list(connection.execute(old.limit(_ROWS_AT_ONCE)).scalars())
            connection.execute(delete(files).where(files.c.id.in_(expired)))
        for file_id in expired:
            self.folder.remove(file_id)
        return len(expired) + self._remove_left_over(now_s)

    def erase(self, tenant: str) -> int:
        """Delete all of a tenant's; return the number of files and batches."""
        own = select(batches.c.id).where(batches.c.tenant == tenant)
        with self.database.write() as connection:
            results = delete(batch_results).where(batch_results.c.batch_id.in_(own))
            connection.execute(results)
            count = connection.execute(delete(batches).where(batches.c.tenant == tenant)).rowcount
            of_tenant = files.c.tenant == tenant
            ids = list(connection.execute(select(files.c.id).where(of_tenant)).scalars())
            connection.execute(delete(files).where(of_tenant))
        for file_id in ids:
            self.folder.remove(file_id)
        return count + len(ids)

    def _remove_left_over(self, now_s: float) -> int:
        found = {path.name: path for path in self.folder.left_over(now_s)}
        for names in _parts(list(found), _ROWS_AT_ONCE):
            with self.database.read() as connection:
                known = connection.execute(select(files.c.id).where(files.c.id.in_(names)))
                for name in known.scalars():
                    del found[name]
        for path in found.values():
            path.unlink(missing_ok=True)
        return len(found)

    # ---- rows

    def _row(
        self, table: Table, tenant: str, row_id: str, *more: ColumnElement[bool]
    ) -> dict[str, Any] | None:
        if not (row_id.isascii() and row_id.isprintable()):
            return None  # which not every database takes
        wanted = select(table).where(table.c.id == row_id, table.c.tenant == tenant, *more)
        with self.database.read() as connection:
            row = connection.execute(wanted).mappings().first()
        return None if row is None else dict(row)

    def _page(
        self,
        table: Table,
        kind: type[Record],
        wanted: Select[Any],
        tenant: str,
        limit: int,
        order: Order,
        after: str | None,
    ) -> tuple[list[Record], bool]:
        columns = (table.c.created_at, table.c.id)
        if after is not None:
            last = self._row(table, tenant, after)
            if last is None:
                raise BadRequestError(
                    f"after: there is no {after[:_MAX_QUOTED_CHARS]!r}.", param="after"
                )
            at, here = last["created_at"], last["id"]
            at_same = table.c.created_at == at
            beyond = (
                or_(table.c.created_at > at, at_same & (table.c.id > here))
                if order == "asc"
                else or_(table.c.created_at < at, at_same & (table.c.id < here))
            )
            wanted = wanted.where(beyond)
        sorting = [each.asc() if order == "asc" else each.desc() for each in columns]
        with self.database.read() as connection:
            rows = connection.execute(wanted.order_by(*sorting).limit(limit + 1)).mappings().all()
        found = [kind(**row) for row in rows[:limit]]
        return found, len(rows) > limit


def _parts(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
