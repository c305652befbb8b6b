"""Addresses of replicas, which come and go: given ones, and those that names and pages tell."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from engine.errors import EngineError
from gateway.fleet.cache_aware import CacheAware
from gateway.fleet.pool import EnginePool
from gateway.fleet.replica import Replica

log = logging.getLogger(__name__)

DNS: Final = "dns://"
"""In front of NAME:PORT: all addresses of the name."""

LISTS: Final = ("http://", "https://")
"""A page that lists addresses as {"replicas": [...]}, as `outrider fleet` has one."""

_LIST_TIMEOUT_S: Final = 5.0
_MOST_LIST_BYTES: Final = 2**20
_ADDRESS: Final = re.compile(r"tcp://[\w.:\[\]-]{1,255}:\d{1,5}", re.ASCII)

Resolve = Callable[[str], Awaitable[set[str]]]
"""Returns the addresses that an entry means now. Raises OSError where that cannot be found out."""


def is_looked_up(entry: str) -> bool:
    """True for an entry that means any number of addresses, now these and later those."""
    return entry.startswith((DNS, *LISTS))


async def resolve(entry: str) -> set[str]:
    """Look a name up, or read a list, as `Resolve` says."""
    if entry.startswith(LISTS):
        return await asyncio.to_thread(_read_list, entry)
    host, _, port = entry.removeprefix(DNS).rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {
        f"tcp://[{address[0]}]:{port}"
        if family == socket.AF_INET6
        else f"tcp://{address[0]}:{port}"
        for family, _, _, _, address in found
    }


def _read_list(url: str) -> set[str]:
    """Read a list of addresses. Raises OSError where it is not one."""
    with urllib.request.urlopen(url, timeout=_LIST_TIMEOUT_S) as response:
        body = response.read(_MOST_LIST_BYTES + 1)
    try:
        addresses = json.loads(body[:_MOST_LIST_BYTES])["replicas"]
        if all(_ADDRESS.fullmatch(address) for address in addresses):
            return set(addresses)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise OSError("it is no list of addresses")


class DiscoveredPool(EnginePool):
    """A pool whose replicas are those that the entries mean.

    An address that is no longer there is drained and forgotten; one that is there anew gets
    requests once it is up. A name that cannot be looked up changes nothing.
    """

    def __init__(
        self,
        entries: Iterable[str],
        make_replica: Callable[[str], Replica],
        placement: CacheAware | None = None,
        *,
        resolve: Resolve = resolve,
        interval_s: float = 5.0,
        resume_within_s: float = 60.0,
    ) -> None:
        """entries: tcp://HOST:PORT, dns://NAME:PORT, http://HOST/. interval_s: of look-ups."""
        super().__init__((), placement, resume_within_s=resume_within_s)
        self._entries = tuple(entries)
        self._make_replica = make_replica
        self._cache_aware = placement
        self._resolve = resolve
        self._interval_s = interval_s
        self._found: dict[str, set[str]] = {}  # by entry
        self._known: set[str] = set()
        self._discovery: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Look the entries up, and return when a first replica is up; goes on looking."""
        if self._discovery is None:
            self._discovery = asyncio.create_task(self._discover(), name="replica-discovery")
        await super().start()
        await self._note_tiers()

    async def close(self) -> None:
        """Close all replicas. May be called again."""
        tasks = [*self._removals, *filter(None, (self._discovery,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def _discover(self) -> None:
        while True:
            await self.look_up()
            await self._note_tiers()
            await asyncio.sleep(self._interval_s)

    async def look_up(self) -> None:
        """Have the replicas be what the entries mean now."""
        for entry in self._entries:
            if not is_looked_up(entry):
                self._found[entry] = {entry}
                continue
            try:
                self._found[entry] = await self._resolve(entry)
            except OSError as error:
                log.warning("engines cannot be looked up entry=%s reason=%s", entry, error)
        wanted = set[str]().union(*self._found.values())
        for address in sorted(wanted - self._known):
            with contextlib.suppress(ValueError):  # it still drains: next time
                self.add(self._make_replica(address))
                self._known.add(address)
        for address in sorted(self._known - wanted):
            self._known.remove(address)
            removal = asyncio.create_task(self._forget(address))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    async def _forget(self, address: str) -> None:
        """Drain a replica, and have the index forget it."""
        lane = self._roster.replicas[address].load.index_lane
        await self.remove(address)
        if self._cache_aware is not None:
            self._cache_aware.index.remove_lane(lane)

    async def _note_tiers(self) -> None:
        """Tell the placement which models' blocks there are, and how many an engine can have."""
        if self._cache_aware is None:
            return
        with contextlib.suppress(EngineError):  # none is up
            self._cache_aware.note_tiers((await self.info()).tiers)
        for replica in self._roster.replicas.values():
            if num_blocks := replica.num_blocks:
                self._cache_aware.index.limit_lane(replica.load.index_lane, num_blocks)
