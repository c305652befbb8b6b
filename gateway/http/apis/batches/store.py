"""Files and batches in the database, with contents in a folder, as clients ask for them."""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    delete,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)

from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    ConflictError,
    NotFoundError,
    RateLimitError,
)
from outrider.gateway.http.apis.batches.records import OPEN, BatchRecord, FileRecord
from outrider.gateway.settings.batches import BatchSettings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.tables import batch_results, batches, files

MAX_BATCHES: Final = 100
"""Batches of a tenant that are not over."""
Record = TypeVar("Record", FileRecord, BatchRecord)
_PARTS: Final = "parts"
_SPARE_S: Final = 86_400.0
"""A file that is so much older than files are kept was left by a process that was killed."""
_FILE_BYTES: Final = 4096
"""What a file takes beside its content."""
_MAX_QUOTED_CHARS: Final = 64
_ROWS_AT_ONCE: Final = 500
_FULL_RETRY_S: Final = 60.0


class BatchStore:
    """Blocks: in an event loop, use a thread. Safe for several threads and processes.

    What belongs to another tenant is answered as unknown. Files are for the gateway's user alone.
    """

    def __init__(
        self,
        database: Database,
        folder: Path,
        settings: BatchSettings,
        wall_clock: Callable[[], float],
    ) -> None:
        """`wall_clock`: seconds since 1970."""
        self.database = database
        self.folder = folder
        self.settings = settings
        self.wall_clock = wall_clock

    # ---- files

    def make_folder(self) -> None:
        """Make the folder. Raises OSError."""
        (self.folder / _PARTS).mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        """Return where a file of the database lies."""
        return self.folder / file_id

    @contextlib.contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Open a new file that is deleted unless `put` moves it to its place. Raises OSError."""
        part = self.folder / _PARTS / secrets.token_hex(16)
        try:
            with open(part, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                yield file
        finally:
            part.unlink(missing_ok=True)

    def put(self, file: BinaryIO, file_id: str) -> None:
        """Move a file that is written to its place. One of the same id is replaced."""
        file.flush()
        Path(file.name).replace(self.path(file_id))

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raise BadRequestError where a tenant has no room for a file of this size."""
        with self.database.read() as connection:
            self._check_room(connection, tenant, num_bytes + _FILE_BYTES)

    def add_file(self, record: FileRecord, file: BinaryIO) -> None:
        """Keep a file that was written. Raises BadRequestError where its tenant has no room."""
        self.put(file, record.id)
        try:
            with self.database.write() as connection:
                self._check_room(connection, record.tenant, record.num_bytes + _FILE_BYTES)
                connection.execute(insert(files), [msgspec.structs.asdict(record)])
        except BaseException:
            self._remove(record.id)
            raise

    def _check_room(self, connection: Connection, tenant: str, num_bytes: int) -> None:
        total = select(func.coalesce(func.sum(files.c.num_bytes + _FILE_BYTES), 0))
        held = int(connection.execute(total.where(files.c.tenant == tenant)).scalar_one())
        most = self.settings.max_bytes_per_tenant
        if held + num_bytes > most:
            raise BadRequestError(
                f"Your files may take {most:,} bytes in all, and {held:,} are taken. Delete files "
                "that you need no more.",
                param="file",
                code="storage_full",
            )

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file that has not expired. Raises NotFoundError."""
        found = self._one(files, tenant, file_id, files.c.expires_at > self.wall_clock())
        if found is None:
            raise NotFoundError(f"No such File object: {file_id[:_MAX_QUOTED_CHARS]}", param="id")
        return FileRecord(**found)

    def files(
        self, tenant: str, purpose: str | None, limit: int, after: str | None, *, is_rising: bool
    ) -> tuple[list[FileRecord], bool]:
        """Return a page of files, and whether more follow. Raises BadRequestError for `after`."""
        wanted = files.c.expires_at > self.wall_clock()
        if purpose is not None:
            wanted &= files.c.purpose == purpose
        return self._page(FileRecord, files, tenant, limit, after, wanted, is_rising=is_rising)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFoundError, or ConflictError while a batch needs it."""
        self.file(tenant, file_id)
        needed = select(batches.c.id).where(
            batches.c.input_file_id == file_id, batches.c.status.in_(OPEN)
        )
        with self.database.write() as connection:
            if (batch_id := connection.execute(needed.limit(1)).scalar()) is not None:
                raise ConflictError(f"{file_id} is the input of {batch_id}: cancel that first.")
            connection.execute(delete(files).where(files.c.id == file_id))
        self._remove(file_id)

    def _remove(self, *file_ids: str) -> None:
        for file_id in file_ids:
            self.path(file_id).unlink(missing_ok=True)

    # ---- batches

    def add_batch(self, record: BatchRecord) -> None:
        """Keep a new batch. Raises NotFoundError for its file, RateLimitError for too many."""
        if self.file(record.tenant, record.input_file_id).purpose != "batch":
            raise BadRequestError(
                "input_file_id: the purpose of the file must be batch.", param="input_file_id"
            )
        waiting = select(func.count()).where(
            batches.c.tenant == record.tenant, batches.c.status.in_(OPEN)
        )
        with self.database.write() as connection:
            self._check_room(connection, record.tenant, 0)
            if connection.execute(waiting).scalar_one() >= MAX_BATCHES:
                raise RateLimitError(
                    f"{MAX_BATCHES} of your batches are not over yet, and more may not be.",
                    retry_after_s=_FULL_RETRY_S,
                    code="batch_limit_exceeded",
                )
            connection.execute(insert(batches), [msgspec.structs.asdict(record)])

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises NotFoundError."""
        found = self._one(batches, tenant, batch_id)
        if found is None:
            shown = batch_id[:_MAX_QUOTED_CHARS]
            raise NotFoundError(f"No batch found with id '{shown}'.", param="batch_id")
        return BatchRecord(**found)

    def batches(self, tenant: str, limit: int, after: str | None) -> tuple[list[BatchRecord], bool]:
        """Return a page of batches, and whether more follow. Raises BadRequestError for `after`."""
        return self._page(BatchRecord, batches, tenant, limit, after)

    def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Have a batch end. Raises NotFoundError, or ConflictError where it ends anyway."""
        is_going_on = batches.c.status.in_(("validating", "in_progress"))
        self.batch(tenant, batch_id)
        with self.database.write() as connection:
            was_changed = connection.execute(
                update(batches)
                .where(batches.c.id == batch_id, is_going_on)
                .values(status="cancelling", cancelling_at=self.wall_clock())
            ).rowcount
        found = self.batch(tenant, batch_id)
        if not was_changed and found.status != "cancelling":
            raise ConflictError(f"Cannot cancel a batch with status '{found.status}'.")
        return found

    # ---- what has expired

    def sweep(self) -> int:
        """Delete what has expired, and what killed processes left; return the number of files."""
        now_s = self.wall_clock()
        kept_from_s = now_s - self.settings.ttl_s
        ends = ("completed_at", "failed_at", "expired_at", "cancelled_at")
        inputs = select(batches.c.input_file_id).where(batches.c.status.in_(OPEN))
        old = select(files.c.id).where(files.c.expires_at <= now_s, files.c.id.not_in(inputs))
        with self.database.write() as connection:
            connection.execute(
                delete(batches).where(or_(*(batches.c[end] < kept_from_s for end in ends)))
            )
            expired = connection.execute(old.limit(_ROWS_AT_ONCE)).scalars().all()
            connection.execute(delete(files).where(files.c.id.in_(expired)))
        self._remove(*expired)
        return len(expired) + self._remove_left_over(now_s)

    def erase(self, tenant: str) -> int:
        """Delete all of a tenant's; return the number of files and batches."""
        own = select(batches.c.id).where(batches.c.tenant == tenant)
        with self.database.write() as connection:
            connection.execute(delete(batch_results).where(batch_results.c.batch_id.in_(own)))
            count = connection.execute(delete(batches).where(batches.c.tenant == tenant)).rowcount
            is_own = files.c.tenant == tenant
            ids = connection.execute(select(files.c.id).where(is_own)).scalars().all()
            connection.execute(delete(files).where(is_own))
        self._remove(*ids)
        return count + len(ids)

    def _remove_left_over(self, now_s: float) -> int:
        count, letters = 0, "[0-9a-f]" * 32  # of others' files, if there are any, nothing is known
        for names, kept_s in (
            (f"file-{letters}*", self.settings.ttl_s),
            (f"{_PARTS}/{letters}", 0.0),
        ):
            for path in self.folder.glob(names):
                with contextlib.suppress(OSError):
                    is_old = now_s - path.stat().st_mtime > kept_s + _SPARE_S
                    if is_old and not self._is_known(path.name):
                        path.unlink()
                        count += 1
        return count

    def _is_known(self, file_id: str) -> bool:
        with self.database.read() as connection:
            found = connection.execute(select(files.c.id).where(files.c.id == file_id))
            return found.first() is not None

    # ---- rows

    def _one(
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
        kind: type[Record],
        table: Table,
        tenant: str,
        limit: int,
        after: str | None,
        *more: ColumnElement[bool],
        is_rising: bool = False,
    ) -> tuple[list[Record], bool]:
        wanted = select(table).where(table.c.tenant == tenant, *more)
        at, row_id = table.c.created_at, table.c.id
        if after is not None:
            if (last := self._one(table, tenant, after)) is None:
                told = f"after: there is no {after[:_MAX_QUOTED_CHARS]!r}."
                raise BadRequestError(told, param="after")
            place, reached = tuple_(at, row_id), (last["created_at"], last["id"])
            wanted = wanted.where(place > reached if is_rising else place < reached)
        order = (at, row_id) if is_rising else (at.desc(), row_id.desc())
        with self.database.read() as connection:
            rows = connection.execute(wanted.order_by(*order).limit(limit + 1)).mappings().all()
        return [kind(**row) for row in rows[:limit]], len(rows) > limit
