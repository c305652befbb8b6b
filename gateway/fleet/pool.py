"""One `EngineClient` over many: requests are placed, and go on where their replica is lost."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Final

from engine.errors import EngineDiedError, EngineError, InvalidRequestError, TierUnavailableError
from engine.events import AdapterInfo, EngineEvent, EngineInfo, EngineStats, TierInfo
from engine.request import AdapterRef, EngineRequest, Tier
from gateway.backends.client import LOADING_REASON, OnEnd
from gateway.backends.crash_suspects import CrashSuspects
from gateway.fleet.candidates import Candidates, Wanted
from gateway.fleet.fleet_stats import FleetStats, joined_info
from gateway.fleet.flight import Flight
from gateway.fleet.placement import LeastWork, LoadBoard, Placement
from gateway.fleet.replica import OtherModelsError, Replica, needed_tiers

log = logging.getLogger(__name__)

MIN_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 10.0
_WATCH_S: Final = 1.0  # between two snapshots of a replica
_STATS_TIMEOUT_S: Final = 1.0
_POLL_S: Final = 0.02  # while a replica drains
_LAST_WORD_S: Final = 10.0  # for answers that were told to move

CLOSED_MESSAGE: Final = "The pool of engines is closed; make a new one."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """A replica in a few words. `reason`: why it takes no new requests; empty where it does."""

    name: str
    is_up: bool
    is_draining: bool
    num_in_flight: int
    num_requests: int
    reason: str


class EnginePool:
    """An `EngineClient` over replicas, which come and go.

    A request goes to the replica that `placement` chooses among those that have the tiers it needs.
    Where that one dies, drains or lacks the tier that the answer is handed to, another goes on with
    it behind what was received; only one with the same numerics continues an answer's tokens. A
    request that two replicas were lost with is refused (`CrashSuspects`): whether they died or only
    could not be reached is not waited for. The replicas' clients resume no requests themselves.
    """

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        placement: Placement | None = None,
        *,
        resume_within_s: float = 60.0,
        drain_timeout_s: float = 60.0,
    ) -> None:
        """`resume_within_s`: a request that has lost its replica waits so long for another.

        `drain_timeout_s`: a removed replica has so long to end its answers; the others move then.
        """
        self.resume_within_s = resume_within_s
        self.is_closed = False
        self.failovers: Counter[str] = Counter()
        self._drain_timeout_s = drain_timeout_s
        self._placement = LeastWork() if placement is None else placement
        self._replicas: dict[str, Replica] = {}
        self._board = LoadBoard()
        self._candidates = Candidates(self._replicas)
        self._leaving: dict[Replica, asyncio.Task[None]] = {}
        self._flights: dict[str, Flight] = {}
        self._stats = FleetStats()
        self._news = asyncio.Event()  # a replica was taken in or refused
        self._watcher: asyncio.Task[None] | None = None
        self._suspects = CrashSuspects()
        self._initial = list(replicas)

    # ---- replicas -------------------------------------------------------------------------

    def add(self, replica: Replica) -> None:
        """Start a replica in the background; it gets requests once it is up.

        Raises ValueError where its name is taken.
        """
        if replica.name in self._replicas:
            raise ValueError(f"there is a replica {replica.name} already")
        if self.is_closed:
            raise EngineDiedError(CLOSED_MESSAGE)
        self._replicas[replica.name] = replica
        replica.join(self._board)
        replica.starting = asyncio.create_task(self._bring_up(replica), name="replica-start")

    async def remove(self, name: str) -> None:
        """Take a replica out: it drains, then its client is closed. Unknown names are ignored.

        What it still answers at the end of `drain_timeout_s` moves to others, if any can take it.
        """
        if (replica := self._replicas.get(name)) is None:
            return
        replica.is_draining = True
        self._candidates.forget()
        if replica not in self._leaving:
            self._leaving[replica] = asyncio.create_task(self._drain(replica))
        await asyncio.shield(self._leaving[replica])

    def states(self) -> list[ReplicaState]:
        """Describe the replicas."""
        return [
            ReplicaState(
                name=replica.name,
                is_up=replica.is_up,
                is_draining=replica.is_draining,
                num_in_flight=replica.num_in_flight,
                num_requests=replica.num_requests,
                reason=_why_not(replica),
            )
            for replica in self._replicas.values()
        ]

    async def _bring_up(self, replica: Replica) -> None:
        """Start a replica's client, again and again while it cannot be reached."""
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await replica.client.start()
                self._take_in(replica, await replica.client.info())
                log.info("replica is up name=%s", replica.name)
            except EngineDiedError as error:
                log.warning("replica=%s reason=%s retry_in_s=%g", replica.name, error, backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            except EngineError as error:
                replica.refusal = error
                log.error("replica is not used name=%s reason=%s", replica.name, error)
            self._news.set()
            return

    def _take_in(self, replica: Replica, info: EngineInfo) -> None:
        """Note a replica's models. Raises OtherModelsError where the pool has others."""
        for other in self._replicas.values():
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
        replica.info, replica.refusal = info, None
        self._candidates.forget()

    async def _drain(self, replica: Replica) -> None:
        """Wait until a replica has no more requests, then close it."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._drain_timeout_s
        log.info("replica drains name=%s in_flight=%d", replica.name, replica.num_in_flight)
        while replica.num_in_flight:  # of one that has ended, they end by themselves
            if loop.time() >= until_s:
                await self.move_off(replica.name)
                if loop.time() >= until_s + _LAST_WORD_S:
                    break
            await asyncio.sleep(_POLL_S)
        if replica.is_up:
            await self._read_stats_of(replica)  # what it has done still counts
        await self._close_replica(replica)
        self._stats.drop(replica.name)
        self._replicas.pop(replica.name, None)
        self._candidates.forget()
        replica.leave()
        self._leaving.pop(replica, None)
        log.info("replica has gone name=%s", replica.name)

    async def move_off(self, name: str, num_requests: int | None = None) -> int:
        """Have requests of a replica go on at others, all of them by default; return how many."""
        moving = [
            flight
            for flight in self._flights.values()
            if flight.replica is not None and flight.replica.name == name and flight.can_move()
        ][:num_requests]
        for flight in moving:
            await flight.move("moved")
        return len(moving)

    async def _close_replica(self, replica: Replica) -> None:
        if replica.starting is not None:
            replica.starting.cancel()
            await asyncio.gather(replica.starting, return_exceptions=True)
        await replica.client.close()

    async def _watch(self) -> None:
        """Keep the replicas' loads up to date."""
        while True:
            await self._read_stats()
            await asyncio.sleep(_WATCH_S)

    async def _read_stats(self) -> list[Replica]:
        """Ask all replicas for a snapshot; return those that are up."""
        up = [replica for replica in self._replicas.values() if replica.is_up]
        await asyncio.gather(*map(self._read_stats_of, up))
        return up

    async def _read_stats_of(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                stats = await replica.client.stats()
        except (TimeoutError, EngineError):  # its last snapshot stands
            return
        self._stats.note(replica.name, stats)
        replica.note_stats(stats)

    # ---- an engine client -----------------------------------------------------------------

    async def start(self) -> None:
        """Start the replicas; return when the first of them is up.

        Those that cannot be reached are tried again. Raises the first one's error where none can be
        used.
        """
        initial, self._initial = self._initial, []
        for replica in initial:
            self.add(replica)
        while not self.is_ready:
            if self.is_closed:
                raise EngineDiedError(CLOSED_MESSAGE)
            replicas = list(self._replicas.values())
            refusals = [replica.refusal for replica in replicas if replica.refusal is not None]
            if replicas and len(refusals) == len(replicas):
                raise refusals[0]
            self._news.clear()
            await self._news.wait()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="pool-watcher")

    async def close(self) -> None:
        """Close all replicas. In-flight requests end with `Failed`. May be called again."""
        self.is_closed = True
        self._news.set()
        tasks = [*self._leaving.values(), *filter(None, (self._watcher,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._close_replica, self._replicas.values()))

    @property
    def is_ready(self) -> bool:
        """True if a replica takes requests."""
        return not self.is_closed and any(map(_takes_requests, self._replicas.values()))

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while no replica takes requests."""
        return f"None of {len(self._replicas)} engine replicas takes requests now. {LOADING_REASON}"

    async def info(self) -> EngineInfo:
        """Return the tiers of all replicas. Raises EngineDiedError where none is known."""
        infos = [
            replica.info
            for replica in self._replicas.values()
            if replica.info is not None and replica.refusal is None
        ]
        if not infos:
            raise EngineDiedError(self.not_ready_reason)
        return joined_info(infos)

    def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncIterator[EngineEvent]:
        """Place a request and stream its events, whichever replicas they come from."""
        return Flight(request, on_end, self).events()

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Hand a running request to another tier, maybe of another replica. Unknown: ignored."""
        if (flight := self._flights.get(request_id)) is not None:
            await flight.switch_tier(tier, keeps_answer=keeps_answer)

    async def settle(self, request_id: str) -> None:
        """Leave the answer with its tier. Unknown ids are ignored."""
        if (flight := self._flights.get(request_id)) is not None:
            await flight.settle()

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is. Unknown ids are ignored."""
        if (flight := self._flights.get(request_id)) is not None:
            await flight.abort()

    async def prepare_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """Have every replica of the adapter's tier read it.

        Raises InvalidAdapterError where one of them cannot, EngineDiedError where there is none.
        """
        able = [
            replica.client.prepare_adapter(ref)
            for replica in self._replicas.values()
            if replica.is_up and replica.info is not None and ref.tier in replica.info.tiers
        ]
        outcomes = await asyncio.gather(*able, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # One that died meanwhile reads the adapter with its first request.
        infos = [outcome for outcome in outcomes if isinstance(outcome, AdapterInfo)]
        fatal = [error for error in errors if not isinstance(error, EngineDiedError)]
        if fatal or not infos:
            raise next(iter(fatal or errors), EngineDiedError(self.not_ready_reason))
        return infos[0]

    async def stats(self) -> EngineStats:
        """Return the sum of all replicas' snapshots. Raises EngineDiedError when none is up."""
        up = await self._read_stats()
        if not up:
            raise EngineDiedError(self.not_ready_reason)
        return self._stats.total(replica.name for replica in up)

    # ---- placing (`Fleet`) ----------------------------------------------------------------

    def enter(self, flight: Flight) -> None:
        """Take in a request that begins."""
        if flight.request_id in self._flights:
            raise InvalidRequestError(
                f"request_id={flight.request_id!r} is in use by a running request"
            )
        self._suspects.check(flight.request)
        self._flights[flight.request_id] = flight

    def leave(self, flight: Flight) -> None:
        """Forget a request that has ended."""
        if self._flights.get(flight.request_id) is flight:
            del self._flights[flight.request_id]

    async def place(self, wanted: Wanted) -> Replica | None:
        """Choose the replica for a request; None where there is none now."""
        while (able := self._candidates.of(wanted)).replicas:
            loads = self._board.take(able.columns)
            replica = able.replicas[self._placement.choose(wanted.request, loads)]
            is_there = replica.is_up and (wanted.has_begun or not replica.is_draining)
            if is_there and await self._is_as_known(replica):
                return replica
            self._candidates.forget()
            wanted = replace(wanted, refused=wanted.refused | {replica})
        return None

    def can_place(self, wanted: Wanted) -> bool:
        """Return whether there is a replica for a request."""
        return bool(self._candidates.of(wanted).replicas)

    async def _is_as_known(self, replica: Replica) -> bool:
        """Return whether a replica, which may have been restarted, still has the pool's models."""
        try:
            info = await replica.client.info()
            if info is not replica.info and info != replica.info:
                self._take_in(replica, info)
        except EngineDiedError:
            return False
        except EngineError as error:
            log.error("replica is not used name=%s reason=%s", replica.name, error)
            replica.refusal = error
            return False
        return True

    def num_uncached_tokens(self, request: EngineRequest) -> int:
        """Return the prompt tokens that the chosen replica is to compute."""
        num_tokens = len(request.prompt_token_ids) + len(request.resumed_token_ids or ())
        return max(num_tokens - self._placement.expected_hit(request.request_id), 1)

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        """Hear that a replica has computed a prompt."""
        self._placement.note_prefill(request_id, num_cached_tokens)

    def note_departure(self, request_id: str) -> None:
        """Hear that a request is no longer at its replica."""
        self._placement.note_end(request_id)

    def note_loss(self, replica: Replica) -> None:
        """Count a replica's end, once for all requests that it had."""
        lost = [flight for flight in self._flights.values() if flight.has_lost(replica)]
        flags = self._suspects.note_death(flight.request for flight in lost)
        for flight, is_suspect in zip(lost, flags, strict=True):
            flight.note_loss(is_suspect=is_suspect)

    def acquit(self, request: EngineRequest) -> None:
        """Hear that a request was served to its end."""
        self._suspects.acquit(request)

    def note_failover(self, reason: str) -> None:
        """Count a request that goes on at another replica."""
        self.failovers[reason] += 1

    def unplaced(self, request: EngineRequest) -> EngineError:
        """Return why there is no replica for a new request."""
        needed = needed_tiers(request)
        infos = [replica.info for replica in self._replicas.values() if replica.info is not None]
        if infos and not any(all(tier in info.tiers for tier in needed) for info in infos):
            together = " and ".join(needed)
            return TierUnavailableError(
                f"no engine replica has the {together} tier"
                + (" in one engine, as a cascade needs" if len(needed) > 1 else "")
            )
        return EngineDiedError(self.not_ready_reason)


def _takes_requests(replica: Replica) -> bool:
    return replica.is_up and not replica.is_draining


def _why_not(replica: Replica) -> str:
    if replica.refusal is not None:
        return str(replica.refusal)
    if replica.is_draining:
        return "it drains"
    return "" if replica.is_up else replica.client.not_ready_reason


def _checkpoint(info: TierInfo) -> str:
    return info.fingerprint or info.model_id


def _described(info: TierInfo) -> str:
    return f"{info.model_id} ({info.fingerprint or 'no fingerprint'})"
