"""Capture of prompts and answers on disk, and in traces. Off unless the settings want it.

One JSON object a line, a file a day (UTC), readable by the gateway's user only. A thread redacts
and writes; exchanges beyond its pace are dropped and counted, and no request waits for it.
"""

import asyncio
import contextlib
import datetime
import errno
import json
import logging
import os
import queue
import random
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter

from outrider.gateway.settings.telemetry import CaptureSettings
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.telemetry.answer_text import answer_of
from outrider.gateway.telemetry.content import content_attributes
from outrider.gateway.telemetry.dated_files import DatedFiles
from outrider.gateway.telemetry.redaction import redact_json
from outrider.gateway.telemetry.tracer import NULL_SPAN, Span

logger = logging.getLogger(__name__)

_MAX_PENDING: Final = 1000
_MAX_PENDING_BYTES: Final = 64 << 20
"""Bytes of requests and answers together that may wait for the disk."""
_MAX_CHARS: Final = 256 * 1024
"""Characters of a request; redaction of more would hold up the gateway."""
_MAX_ANSWER_BYTES: Final = 1 << 20
"""Bytes of an answer; a stream has some 200 for each token."""
_LOOK_FOR_OLD_S: Final = 600.0
_JOIN_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and its answer."""

    request_id: str
    endpoint: str
    ended_at: float
    """Seconds since 1970."""
    request: bytes
    """Its body, JSON as it came; empty where it was too large to be kept."""
    answer: bytes
    """A chat completion or a completion in OpenAI's form, as far as it was delivered: JSON, or the
    events of its stream."""
    is_private: bool
    is_kept: bool = True
    """Whether it goes on disk."""
    span: Span = NULL_SPAN
    """Gets the texts, and ends."""
    ended_s: float | None = None
    """The end, on the span's clock."""
    omitted_bytes: int = 0
    """The size of a request too large to be kept."""
    is_streamed: bool = False
    is_cut: bool = False
    """The answer was longer than the part kept."""
    key_id: str = ""
    tier: str = ""
    outcome: str = ""

    @property
    def num_bytes(self) -> int:
        """Return the approximate bytes held in memory."""
        return len(self.request) + len(self.answer)


class Capture(Protocol):
    """Keeps exchanges, or not."""

    shows_texts: bool
    """Whether spans get the texts of exchanges that are not private."""

    def wants(self, *, is_private: bool) -> bool:
        """Return whether to keep this request's texts. Call once a request; never True if
        private."""

    def offer(self, exchange: Exchange) -> None:
        """Keep an exchange. Never blocks, never raises."""

    async def close(self) -> None:
        """Write the waiting exchanges, for some seconds at most."""


class NullCapture:
    """Keeps no texts."""

    shows_texts = False

    def wants(self, *, is_private: bool) -> bool:
        """Return False."""
        return False

    def offer(self, exchange: Exchange) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


NULL_CAPTURE: Final[Capture] = NullCapture()


class Recording:
    """Gathers one answer while it is sent."""

    __slots__ = ("_num_bytes", "_parts", "is_cut")

    def __init__(self) -> None:
        self.is_cut = False
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        """Add one part, as far as there is room."""
        self._num_bytes += len(part)
        if self._num_bytes > _MAX_ANSWER_BYTES:
            self.is_cut = True
        else:
            self._parts.append(part)

    @property
    def answer(self) -> bytes:
        """Return the gathered bytes."""
        return b"".join(self._parts)


def build_capture(
    settings: CaptureSettings,
    registry: CollectorRegistry,
    *,
    rng: random.Random,
    wall_clock: Callable[[], float],
    shows_texts: bool = False,
) -> Capture:
    """Build the capture of the settings. Raises SettingsError for a folder that is not writable.

    `shows_texts`: spans get texts, too, or alone.
    """
    if settings.folder is not None:
        _make_writable(settings.folder)
    elif not shows_texts:
        return NULL_CAPTURE
    return JsonlCapture(settings, registry, rng=rng, wall_clock=wall_clock, shows_texts=shows_texts)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SettingsError(
            f"telemetry.capture.folder = {str(folder)!r} cannot be written: "
            f"{(error.strerror or str(error)).lower()}"
        ) from None


