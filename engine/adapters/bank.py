"""The adapters of one model that are resident: read beside the steps, least recently used out."""

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from outrider.engine.adapters.read_adapter import Adapter
from outrider.engine.errors import InvalidAdapterError
from outrider.engine.events import AdapterInfo
from outrider.engine.request import AdapterRef

ReadAdapter = Callable[[Path], Adapter]


@dataclass(eq=False, slots=True, kw_only=True)
class _Entry:
    """An adapter that is being read, or was; `num_users`: sequences that hold it."""

    future: "Future[Adapter]"
    is_resident: bool = False
    num_users: int = 0
    used_at: int = 0


class AdapterBank:
    """Adapters of one model, by `AdapterRef`; used from the engine's thread alone.

    An adapter that a sequence holds stays as it was read, whatever becomes of its folder; it is
    never put out. One at a time is read, or waits for room: there are at most `max_resident`, of
    `max_bytes`, and one more. `read`: raises InvalidAdapterError; called in a thread of its own.
    """

    def __init__(self, read: ReadAdapter, *, max_resident: int, max_bytes: int) -> None:
        self._read = read
        self._max_resident = max_resident
        self._max_bytes = max_bytes
        self._entries: dict[AdapterRef, _Entry] = {}
        self._clock = 0

    @property
    def num_resident(self) -> int:
        """Count the resident adapters."""
        return sum(1 for _ in self._resident())

    @property
    def num_bytes(self) -> int:
        """Bytes of the resident adapters."""
        return sum(entry.future.result().info.num_bytes for _, entry in self._resident())

    def is_available(self, ref: AdapterRef) -> bool:
        """True if `hold` would give it now: it is read, and there is room; others may have to go.

        Where it is not there, its reading begins, unless another one is under way. Raises
        InvalidAdapterError where it cannot be read; the next call tries again.
        """
        entry = self._entries.get(ref)
        if entry is None:
            if any(not other.is_resident for other in self._entries.values()):
                return False
            entry = self._entries[ref] = _Entry(future=Future())
            threading.Thread(
                target=_run, args=(self._read, Path(ref.folder), entry.future), daemon=True
            ).start()
        if entry.is_resident or not entry.future.done():
            return entry.is_resident
        if (error := entry.future.exception()) is not None:
            del self._entries[ref]
            # Not the exception itself, which would keep the frames that it came through.
            raise InvalidAdapterError(str(error))
        entry.is_resident = self._make_room(entry.future.result().info.num_bytes)
        return entry.is_resident

    def info(self, ref: AdapterRef) -> AdapterInfo:
        """Describe an adapter that is available."""
        return self._entries[ref].future.result().info

    def hold(self, ref: AdapterRef) -> Adapter:
        """Return an adapter that is available, and keep it until `release`."""
        entry = self._entries[ref]
        assert entry.is_resident, "ask is_available before"
        entry.num_users += 1
        self._touch(entry)
        return entry.future.result()

    def release(self, ref: AdapterRef) -> None:
        """A sequence holds it no longer."""
        entry = self._entries[ref]
        entry.num_users -= 1
        assert entry.num_users >= 0, f"{ref.name} was released twice"
        self._touch(entry)

    def keep_only(self, wanted: Collection[AdapterRef]) -> None:
        """Forget what was read in vain: it waits for room, and no request waits for it any more."""
        for ref, entry in list(self._entries.items()):
            if entry.future.done() and not entry.is_resident and ref not in wanted:
                del self._entries[ref]

    def _touch(self, entry: _Entry) -> None:
        self._clock += 1
        entry.used_at = self._clock

    def _resident(self) -> Iterator[tuple[AdapterRef, _Entry]]:
        return ((ref, entry) for ref, entry in self._entries.items() if entry.is_resident)

    def _make_room(self, num_bytes: int) -> bool:
        """Put out what no sequence holds until a newcomer has room; False where it has none."""
        unused = sorted(
            ((ref, entry) for ref, entry in self._resident() if not entry.num_users),
            key=lambda item: item[1].used_at,
        )
        spare = sum(entry.future.result().info.num_bytes for _, entry in unused)
        if (
            self.num_resident - len(unused) >= self._max_resident
            or self.num_bytes - spare + num_bytes > self._max_bytes
        ):
            return False
        for ref, _ in unused:
            if (
                self.num_resident < self._max_resident
                and self.num_bytes + num_bytes <= self._max_bytes
            ):
                break
            del self._entries[ref]
        return True


def _run(read: ReadAdapter, folder: Path, future: "Future[Adapter]") -> None:
    """Read in this thread; the future gets the adapter, or why there is none."""
    try:
        adapter = read(folder)
    except BaseException as error:  # noqa: BLE001 - it is the request's, not this thread's
        future.set_exception(error)
    else:
        future.set_result(adapter)
