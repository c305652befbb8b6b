"""The replicas of a pool: they come, start, are watched, drain and go."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from outrider.engine.errors import EngineDiedError, EngineError
from outrider.engine.events import EngineInfo, EngineStats, TierInfo
from outrider.gateway.engines.fleet.candidates import Candidates
from outrider.gateway.engines.fleet.demand import Needs
from outrider.gateway.engines.fleet.fleet_stats import FleetStats, joined_info
from outrider.gateway.engines.fleet.replica import EngineReplica, OtherModelsError
from outrider.gateway.engines.fleet.replica_placement import LoadBoard
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 10.0
_STATS_TIMEOUT_S: Final = 1.0
_POLL_S: Final = 0.02  # while a replica drains
_LAST_WORD_S: Final = 10.0  # for answers that were told to move


class NoReplicaLeftError(EngineError):
    """A group of replicas cannot drain: no other has its models."""

    code = "no_replica_left"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """A replica in a few words. `reason`: why it takes no new requests; empty where it does."""

    name: str
    group: str
    is_up: bool
    is_draining: bool
    num_in_flight: int
    num_requests: int
    reason: str


class Roster:
    """Keeps a pool's replicas. `news` is set when one was taken in or refused.

    seen: the models that any replica has had.
    """

    def __init__(
        self,
        *,
        drain_timeout_s: float,
        move_off: Callable[[str], Awaitable[object]],
        hand_over: Callable[[EngineReplica], Awaitable[object]],
        on_arrival: Callable[[], None],
    ) -> None:
        """`move_off` has a replica's requests go on at others, `hand_over` its conversations.

        `on_arrival`: one was taken in.
        """
        self.replicas: dict[str, EngineReplica] = {}
        self.board = LoadBoard()
        self.candidates = Candidates(self.replicas)
        self.stats = FleetStats()
        self.news = asyncio.Event()
        self.seen: EngineInfo | None = None
        self._drain_timeout_s = drain_timeout_s
        self._move_off = move_off
        self._hand_over = hand_over
        self._on_arrival = on_arrival
        self._leaving: dict[EngineReplica, asyncio.Task[None]] = {}
        self._held_groups: set[str] = set()
        self._last_up: dict[Needs, float] = {}  # by the tiers of an engine

    def add(self, replica: EngineReplica) -> None:
        """Start a replica in the background. Raises ValueError where its name is taken."""
        if replica.name in self.replicas:
            raise ValueError(f"there is a replica {replica.name} already")
        self.replicas[replica.name] = replica
        replica.join(self.board)
        replica.starting = asyncio.create_task(self._bring_up(replica), name="replica-start")

    async def remove(self, name: str) -> None:
        """Have a replica drain, then close its client. Unknown names are ignored."""
        if (replica := self.replicas.get(name)) is None:
            return
        replica.is_leaving = True
        self.candidates.forget()
        if replica not in self._leaving:
            self._leaving[replica] = asyncio.create_task(self._drain(replica))
        await asyncio.shield(self._leaving[replica])

    async def close(self) -> None:
        """Close all replicas' clients."""
        self.news.set()
        tasks = list(self._leaving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(_close, self.replicas.values()))

    def states(self) -> list[ReplicaState]:
        """Describe the replicas."""
        return [
            ReplicaState(
                name=replica.name,
                group=replica.group,
                is_up=replica.is_up,
                is_draining=replica.is_draining,
                num_in_flight=replica.num_in_flight,
                num_requests=replica.num_requests,
                reason=_why_not(replica),
            )
            for replica in self.replicas.values()
        ]

    @property
    def takes_requests(self) -> bool:
        """True if any replica takes requests."""
        return any(each.is_up and not each.is_draining for each in self.replicas.values())

    def may_return(self, needs: Needs, within_s: float) -> bool:
        """Return whether a replica with these tiers took requests so lately: it may come back."""
        since_s = time.monotonic() - within_s
        return any(needs <= tiers and at_s > since_s for tiers, at_s in self._last_up.items())

    def _note_up(self, replica: EngineReplica) -> None:
        if replica.info is not None and not replica.is_draining:
            self._last_up[frozenset(replica.info.tiers)] = time.monotonic()

    def infos(self) -> list[EngineInfo]:
        """Return the models of all replicas that are in use."""
        return [
            replica.info
            for replica in self.replicas.values()
            if replica.info is not None and replica.refusal is None
        ]

    # ---- starting -------------------------------------------------------------------------

    async def _bring_up(self, replica: EngineReplica) -> None:
        """Start a replica's client, again and again while it cannot be reached."""
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await replica.client.start()
                self._take_in(replica, await replica.client.info())
                logger.info("replica is up name=%s group=%s", replica.name, replica.group)
            except EngineDiedError as error:
                logger.warning("replica=%s reason=%s retry_in_s=%g", replica.name, error, backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            except EngineError as error:
                replica.refusal = error
                logger.error("replica is not used name=%s reason=%s", replica.name, error)
            self.news.set()
            return

    def _take_in(self, replica: EngineReplica, info: EngineInfo) -> None:
        """Note a replica's models. Raises OtherModelsError where the pool has others."""
        for other in self.replicas.values():
            if other is replica or other.info is None or other.refusal is not None:
                continue
            for tier, own in info.tiers.items():
                theirs = other.info.tiers.get(tier)
                if theirs is not None and _checkpoint(theirs) != _checkpoint(own):
                    raise OtherModelsError(
                        f"replica {replica.name} has {_described(own)} as its {tier} model, but "
                        f"replica {other.name} has {_described(theirs)}. All replicas of a pool "
                        "serve the same checkpoints: start it with that one, or run a gateway of "
                        "its own for it."
                    )
        replica.take_info(info)
        replica.is_held = replica.group in self._held_groups
        self._note_up(replica)
        self.seen = info if self.seen is None else joined_info((info, self.seen))
        self.candidates.forget()
        self._on_arrival()

    async def is_as_known(self, replica: EngineReplica) -> bool:
        """Return whether a replica, which may have been restarted, still has the pool's models."""
        try:
            info = await replica.client.info()
            if info is not replica.info and info != replica.info:
                self._take_in(replica, info)
        except EngineDiedError:
            return False
        except EngineError as error:
            logger.error("replica is not used name=%s reason=%s", replica.name, error)
            replica.refusal = error
            return False
        return True

    # ---- draining -------------------------------------------------------------------------

    async def _drain(self, replica: EngineReplica) -> None:
        """Wait until a replica has no more requests, then close it."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._drain_timeout_s
        logger.info("replica drains name=%s in_flight=%d", replica.name, replica.num_in_flight)
        while replica.num_in_flight:  # of one that has ended, they end by themselves
            if loop.time() >= until_s:
                await self._move_off(replica.name)
                if loop.time() >= until_s + _LAST_WORD_S:
                    break
            await asyncio.sleep(_POLL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(until_s - loop.time(), _LAST_WORD_S)):
                await self._hand_over(replica)
        if replica.is_up:
            await self._read_stats_of(replica)  # what it has done still counts
        await _close(replica)
        self.stats.drop(replica.name)
        self.replicas.pop(replica.name, None)
        self.candidates.forget()
        replica.leave()
        self._leaving.pop(replica, None)
        logger.info("replica has gone name=%s", replica.name)

    def hold(self, group: str) -> list[EngineReplica]:
        """Have a group take no new requests, also those of it that come later; return it.

        Raises NoReplicaLeftError where a tier would be left with none that takes requests.
        """
        held = [each for each in self.replicas.values() if group and each.group == group]
        others = [
            each.info
            for each in self.replicas.values()
            if each not in held and each.info is not None and each.is_up and not each.is_draining
        ]
        for tier in _tiers(each.info for each in held if each.info is not None):
            if not any(tier in info.tiers for info in others):
                raise NoReplicaLeftError(
                    f"no replica of another group takes requests for the {tier} tier: start one "
                    "first"
                )
        self._held_groups.add(group)
        self._note_held(held)
        return held

    def distrust(self, replica: EngineReplica) -> None:
        """Have a replica whose answers are wrong take no new requests until it is released."""
        replica.distrust()
        self.candidates.forget()
        logger.error("replica is taken out, its answers are not the others' name=%s", replica.name)

    def release(self, group: str) -> list[EngineReplica]:
        """Have a group take requests again; return it."""
        self._held_groups.discard(group)
        freed = [each for each in self.replicas.values() if group and each.group == group]
        for replica in freed:
            replica.trust()
        self._note_held(freed)
        return freed

    def _note_held(self, group: list[EngineReplica]) -> None:
        for replica in group:
            replica.is_held = replica.group in self._held_groups
            logger.info("replica is_held=%s name=%s", replica.is_held, replica.name)
        self.candidates.forget()

    # ---- watching -------------------------------------------------------------------------

    async def read_stats(self) -> list[EngineReplica]:
        """Ask all replicas for a snapshot; return those that are up."""
        up = [replica for replica in self.replicas.values() if replica.is_up]
        for replica in up:
            self._note_up(replica)
        await asyncio.gather(*map(self._read_stats_of, up))
        return up

    async def _read_stats_of(self, replica: EngineReplica) -> None:
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                stats = await replica.client.stats()
        except (TimeoutError, EngineError):  # its last snapshot stands
            return
        self.stats.note(replica.name, stats)
        replica.note_stats(stats)

    def total(self, up: list[EngineReplica]) -> EngineStats:
        """Return the sum of all snapshots; of replicas that are not `up`, the counters only."""
        return self.stats.total(replica.name for replica in up)


async def _close(replica: EngineReplica) -> None:
    if replica.starting is not None:
        replica.starting.cancel()
        await asyncio.gather(replica.starting, return_exceptions=True)
    await replica.client.close()


def _tiers(infos: Iterable[EngineInfo]) -> set[Tier]:
    return {tier for info in infos for tier in info.tiers}


def _why_not(replica: EngineReplica) -> str:
    if replica.refusal is not None:
        return str(replica.refusal)
    if replica.is_distrusted:
        return "its answers are not those of all others (fleet.audit_removes_at)"
    if replica.is_draining:
        return "it drains"
    return "" if replica.is_up else replica.client.not_ready_reason


def _checkpoint(info: TierInfo) -> str:
    return info.fingerprint or info.model_id


def _described(info: TierInfo) -> str:
    return f"{info.model_id} ({info.fingerprint or 'no fingerprint'})"
