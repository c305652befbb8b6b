"""Keeps answers in this process's memory."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

_ENTRY_BYTES: Final = 1024
"""The approximate memory of an entry beside its answer."""


class KeptEntry(Protocol):
    """What is kept."""

    @property
    def num_bytes(self) -> int:
        """The size of its texts."""

    @property
    def owner(self) -> str:
        """Whose it is: owners have a bound of their own."""


Kept = TypeVar("Kept", bound=KeptEntry)


class MemoryStore(Generic[Kept]):
    """Drops what has expired, then what was used least recently. For one event loop.

    Where all memory is in use, the owner with most of it loses an entry: nobody can push out the
    entries of owners that use less.
    """

    def __init__(
        self,
        *,
        ttl_s: float,
        max_bytes: int,
        clock: Callable[[], float],
        max_bytes_per_owner: int | None = None,
    ) -> None:
        """`clock`: monotonic seconds."""
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._max_bytes_per_owner = min(max_bytes_per_owner or max_bytes, max_bytes)
        self._clock = clock
        self._owners: dict[bytes, str] = {}
        self._kept: dict[str, OrderedDict[bytes, tuple[float, Kept]]] = {}
        self._held: dict[str, int] = {}
        self.num_bytes = 0
        """The memory in use."""

    async def get(self, key: bytes) -> Kept | None:
        """Return the entry, unless it has expired."""
        owner = self._owners.get(key)
        if owner is None:
            return None
        expires_s, entry = self._kept[owner][key]
        if expires_s <= self._clock():
            self._drop(key)
            return None
        self._kept[owner].move_to_end(key)
        return entry

    async def put(self, key: bytes, entry: Kept) -> bool:
        """Keep an entry in place of older ones. Return whether there is room for it."""
        await self.delete(key)
        owner, needed = entry.owner, _needed(entry)
        if needed > self._max_bytes_per_owner:
            return False
        while self._held.get(owner, 0) + needed > self._max_bytes_per_owner:
            self._drop_oldest(owner)
        while self.num_bytes + needed > self._max_bytes:
            self._drop_oldest(max(self._held, key=self._held.__getitem__))
        self._owners[key] = owner
        self._kept.setdefault(owner, OrderedDict())[key] = (self._clock() + self._ttl_s, entry)
        self._count(owner, needed)
        return True

    async def delete(self, key: bytes) -> bool:
        """Forget an entry. Return whether it was there."""
        was_there = await self.get(key) is not None
        if was_there:
            self._drop(key)
        return was_there

    async def close(self) -> None:
        """Forget everything."""
        for key in list(self._owners):
            self._drop(key)

    def _drop_oldest(self, owner: str) -> None:
        self._drop(next(iter(self._kept[owner])))

    def _drop(self, key: bytes) -> None:
        owner = self._owners.pop(key)
        _, entry = self._kept[owner].pop(key)
        self._count(owner, -_needed(entry))
        if not self._kept[owner]:
            del self._kept[owner], self._held[owner]

    def _count(self, owner: str, num_bytes: int) -> None:
        self._held[owner] = self._held.get(owner, 0) + num_bytes
        self.num_bytes += num_bytes


def _needed(entry: KeptEntry) -> int:
    return entry.num_bytes + _ENTRY_BYTES
