"""Threads that write extents to a folder, and read them, beside the engine's steps.

What is to be written waits in memory, within a bound; where the disk does not keep up, it is
dropped. No caller ever waits.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from outrider.engine.cache.extent_folder import ExtentFolder
from outrider.engine.cache.extent_space import ExtentSpace, StoredExtent
from outrider.engine.cache.extents import Extent, ExtentError

logger = logging.getLogger(__name__)

_MOST_QUEUED_BYTES: Final = 64 * 2**20
_NUM_READERS: Final = 2
_CLOSE_S: Final = 2.0
# A disk that could not be written is tried again after so long.
_PAUSE_S: Final = 30.0
_FIRST_BYTES_PER_S: Final = 500e6
_RATE_WEIGHT: Final = 0.2
_TOUCH_AGAIN_S: Final = 60.0


@dataclass(slots=True)
class StoreCounts:
    """What a store has done so far."""

    num_written_bytes: int = 0
    num_read_bytes: int = 0
    num_dropped: int = 0
    """Extents that were not written: no room in memory or in the budget."""
    num_failed: int = 0
    """Extents that the disk did not take or give."""
    num_damaged: int = 0
    """Extents that were not what had been written. None of them was used."""


class ExtentStore:
    """Writes and reads the extents of one folder."""

    def __init__(
        self,
        folder: ExtentFolder,
        *,
        most_queued_bytes: int = _MOST_QUEUED_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.counts = StoreCounts()
        self._most_queued_bytes = most_queued_bytes
        self._clock = clock
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._paused_until_s = 0.0
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="kv-read")
        self._writer = threading.Thread(target=self._run, name="kv-write", daemon=True)
        self._writer.start()

    @property
    def has_room(self) -> bool:
        """True if another extent may wait to be written."""
        return self._queued_bytes < self._most_queued_bytes

    @property
    def is_paused(self) -> bool:
        """True while a disk that could not be written is left alone."""
        return self._clock() < self._paused_until_s

    def read_s(self, num_bytes: int) -> float:
        """Return how long reading so much is likely to take."""
        return num_bytes / self._bytes_per_s

    @property
    def measured_bytes_per_s(self) -> float:
        """How fast extents were read of late; 0 before any was."""
        return self._bytes_per_s if self.counts.num_read_bytes else 0.0

    def write(self, space: ExtentSpace, extent: Extent) -> None:
        """Have an extent written, unless too much waits already."""
        if not self.has_room or self.is_paused:
            self.counts.num_dropped += 1
            return
        with self._lock:
            self._queued_bytes += extent.num_bytes
        self._work.put(lambda: self._write(space, extent))

    def touch(self, space: ExtentSpace, stored: list[StoredExtent]) -> None:
        """Have the extents noted as used, unless they were lately."""
        now_s = time.time()
        old = [each for each in stored if now_s - each.used_s > _TOUCH_AGAIN_S]
        if old:
            self._work.put(lambda: _touch(space, old))

    def read(self, space: ExtentSpace, stored: StoredExtent) -> "Future[Extent | None]":
        """Start to read an extent. The result is None where there is none that could be used."""
        return self._readers.submit(self._read, space, stored)

    def collect(self) -> None:
        """Have the folder cleaned up."""
        self._work.put(self.folder.collect)

    def run(self, work: Callable[[], object]) -> None:
        """Have something done behind what is written already."""
        self._work.put(work)

    def note_row_s(self, space: ExtentSpace, row_s: float) -> None:
        """Have what computing a token takes written beside a space's extents."""
        space.about = replace(space.about, row_s=row_s)
        self._work.put(space.write_about)

    def note_damaged(self, error: ExtentError) -> None:
        """Count an extent that is not what was written."""
        with self._lock:
            self.counts.num_damaged += 1
        logger.warning("keys and values are computed again reason=%s", error)

    def close(self) -> None:
        """Write what waits, for a moment, and end the threads."""
        self._work.put(None)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.join(timeout=_CLOSE_S)

    def flush(self) -> None:
        """Wait until all that was given is written, or dropped."""
        done = threading.Event()
        self._work.put(done.set)
        done.wait()

    # ---- in their threads -------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("an extent could not be written")

    def _write(self, space: ExtentSpace, extent: Extent) -> None:
        counts = self.counts
        try:
            if not self.is_paused and self.folder.write(space, extent):
                counts.num_written_bytes += extent.num_bytes
            else:
                counts.num_dropped += 1
        except OSError as error:
            counts.num_failed += 1
            self._paused_until_s = self._clock() + _PAUSE_S
            logger.warning(
                "keys and values are not written folder=%s reason=%s again_in_s=%d",
                self.folder.folder,
                error,
                _PAUSE_S,
            )
        finally:
            with self._lock:
                self._queued_bytes -= extent.num_bytes

    def _read(self, space: ExtentSpace, stored: StoredExtent) -> Extent | None:
        begun_s = self._clock()
        try:
            extent = space.read(stored)
        except FileNotFoundError:  # another engine, or the budget, removed it
            return None
        except OSError as error:
            self.counts.num_failed += 1
            logger.warning("keys and values cannot be read reason=%s", error)
            return None
        except ExtentError as error:
            self.note_damaged(error)
            return None
        except Exception:
            logger.exception("keys and values cannot be read")
            return None
        rate = extent.num_bytes / max(self._clock() - begun_s, 1e-6)
        with self._lock:
            self.counts.num_read_bytes += extent.num_bytes
            self._bytes_per_s += _RATE_WEIGHT * (rate - self._bytes_per_s)
        return extent


def _touch(space: ExtentSpace, stored: list[StoredExtent]) -> None:
    for each in stored:
        space.touch(each)
