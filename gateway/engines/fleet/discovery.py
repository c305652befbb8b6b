"""Addresses of replicas, which come and go: given ones, and those that names and pages tell."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from outrider.engine.errors import EngineError
from outrider.gateway.engines.fleet.addresses import FoundReplicas, Resolve, is_looked_up, resolve
from outrider.gateway.engines.fleet.answer_audits import AuditPolicy
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.demand import Demand, Needs
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica

logger = logging.getLogger(__name__)


class DiscoveredPool(EnginePool):
    """A pool whose replicas are those that the entries mean.

    An address that is no longer there is drained and forgotten; one that is there anew gets
    requests once it is up. A name that cannot be looked up changes nothing, but that no engine can
    be started by it.
    """

    def __init__(  # noqa: PLR0913 - all that a pool is made of
        self,
        entries: Iterable[str],
        make_replica: Callable[[str], EngineReplica],
        placement: CacheAware | None = None,
        *,
        resolve: Resolve = resolve,
        interval_s: float = 5.0,
        resume_within_s: float = 60.0,
        demand: Demand | None = None,
        audits: AuditPolicy | None = None,
    ) -> None:
        """`entries`: tcp://HOST:PORT, dns://NAME:PORT, http://HOST/. `interval_s`: of look-ups."""
        super().__init__(
            (), placement, resume_within_s=resume_within_s, demand=demand, audits=audits
        )
        self._entries = tuple(entries)
        self._make_replica = make_replica
        self._cache_aware = placement
        self._resolve = resolve
        self._interval_s = interval_s
        self._found: dict[str, FoundReplicas] = {}  # by entry
        self._known: set[str] = set()
        self._discovery: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Look the entries up; return when a first replica is up or can be started."""
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
            await self.demand.pause(self._interval_s)

    async def look_up(self) -> None:
        """Have the replicas be what the entries mean now."""
        asked_for = self.demand.wanted()
        for entry in self._entries:
            if not is_looked_up(entry):
                self._found[entry] = FoundReplicas(frozenset((entry,)))
                continue
            before = self._found.get(entry, FoundReplicas(frozenset()))
            try:
                self._found[entry] = await self._resolve(
                    entry, asked_for if before.startable else ()
                )
            except OSError as error:
                logger.warning("engines cannot be looked up entry=%s reason=%s", entry, error)
                self._found[entry] = FoundReplicas(before.addresses)
        startable = frozenset[Needs]().union(*(each.startable for each in self._found.values()))
        self.note_startable(startable)
        wanted = set[str]().union(*(each.addresses for each in self._found.values()))
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
            self._cache_aware.remove_lane(lane)

    async def _note_tiers(self) -> None:
        """Tell the placement which models' blocks there are, and how many an engine can have."""
        if self._cache_aware is None:
            return
        with contextlib.suppress(EngineError):  # none is up
            self._cache_aware.note_tiers((await self.info()).tiers)
        for replica in self._roster.replicas.values():
            if num_blocks := replica.num_blocks:
                self._cache_aware.index.limit_lane(replica.load.index_lane, num_blocks)
