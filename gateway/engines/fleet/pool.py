"""One `EngineClient` over many: requests are placed, and go on where their replica is lost."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from outrider.engine.errors import (
    EngineDiedError,
    EngineError,
    EngineNotStartedError,
    InvalidRequestError,
    TierUnavailableError,
)
from outrider.engine.events import AdapterInfo, EngineEvent, EngineInfo, EngineStats
from outrider.engine.request import AdapterRef, EngineRequest
from outrider.gateway.engines.backends.client import LOADING_REASON, OnEnd, PausedRequests
from outrider.gateway.engines.fleet.answer_audits import AnswerAudits, AuditPolicy
from outrider.gateway.engines.fleet.block_sources import BlockSources, Source
from outrider.gateway.engines.fleet.candidates import Wanted
from outrider.gateway.engines.fleet.demand import Demand, Needs
from outrider.gateway.engines.fleet.fleet_stats import joined_info
from outrider.gateway.engines.fleet.flight import Flight
from outrider.gateway.engines.fleet.handovers import Handovers
from outrider.gateway.engines.fleet.losses import Losses
from outrider.gateway.engines.fleet.replica import EngineReplica, needed_tiers
from outrider.gateway.engines.fleet.replica_attempt import ReplicaAttempt
from outrider.gateway.engines.fleet.replica_placement import LeastWork, Placement
from outrider.gateway.engines.fleet.roster import ReplicaState, Roster
from outrider.verifier.params import Tier

Outcome = TypeVar("Outcome")

_WATCH_S: Final = 1.0  # between two snapshots of a replica

CLOSED_MESSAGE: Final = "The pool of engines is closed; make a new one."


class EnginePool:
    """An `EngineClient` over replicas, which come and go.

    A request goes to the replica that `placement` chooses among those that have the tiers it needs.
    Where that one dies, drains or lacks the tier that the answer is handed to, another goes on with
    it behind what was received; only one with the same numerics continues an answer's tokens. A
    request that two replicas died with is refused (`Losses`). The replicas' clients resume no
    requests themselves.
    """

    def __init__(
        self,
        replicas: Iterable[EngineReplica] = (),
        placement: Placement | None = None,
        *,
        resume_within_s: float = 60.0,
        drain_timeout_s: float = 60.0,
        demand: Demand | None = None,
        audits: AuditPolicy | None = None,
    ) -> None:
        """`resume_within_s`: a request that has lost its replica waits so long for another, and a
        new one for a replica that was lost no longer ago.

        `drain_timeout_s`: a removed replica has so long to end its answers; the others move then.
        `demand`: bounds the requests that wait for an engine to be started. `audits`: none by
        default.
        """
        self.demand = Demand() if demand is None else demand
        self.resume_within_s = resume_within_s
        self.is_closed = False
        self.failovers: Counter[str] = Counter()
        self._placement = LeastWork() if placement is None else placement
        self._roster = Roster(
            drain_timeout_s=drain_timeout_s,
            move_off=self.move_off,
            hand_over=lambda replica: self.handovers.hand_over(replica),
            on_arrival=self.demand.note_change,
        )
        self.audits = AnswerAudits(audits or AuditPolicy(), self._roster)
        self._sources = BlockSources(self._roster.replicas, self._roster.board, self._placement)
        self.handovers = Handovers(self._roster.replicas, self)
        self._flights: dict[str, Flight] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._losses = Losses()
        self._initial = list(replicas)

    # ---- replicas -------------------------------------------------------------------------

    def add(self, replica: EngineReplica) -> None:
        """Start a replica in the background; it gets requests once it is up.

        Raises ValueError where its name is taken.
        """
        if self.is_closed:
            raise EngineDiedError(CLOSED_MESSAGE)
        self._roster.add(replica)

    async def remove(self, name: str) -> None:
        """Take a replica out: it drains, then its client is closed. Unknown names are ignored.

        What it still answers at the end of `drain_timeout_s` moves to others, if any can take it.
        """
        await self._roster.remove(name)

    def states(self) -> list[ReplicaState]:
        """Describe the replicas."""
        return self._roster.states()

    def drain(self, group: str) -> list[str]:
        """Send a group of replicas (`Replica.group`) no new requests; return their names.

        They stay connected and end their answers. Raises NoReplicaLeftError where no replica of
        another group takes requests for their tiers.
        """
        return [replica.name for replica in self._roster.hold(group)]

    def readmit(self, group: str) -> list[str]:
        """Send a group that drains requests again; return the names of its replicas."""
        return [replica.name for replica in self._roster.release(group)]

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

    async def _watch(self) -> None:
        """Keep what is known of the replicas up to date."""
        while True:
            await self._roster.read_stats()
            self._losses.take_back_survivors()
            await asyncio.sleep(_WATCH_S)

    # ---- an engine client -----------------------------------------------------------------

    async def start(self) -> None:
        """Start the replicas; return when the first of them is up, or can be started.

        Those that cannot be reached are tried again. Raises the first one's error where none can be
        used.
        """
        initial, self._initial = self._initial, []
        for replica in initial:
            self.add(replica)
        while not self.is_ready:
            if self.is_closed:
                raise EngineDiedError(CLOSED_MESSAGE)
            replicas = list(self._roster.replicas.values())
            refusals = [replica.refusal for replica in replicas if replica.refusal is not None]
            if replicas and len(refusals) == len(replicas):
                raise refusals[0]
            self._roster.news.clear()
            await self._roster.news.wait()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="pool-watcher")

    async def close(self) -> None:
        """Close all replicas. In-flight requests end with `Failed`. May be called again."""
        self.is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self.demand.note_change()
        await self.handovers.close()
        await self._roster.close()
        await self.audits.close()

    @property
    def is_ready(self) -> bool:
        """True if a replica takes requests, or one is started for them."""
        return not self.is_closed and (self._roster.takes_requests or bool(self.demand.startable))

    @property
    def is_paused(self) -> bool:
        """True if no replica takes requests, and one was lost so lately that it is waited for."""
        is_lost = not (self.is_closed or self.is_ready)
        return is_lost and self._roster.may_return(frozenset(), self.resume_within_s)

    @property
    def paused(self) -> PausedRequests:
        """New requests that wait for a replica."""
        return self.demand.paused

    @property
    def is_asleep(self) -> bool:
        """True if no replica takes requests, and the first request has one started."""
        return not self._roster.takes_requests and bool(self.demand.startable)

    def wake(self, tiers: Iterable[Tier]) -> None:
        """Have an engine of each tier started, where there is none, and do not wait for it."""
        for tier in tiers:
            self.demand.request_engine(frozenset((tier,)))

    def note_startable(self, startable: frozenset[Needs]) -> None:
        """Take in which engines are started when requests wait for them."""
        self.demand.startable = startable
        self._roster.news.set()

    async def until_known(self, tiers: Iterable[Tier]) -> None:
        """Return when each of these tiers was seen in a replica, where one can be started with it.

        Raises EngineNotStartedError, QueueFullError.
        """
        since_s = time.monotonic()
        unknown = [tier for tier in tiers if not self._knows(tier)]
        self.wake(unknown)
        for tier in unknown:
            needs, is_known = frozenset((tier,)), partial(self._knows, tier)
            if self.demand.can_start(needs) and not self.is_closed:
                await self.demand.wait_for(needs, is_known, since_s)

    def _knows(self, tier: Tier) -> bool:
        seen = self._roster.seen
        return self.is_closed or (seen is not None and tier in seen.tiers)

    @property
    def not_ready_reason(self) -> str:
        """Message for clients while no replica takes requests."""
        number = len(self._roster.replicas)
        return f"None of {number} engine replicas takes requests now. {LOADING_REASON}"

    async def info(self) -> EngineInfo:
        """Return the tiers of all replicas, and of those that can be started again.

        Raises EngineDiedError where none is known, EngineNotStartedError where none ever ran.
        """
        infos = self._roster.infos()
        if self.demand.startable and self._roster.seen is not None:
            infos.append(self._roster.seen)
        if infos:
            return joined_info(infos)
        if self.is_asleep:
            raise EngineNotStartedError("No engine has run yet; the first request has one started.")
        raise EngineDiedError(self.not_ready_reason)

    def submit(
        self, request: EngineRequest, on_end: OnEnd | None = None
    ) -> AsyncIterator[EngineEvent]:
        """Place a request and stream its events, whichever replicas they come from."""
        return Flight(request, on_end, self).events()

    async def switch_tier(self, request_id: str, tier: Tier, *, keeps_answer: bool = False) -> None:
        """Hand a running request to another tier, maybe of another replica. Unknown: ignored."""
        if (flight := self._flights.get(request_id)) is not None:
            await flight.switch_tier(tier, keeps_answer=keeps_answer)

    async def keep_on_tier(self, request_id: str) -> None:
        """Leave the answer with its tier. Unknown ids are ignored."""
        if (flight := self._flights.get(request_id)) is not None:
            await flight.keep_on_tier()

    async def abort(self, request_id: str) -> None:
        """End a request, wherever it is. Unknown ids are ignored."""
        if (flight := self._flights.get(request_id)) is not None:
            await flight.abort()

    async def pin(self, request: EngineRequest) -> None:
        """Have every replica of the request's tier compute and keep its prompt.

        Raises EngineError where one of them cannot, EngineDiedError where there is none.
        """
        self._require_all(
            await asyncio.gather(
                *(replica.client.pin(request) for replica in self._up(request.tier)),
                return_exceptions=True,
            )
        )

    async def unpin(self, tenant: str, name: str) -> None:
        """Have all replicas keep a tenant's prompt of this name no longer."""
        up = [replica for replica in self._roster.replicas.values() if replica.is_up]
        await asyncio.gather(*(replica.client.unpin(tenant, name) for replica in up))

    def num_up(self, tier: Tier) -> int:
        """Count the replicas that are up and have a tier."""
        return len(self._up(tier))

    def _up(self, tier: Tier) -> list[EngineReplica]:
        """Return the replicas that are up and have a tier."""
        return [
            replica
            for replica in self._roster.replicas.values()
            if replica.is_up and replica.info is not None and tier in replica.info.tiers
        ]

    def _require_all(self, outcomes: Sequence[Outcome | BaseException]) -> list[Outcome]:
        """Return what replicas did. Raises where one could not, or none is left.

        One that died meanwhile does it with its first request.
        """
        done = [each for each in outcomes if not isinstance(each, BaseException)]
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        fatal = [error for error in errors if not isinstance(error, EngineDiedError)]
        if fatal or not done:
            raise next(iter(fatal or errors), EngineDiedError(self.not_ready_reason))
        return done

    async def prepare_adapter(self, ref: AdapterRef) -> AdapterInfo:
        """Have every replica of the adapter's tier read it.

        Raises InvalidAdapterError where one of them cannot, EngineDiedError where there is none.
        """
        able = [replica.client.prepare_adapter(ref) for replica in self._up(ref.tier)]
        return self._require_all(await asyncio.gather(*able, return_exceptions=True))[0]

    async def stats(self) -> EngineStats:
        """Return the sum of all replicas' snapshots. Raises EngineDiedError when none is up.

        Where all have gone because nothing was to be done, the counters are left.
        """
        up = await self._roster.read_stats()
        if not up and not self.is_asleep:
            raise EngineDiedError(self.not_ready_reason)
        return self._roster.total(up)

    # ---- placing (`Fleet`) ----------------------------------------------------------------

    def enter(self, flight: Flight) -> None:
        """Take in a request that begins."""
        if flight.request_id in self._flights:
            raise InvalidRequestError(
                f"request_id={flight.request_id!r} is in use by a running request"
            )
        self._losses.check(flight.request)
        self._flights[flight.request_id] = flight

    def leave(self, flight: Flight) -> None:
        """Forget a request that has ended."""
        if self._flights.get(flight.request_id) is flight:
            del self._flights[flight.request_id]

    async def place(self, wanted: Wanted) -> EngineReplica | None:
        """Choose the replica for a request; None where there is none now."""
        while (able := self._roster.candidates.of(wanted)).replicas:
            loads = self._roster.board.take(able.columns)
            replica = able.replicas[self._placement.choose(wanted.request, loads)]
            is_there = replica.is_up and (wanted.has_begun or not replica.is_draining)
            if is_there and await self._roster.is_as_known(replica):
                return replica
            self._roster.candidates.forget()
            wanted = replace(wanted, refused=wanted.refused | {replica})
        return None

    def can_place(self, wanted: Wanted) -> bool:
        """Return whether there is a replica for a request."""
        return bool(self._roster.candidates.of(wanted).replicas)

    def find_source(
        self, request: EngineRequest, replica: EngineReplica, *, may_prefill: bool
    ) -> Source | None:
        """Return where the replica that a request was placed at gets its blocks from, if any."""
        return self._sources.find(request, replica, may_prefill=may_prefill)

    def may_return(self, needs: Needs) -> bool:
        """Return whether a replica with these tiers was lost lately, and may come back."""
        may_wait = self.demand.waits_for_tiers or not self._roster.takes_requests
        return may_wait and self._roster.may_return(needs, self.resume_within_s)

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

    def note_loss(self, replica: EngineReplica, generation: str | None) -> None:
        """Count a replica's end, once for all requests that it had."""
        lost = [each for each in self._flights.values() if each.has_lost(replica, generation)]
        self._losses.note(replica, generation, lost)

    def note_served(self, request: EngineRequest) -> None:
        """Hear that a request was served to its end."""
        self._losses.note_served(request)

    def note_answer(self, attempt: ReplicaAttempt, token_ids: list[int]) -> None:
        """Have an answer audited, maybe, and its conversation remembered."""
        self.audits.keep(attempt, token_ids)
        self.handovers.keep(attempt, token_ids)

    def note_failover(self, reason: str) -> None:
        """Count a request that goes on at another replica."""
        self.failovers[reason] += 1

    def unplaced(self, request: EngineRequest) -> EngineError:
        """Return why there is no replica for a new request."""
        needed = needed_tiers(request)
        infos = self._roster.infos()
        if infos and not any(all(tier in info.tiers for tier in needed) for info in infos):
            together = " and ".join(needed)
            return TierUnavailableError(
                f"no engine replica has the {together} tier"
                + (" in one engine, as a cascade needs" if len(needed) > 1 else "")
            )
        return EngineDiedError(self.not_ready_reason)
