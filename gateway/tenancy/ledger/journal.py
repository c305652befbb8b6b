"""Files that keep the ledger's rows until the database has them, even if the process dies.

A process appends its rows to a segment: a header, then records of length, checksum and row. Data
taken by the operating system survives the process's death, but not the machine's: nothing is
synced. A sealed segment grows no more; once its rows are in the database it is deleted.

Each process holds a lock on a file of its own while it lives. A process that can take the lock of
another one knows that it is dead, and takes over its files.
"""

import fcntl
import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from outrider.gateway.settings.tree import Settings
from outrider.gateway.storage.database import Database
from outrider.gateway.storage.urls import state_folder
from outrider.gateway.tenancy.ledger.row import LedgerRow, fitted

logger = logging.getLogger(__name__)

_MAGIC: Final = b"outrider ledger 1\n"
_HEAD_BYTES: Final = 8
_MAX_RECORD_BYTES: Final = 1 << 16
_SEGMENT: Final = ".rows"
_LOCK: Final = ".lock"
_DAMAGED: Final = ".damaged"

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(LedgerRow)


class Journal:
    """The segments of this process. Not for several threads at once."""

    def __init__(self, folder: Path, nonce: Callable[[], str]) -> None:
        """Store the arguments. `nonce` draws a string that no other process has; again if it
        must."""
        self.folder = folder
        self._nonce = nonce
        self._name = ""
        self._lock = -1
        self._file = -1
        self._path: Path | None = None
        self._num_segments = 0
        self.size_bytes = 0
        """Size of the open segment; 0 if there is none."""

    @property
    def is_open(self) -> bool:
        """True if the folder exists and the lock is held."""
        return self._lock >= 0

    def open(self) -> None:
        """Make the folder and take a name in it. Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while not self.is_open:
            name = f"{os.getpid()}-{self._nonce()}"
            lock = _open_lock(self.folder / f"{name}{_LOCK}")
            if lock is not None:
                self._name, self._lock = name, lock

    def append(self, rows: Sequence[LedgerRow]) -> None:
        """Write rows, all or none. Raises OSError where they cannot be written."""
        data = b"".join(_record(row) for row in rows)
        if not self.is_open:
            self.open()
        if self._file < 0:
            self._begin_segment()
        try:
            _write_all(self._file, data)
        except OSError:
            self._undo()
            raise
        self.size_bytes += len(data)

    def sealed(self) -> list[Path]:
        """End the open segment, and list all of this process's that are not in the database."""
        self._seal()
        return _segments(self.folder, self._name) if self.is_open else []

    def close(self) -> None:
        """Give the name up. Segments that remain are for the next owner."""
        has_left_some = bool(self.sealed())
        if not self.is_open:
            return
        if not has_left_some:
            (self.folder / f"{self._name}{_LOCK}").unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def orphans(self) -> Iterator["Orphan"]:
        """Yield the journals of dead processes; the caller gives each back. Raises OSError."""
        left = (*self.folder.glob(f"*{_LOCK}"), *self.folder.glob(f"*{_SEGMENT}"))
        for name in sorted({path.name.partition(".")[0] for path in left}):
            if name == self._name:
                continue
            path = self.folder / f"{name}{_LOCK}"
            lock = _open_lock(path)
            if lock is not None:
                yield Orphan(lock, path, _segments(self.folder, name))

    def _begin_segment(self) -> None:
        self._num_segments += 1
        path = self.folder / f"{self._name}.{self._num_segments:08d}{_SEGMENT}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        try:
            _write_all(file, _MAGIC)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._file, self._path, self.size_bytes = file, path, len(_MAGIC)

    def _undo(self) -> None:
        """Cut off the remains of a failed write: half a record would hide those after it."""
        try:
            os.ftruncate(self._file, self.size_bytes)
        except OSError:
            self._seal()  # no record may follow it then

    def _seal(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path, self.size_bytes = -1, None, 0


class Orphan:
    """The journal of a dead process, locked against other processes until it is released."""

    def __init__(self, lock: int, lock_path: Path, segments: Sequence[Path]) -> None:
        self._lock = lock
        self._lock_path = lock_path
        self.segments = segments
        """The segments, in the order of writing."""

    def release(self) -> None:
        """Give it back: gone for good if all its segments are, else for a later try."""
        if not any(path.exists() for path in self.segments):
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def read_segment(path: Path) -> Iterator[LedgerRow]:
    """Yield the rows of a sealed or orphaned segment.

    A record that its process could not finish ends it: a lost machine or a full disk leaves such. A
    file that cannot be read for another reason is kept under another name, for a person to examine.
    Raises OSError where the file cannot be read.
    """
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
        if magic != _MAGIC:
            # Killed before the first row: the header, or a part of it.
            if not _MAGIC.startswith(magic):
                _set_aside(path, "it is not a journal of this version")
            return
        for payload in _payloads(file):
            try:
                yield _decoder.decode(payload)
            except msgspec.MsgspecError as error:  # a newer program's
                _keep(path, _framed(payload), str(error))
        at_bytes = file.tell()
        rest = path.stat().st_size - at_bytes
    if rest > _MAX_RECORD_BYTES:
        _set_aside(path, f"it is damaged behind byte {at_bytes}")
    elif rest:
        logger.warning("journal ends within a row file=%s lost_bytes=%d", path.name, rest)


def write_aside(folder: Path, row: LedgerRow, reason: str) -> None:
    """Keep a row that the database will never take. Raises OSError."""
    _keep(folder / "rejected", _record(row), reason)


def _payloads(file: BinaryIO) -> Iterator[bytes]:
    """Yield whole records until one is damaged. Stops in front of it."""
    while True:
        start = file.tell()
        head = file.read(_HEAD_BYTES)
        length = int.from_bytes(head[:4], "little")
        payload = file.read(length) if 0 < length <= _MAX_RECORD_BYTES else b""
        checksum = int.from_bytes(head[4:], "little")
        if not payload or len(payload) < length or zlib.crc32(payload) != checksum:
            file.seek(start)
            return
        yield payload


def _record(row: LedgerRow) -> bytes:
    try:
        record = _framed(_encoder.encode(row))
    except UnicodeEncodeError:  # half a character
        record = b""
    if 0 < len(record) <= _MAX_RECORD_BYTES:
        return record
    return _framed(_encoder.encode(fitted(row)))


def _framed(payload: bytes) -> bytes:
    checksum = zlib.crc32(payload)
    return len(payload).to_bytes(4, "little") + checksum.to_bytes(4, "little") + payload


def _set_aside(path: Path, reason: str) -> None:
    """Keep a whole segment out of the way."""
    kept = path.with_name(path.name + _DAMAGED)
    path.rename(kept)
    logger.error("journal cannot be read reason=%s kept=%s", reason, kept)


def _keep(path: Path, record: bytes, reason: str) -> None:
    """Keep one record out of the way, in a file like a segment."""
    kept = path.with_name(path.name + _DAMAGED)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    file = os.open(kept, flags, 0o600)
    try:
        is_new = os.fstat(file).st_size == 0
        _write_all(file, (_MAGIC if is_new else b"") + record)
    finally:
        os.close(file)
    logger.error("a row of the ledger is kept aside reason=%s kept=%s", reason, kept)


def _segments(folder: Path, name: str) -> list[Path]:
    """Return the segments in the order of writing."""
    return sorted(folder.glob(f"{name}.*{_SEGMENT}"))


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _open_lock(path: Path) -> int | None:
    """Open and lock the file; None where a living process holds the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    # Until it was locked, others might have taken it for a dead process's, and deleted it.
    if os.fstat(file).st_nlink == 0:
        os.close(file)
        return None
    return file


_SUFFIX: Final = ".ledger-journal"
_HASH_LENGTH: Final = 12


def journal_folder(settings: Settings, database: Database) -> Path:
    """Return the configured folder, or one beside the database or in the state folder.

    Each database has its own: rows never reach another one than they were written for.
    """
    if settings.ledger.journal is not None:
        return settings.ledger.journal.expanduser().absolute()
    return folder_beside(database, _SUFFIX)


def folder_beside(database: Database, suffix: str) -> Path:
    """Return a folder beside an SQLite database, else in the state folder."""
    if database.path is not None:
        return database.path.with_name(database.path.name + suffix)
    name = hashlib.sha256(database.name.encode()).hexdigest()[:_HASH_LENGTH]
    return state_folder() / f"{name}{suffix}"