class JsonlCapture:
    """Writes exchanges to disk or to spans, and deletes old ones, from a thread of its own."""

    def __init__(
        self,
        settings: CaptureSettings,
        registry: CollectorRegistry,
        *,
        rng: random.Random,
        wall_clock: Callable[[], float],
        shows_texts: bool = False,
    ) -> None:
        """Store the arguments. `wall_clock`: seconds since 1970, for the age of files."""
        self.shows_texts = shows_texts
        self._settings = settings
        self._files = captured_files(settings.folder) if settings.folder else None
        self._rng = rng
        self._wall_clock = wall_clock
        self._pending: queue.Queue[Exchange | None] = queue.Queue(_MAX_PENDING)
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._is_closed = False
        self._has_failed = False
        self._is_torn = False
        counter = Counter(
            "outrider_captured", "Exchanges on disk, or not.", ["state"], registry=registry
        )
        self._written = counter.labels("written")
        self._dropped = counter.labels("dropped")
        self._failed = counter.labels("failed")
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def wants(self, *, is_private: bool) -> bool:
        """Draw whether to keep a request: the settings' share of those that are not private."""
        if self._files is None or is_private or self._is_closed:
            return False
        return self._rng.random() < self._settings.share

    def offer(self, exchange: Exchange) -> None:
        """Hand it to the thread, if that is not too far behind."""
        if exchange.is_private:
            logger.error("private request was offered request_id=%s", exchange.request_id)
        elif self._queued(exchange):
            return
        else:
            self._dropped.inc()
        exchange.span.end(exchange.ended_s)

    def _queued(self, exchange: Exchange) -> bool:
        if len(exchange.request) > _MAX_CHARS:  # it must not wait in memory only to be left out
            exchange = replace(exchange, request=b"", omitted_bytes=len(exchange.request))
        if not self._takes(exchange.num_bytes):
            return False
        try:
            self._pending.put_nowait(exchange)
        except queue.Full:
            self._takes(-exchange.num_bytes)
            return False
        return True

    def _takes(self, num_bytes: int) -> bool:
        """Count bytes that wait, or fewer; False where there would be too many."""
        with self._lock:
            has_room = self._pending_bytes + num_bytes <= _MAX_PENDING_BYTES
            if has_room:
                self._pending_bytes += num_bytes
        return has_room and not self._is_closed

    async def close(self) -> None:
        """Write the waiting exchanges."""
        if self._is_closed:
            return
        self._is_closed = True
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with contextlib.suppress(queue.Full):  # then it is stuck, and is left behind
            self._pending.put(None, timeout=_JOIN_TIMEOUT_S)
            self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        """Run the thread until None comes."""
        while True:
            exchange: Exchange | None = None
            try:
                if self._files is not None:
                    self._files.remove_old(self._wall_clock(), self._settings.retention_days)
                exchange = self._pending.get(timeout=_LOOK_FOR_OLD_S)
                if exchange is None:
                    return
                self._takes(-exchange.num_bytes)
                self._write(exchange)
            except queue.Empty:
                pass
            except Exception as error:  # noqa: BLE001 - whatever it is, the next one may go well
                self._note_failure(error)
            else:
                self._written.inc()
                self._has_failed = False

    def _note_failure(self, error: Exception) -> None:
        """Count it; say so once, until it goes well again."""
        self._failed.inc()
        if not self._has_failed:
            logger.error("capture failed error=%s", type(error).__name__)
        self._has_failed = True

    def _write(self, exchange: Exchange) -> None:
        try:
            document = self._document(exchange)
            if exchange.span is not NULL_SPAN:
                exchange.span.set(content_attributes(document["request"], document["answer"]))
        finally:
            exchange.span.end(exchange.ended_s)
        if exchange.is_kept and self._files is not None:
            self._append(self._files.at(exchange.ended_at), document)

    def _append(self, path: Path, document: dict[str, Any]) -> None:
        """Write one line, at once: another process may write to the same file."""
        line = json.dumps(document).encode("ascii") + b"\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(path, flags, 0o600)
        try:
            if stat.S_IMODE(os.fstat(file).st_mode) != 0o600:
                os.fchmod(file, 0o600)
            if self._is_torn:
                line = b"\n" + line  # the disk was full: half a line must not spoil this one
            self._is_torn = os.write(file, line) != len(line)
            if self._is_torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def _document(self, exchange: Exchange) -> dict[str, Any]:
        """Return the line's object."""
        moment = datetime.datetime.fromtimestamp(exchange.ended_at, datetime.UTC)
        request: Any
        if exchange.omitted_bytes:
            request = {"omitted_bytes": exchange.omitted_bytes}
        else:
            request = self._redacted(json.loads(exchange.request))
        answer = answer_of(exchange.answer, is_streamed=exchange.is_streamed)
        return {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "request_id": exchange.request_id,
            "key": exchange.key_id,
            "endpoint": exchange.endpoint,
            "tier": exchange.tier,
            "outcome": exchange.outcome,
            "request": request,
            "answer": [self._redacted(text) for text in answer],
            "is_cut": exchange.is_cut,
        }

    def _redacted(self, value: Any) -> Any:
        return redact_json(value) if self._settings.redact else value


def captured_files(folder: Path) -> DatedFiles:
    """Return the files of captured texts in a folder."""
    return DatedFiles(folder / "capture.jsonl")
