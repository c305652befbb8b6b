"""Keeps answers in this process's memory."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from outrider.gateway.answering.caching.entry import CachedEntry

_ENTRY_BYTES: Final = 1024
"""The approximate memory of an entry beside its answer."""


class MemoryStore:
    """Drops what has expired, then what was used least recently. For one event loop."""

    def __init__(self, *, ttl_s: float, max_bytes: int, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[float, CachedEntry]] = OrderedDict()
        self.num_bytes = 0
        """The memory in use."""

    async def get(self, key: bytes) -> CachedEntry | None:
        """Return the entry, unless it has expired."""
        found = self._kept.get(key)
        if found is None:
            return None
        expires_s, entry = found
        if expires_s <= self._clock():
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return entry

    async def put(self, key: bytes, entry: CachedEntry) -> None:
        """Keep an entry in place of older ones."""
        if key in self._kept:
            self._drop(key)
        needed = entry.num_bytes + _ENTRY_BYTES
        if needed > self._max_bytes:
            return
        while self.num_bytes + needed > self._max_bytes:
            self._drop(next(iter(self._kept)))
        self._kept[key] = (self._clock() + self._ttl_s, entry)
        self.num_bytes += needed

    async def close(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.num_bytes = 0

    def _drop(self, key: bytes) -> None:
        _, entry = self._kept.pop(key)
        self.num_bytes -= entry.num_bytes + _ENTRY_BYTES
