"""One request of a pool: its stream of events, from one replica after the other."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Final, cast

from outrider.engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    InfeasibleObjectiveError,
    QueueFullError,
)
from outrider.engine.events import (
    Ending,
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    RequestStats,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.client import OnEnd, tell_end
from outrider.gateway.engines.backends.crash_suspects import EXPIRES_S, MAX_DEATHS
from outrider.gateway.engines.backends.received_answer import ReceivedAnswer
from outrider.gateway.engines.backends.streams import DIED_MESSAGE, SHUT_DOWN_MESSAGE
from outrider.gateway.engines.backends.wire import SwitchTier
from outrider.gateway.engines.fleet.candidates import Wanted
from outrider.gateway.engines.fleet.remote_prompt import RemotePrompt
from outrider.gateway.engines.fleet.replica import EngineReplica, needed_tiers, numerics_of
from outrider.gateway.engines.fleet.replica_attempt import (
    Fleet,
    ReplicaAttempt,
    ended_by_itself,
    is_loss,
)
from outrider.verifier.params import Tier

_MAX_TRIES: Final = 3
"""So many replicas may refuse a new request before it is refused."""

_MAX_LOSSES: Final = 6
"""A request that has lost its replica so often is failed, whether they died or not."""

_POLL_S: Final = 0.02
"""A request that waits for a replica looks for one at this interval."""


class Flight:
    """Follows one request over replicas; its reader sees one answer.

    A replica that dies, or that is told to abort the request because it moves, leaves the rest to
    the next one (`EngineRequest.resumed_token_ids`), which has the same numerics.
    """

    def __init__(self, request: EngineRequest, on_end: OnEnd | None, fleet: Fleet) -> None:
        self.request_id = request.request_id
        self.request = request
        self._fleet = fleet
        self._on_end = on_end
        self._answer = ReceivedAnswer(request)
        self._next = request  # what the next replica is sent, apart from a change of tier
        self._numerics: dict[Tier, str] = {}
        self._attempt: ReplicaAttempt | None = None
        self._prompt: RemotePrompt | None = None
        self._may_prefill = True
        self._began_s = time.monotonic()
        self._num_attempts = 0
        self._num_deaths = 0
        self._num_losses = 0
        self._is_suspect = False
        self._refused: frozenset[EngineReplica] = frozenset()
        self._refusal: EngineError | None = None
        self._moves_because: str | None = None
        self._is_aborted = False
        self._has_left = False
        self._is_over = False

    @property
    def replica(self) -> EngineReplica | None:
        """The replica that has it; None while it waits for one."""
        return None if self._attempt is None else self._attempt.replica

    # ---- commands -------------------------------------------------------------------------

    async def abort(self) -> None:
        """End the request."""
        self._is_aborted = True
        await self._abort_attempt()

    async def keep_on_tier(self) -> None:
        """Leave the answer with its tier."""
        self._answer.stays_on_tier = True
        if (attempt := self._attempt) is not None:
            await attempt.replica.client.keep_on_tier(attempt.request.request_id)

    async def move(self, reason: str) -> None:
        """Have the request go on at another replica."""
        if self._attempt is not None:
            self._moves_because = reason
            await self._abort_attempt()

    def has_lost(self, replica: EngineReplica, generation: str | None) -> bool:
        """Return whether it was lost with a replica's process, and this is not counted."""
        attempt = self._attempt
        if attempt is None or attempt.is_counted:
            return False
        if attempt.replica is not replica or attempt.generation != generation:
            return False
        return attempt.has_ended and is_loss(attempt.ending)

    def note_death(self, *, is_suspect: bool) -> None:
        """Take in that its replica has died; `is_suspect`: others had, with such a request."""
        self.note_departure()
        self._num_deaths += 1
        self._is_suspect = is_suspect

    def note_departure(self) -> None:
        """Take in that its replica has ended, as it had said."""
        assert self._attempt is not None
        self._attempt.is_counted = True

    def uncount_death(self) -> None:
        """Take back a death that was none."""
        self._num_deaths -= 1

    def can_move(self) -> bool:
        """Return whether there is another replica that could go on with it."""
        if (attempt := self._attempt) is None:
            return False
        request = replace(attempt.request, tier=self._answer.tier)
        numerics = numerics_of(attempt.info, request) if self._answer.has_begun else {}
        refused = frozenset((attempt.replica,))
        return self._fleet.can_place(Wanted(request=request, numerics=numerics, refused=refused))

    async def switch_tier(self, tier: Tier, *, keeps_answer: bool) -> None:
        """Hand the request to another tier, in its replica or, where that lacks it, in another."""
        answer, attempt = self._answer, self._attempt
        if tier == answer.tier:
            return
        if keeps_answer and answer.was_held:  # there is nothing to go on with
            await self.keep_on_tier()
            return
        answer.switch = switch = SwitchTier(self.request_id, tier, keeps_answer)
        if attempt is None:
            return  # it waits for a replica, which is to be one of that tier
        if tier in attempt.info.tiers:
            await attempt.replica.client.switch_tier(
                attempt.request.request_id, tier, keeps_answer=keeps_answer
            )
        elif self._fleet.can_place(Wanted(request=self._switched(switch))):
            await self.move("switch")
        else:
            self._fleet.demand.request_engine(frozenset((tier,)))  # for the next answer
            answer.switch = None
            await self.keep_on_tier()

    async def _abort_attempt(self) -> None:
        if (attempt := self._attempt) is not None:
            await attempt.replica.client.abort(attempt.request.request_id)

    # ---- the stream -----------------------------------------------------------------------

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        """Yield the events; see `EngineClient.submit`."""
        self._enter()
        ending: Ending | None = None
        try:
            while ending is None:
                self._leave_prompt()
                attempt = await self._next_attempt()
                if attempt is None:
                    ending = self._unserved()
                    break
                last: Ending | None = None
                try:
                    async with aclosing(self._stream(attempt)) as stream:
                        async for told in stream:
                            event = await self._with_prompt(told)
                            if isinstance(event, Finished | Failed):
                                last = event
                            elif attempt.is_switching:
                                yield self._begin_on_other_tier(attempt)
                            if last is None and self._takes(attempt, event):
                                yield self._named(event)
                except EngineError as error:
                    ending = self._after_refusal(attempt, error)
                else:
                    if attempt.is_switching and ended_by_itself(last):
                        yield self._begin_on_other_tier(attempt)
                    ending = self._after(attempt, last)
            yield self._end(ending)
        finally:
            self._leave_prompt()
            self._leave()

    async def _with_prompt(self, event: EngineEvent) -> EngineEvent:
        """Return an event as it would be, had one replica done all the work."""
        if self._prompt is None:
            return event
        match event:
            case PrefillDone():
                await self._prompt.until_told()
                return self._prompt.prefill_of(event)
            case Finished(stats=stats) | Failed(stats=RequestStats() as stats):
                return replace(event, stats=self._prompt.stats_of(stats))
        return event

    def _enter(self) -> None:
        try:
            self._fleet.enter(self)
        except EngineError:
            tell_end(self._on_end, self.request_id, None)
            raise

    def _stream(self, attempt: ReplicaAttempt) -> AsyncGenerator[EngineEvent, None]:
        """Submit the request. The protocol promises that its iterator can be closed."""
        stream = attempt.replica.client.submit(attempt.request, partial(self._note_end, attempt))
        return cast("AsyncGenerator[EngineEvent, None]", stream)

    async def _next_attempt(self) -> ReplicaAttempt | None:
        """Choose a replica, or wait for one; None where the request ends without.

        Raises EngineError where there is none for a new request.
        """
        began_s = time.monotonic()
        fleet, answer = self._fleet, self._answer
        while not (self._is_aborted or fleet.is_closed):
            switch = answer.switch
            if switch is not None:
                request = self._switched(switch)
                wanted = Wanted(request=request, refused=self._refused, has_begun=True)
                if (replica := await fleet.place(wanted)) is not None:
                    return self._begin(replica, request, is_switching=True)
            wanted = Wanted(
                request=self._next,
                numerics=self._numerics,
                refused=self._refused,
                has_begun=answer.is_resumed,
            )
            if (replica := await fleet.place(wanted)) is not None:
                if switch is not None and answer.switch is switch:
                    self._stay()
                return self._begin(replica, self._next, is_switching=False)
            if not answer.is_resumed:
                await self._wait_for_start(wanted)
                continue
            if time.monotonic() >= began_s + fleet.resume_within_s:
                break
            fleet.demand.request_engine(frozenset(needed_tiers(self._next)))
            await asyncio.sleep(_POLL_S)
            self._refused = frozenset()
        return None

    async def _wait_for_start(self, wanted: Wanted) -> None:
        """Wait until an engine is started for a new request, or is back.

        Raises EngineError where none is waited for, or none came in time.
        """
        fleet, needs = self._fleet, frozenset(needed_tiers(wanted.request))
        is_gone = self._refusal is None or isinstance(self._refusal, EngineDiedError)
        self._refused = frozenset()
        wanted = replace(wanted, refused=self._refused)
        may_return = fleet.may_return(needs)

        def is_over() -> bool:
            is_lost = may_return and not fleet.may_return(needs)
            return self._is_aborted or fleet.is_closed or fleet.can_place(wanted) or is_lost

        try:
            if not is_gone or not (may_return or fleet.demand.can_start(needs)):
                raise self._refusal or fleet.unplaced(wanted.request)
            await fleet.demand.wait_for(needs, is_over, self._began_s)
        except EngineError:
            self._report_end(None)
            raise

    def _begin(
        self, replica: EngineReplica, request: EngineRequest, *, is_switching: bool
    ) -> ReplicaAttempt:
        self._num_attempts += 1
        num_tokens = self._fleet.num_uncached_tokens(request)
        if self._num_attempts > 1:
            request = replace(request, request_id=f"{self.request_id}~{self._num_attempts}")
        if self._answer.stays_on_tier and request.may_escalate:
            request = replace(request, may_escalate=False)
        request = self._with_source(request, replica)
        assert replica.info is not None
        self._attempt = attempt = ReplicaAttempt(
            request, replica, replica.generation, replica.info, is_switching
        )
        replica.begin(request.request_id, 1 if self._prompt is not None else num_tokens)
        return attempt

    def _with_source(self, request: EngineRequest, replica: EngineReplica) -> EngineRequest:
        """Have the request's blocks come from elsewhere, where that pays."""
        named = replace(request, request_id=self.request_id)  # as the placement knows it
        source = self._fleet.find_source(named, replica, may_prefill=self._may_prefill)
        if source is None:
            return replace(request, source=None) if request.source is not None else request
        if source.prompt is not None:
            num_tokens = self._fleet.num_uncached_tokens(source.prompt)
            self._prompt = RemotePrompt(source.prompt, source.replica, self._fleet, num_tokens)
        return replace(request, source=source.blocks)

    def _leave_prompt(self) -> None:
        """Have nothing more computed by a prefill replica for this attempt."""
        if self._prompt is not None:
            self._prompt.leave()
            self._may_prefill &= not self._prompt.was_lost
            self._prompt = None

    def _switched(self, switch: SwitchTier) -> EngineRequest:
        """Return the request with which another engine's tier takes the answer over."""
        token_ids = tuple(self._answer.token_ids)
        keeps = switch.keeps_answer
        return replace(
            self._answer.request,
            tier=switch.tier,
            may_escalate=False,
            resumed_token_ids=token_ids if keeps else (),
            retracted_token_ids=token_ids if switch.tier == "large" and not keeps else (),
        )

    def _begin_on_other_tier(self, attempt: ReplicaAttempt) -> TierSwitched:
        """Say, at the first sign of the other tier, that it has taken the answer over."""
        attempt.is_switching = False
        switch = self._answer.switch
        keeps = switch is not None and switch.keeps_answer
        event = TierSwitched(
            request_id=self.request_id, tier=attempt.request.tier, keeps_answer=keeps
        )
        self._answer.accept(event)
        self._answer.request = replace(self._answer.request, may_escalate=False)
        return event

    def _takes(self, attempt: ReplicaAttempt, event: EngineEvent) -> bool:
        """Take in an event; return whether the reader gets it."""
        if isinstance(event, PrefillDone):
            attempt.numerics = event.numerics
            attempt.replica.note_computed(attempt.request.request_id)
            self._fleet.note_prefill(self.request_id, event.num_cached_tokens)
        elif isinstance(event, TokensEmitted) and attempt.request.resumed_token_ids:
            attempt.replica.note_computed(attempt.request.request_id)  # no event tells its prefill
        return self._answer.accept(event)

    def _named(self, event: EngineEvent) -> EngineEvent:
        if self._num_attempts == 1:
            return event
        return replace(event, request_id=self.request_id)

    # ---- after an attempt -----------------------------------------------------------------

    def _note_end(self, attempt: ReplicaAttempt, ending: Ending | None) -> None:
        """Hear a replica's last word, which the stream's reader may never read."""
        attempt.has_ended, attempt.ending = True, ending
        attempt.replica.end(attempt.request.request_id)
        self._fleet.note_departure(self.request_id)
        if self._has_left:
            self._end_late(ending)

    def _after(self, attempt: ReplicaAttempt, last: Ending | None) -> Ending | None:
        """Return the last event for the reader; None where another replica is to go on."""
        moves, self._moves_because = self._moves_because, None
        answer = self._answer
        if last is None or is_loss(last):
            return self._after_loss(attempt, last)
        self._attempt = None
        match last:
            case Finished(finish_reason="abort") if moves is not None and not self._is_aborted:
                reason = moves
                self._refused = frozenset((attempt.replica,))
            case Failed() if attempt.is_switching:
                reason = "not_switched"
                self._stay()
            case _:
                if ended_by_itself(last):
                    self._fleet.note_served(self.request)
                    if answer.tier == attempt.request.tier:
                        self._fleet.note_answer(attempt, answer.token_ids)
                return answer.ended(last)
        self._resume(attempt, last, reason)
        return None

    def _after_loss(self, attempt: ReplicaAttempt, last: Ending | None) -> Ending | None:
        """Return the last event where two replicas died with the request; else None."""
        attempt.has_ended, attempt.ending = True, last
        if not attempt.is_counted:
            self._fleet.note_loss(attempt.replica, attempt.generation)
        self._attempt = None
        self._num_losses += 1
        if self._fleet.is_closed:
            return self._answer.failed(EngineDiedError.code, SHUT_DOWN_MESSAGE)
        is_fatal = self._num_deaths >= MAX_DEATHS or self._num_losses >= _MAX_LOSSES
        if self._is_suspect or is_fatal:
            again = CrashSuspectError(retry_after_s=EXPIRES_S)
            return self._answer.failed(again.code, str(again))
        self._resume(attempt, last, "died")
        return None

    def _after_refusal(self, attempt: ReplicaAttempt, error: EngineError) -> Ending | None:
        """Return the last event after a refusal; None where another replica is asked.

        Raises the error where the request is new.
        """
        self._attempt = None
        if isinstance(error, EngineDiedError | CrashSuspectError):
            # It ended between the choice and now; or what was served since is suspected there.
            self._refuse(attempt, error)
            return None
        if attempt.is_switching:
            self._stay()
            return None
        if self._answer.is_resumed:
            return self._answer.failed(error.code, str(error))
        is_full = isinstance(error, QueueFullError | InfeasibleObjectiveError)
        if is_full and self._num_attempts < _MAX_TRIES:
            self._refuse(attempt, error)
            return None
        self._report_end(None)
        raise error

    def _refuse(self, attempt: ReplicaAttempt, error: EngineError) -> None:
        self._refused |= {attempt.replica}
        self._refusal = error

    def _resume(self, attempt: ReplicaAttempt, last: Ending | None, reason: str) -> None:
        """Make the request for the next replica, of which it must have the numerics."""
        self._fleet.note_failover(reason)
        self._next = self._answer.resumption(None if last is None else last.stats)
        if not self._answer.has_begun:
            self._numerics = {}
        elif not attempt.is_switching:
            self._numerics = numerics_of(attempt.info, self._next)

    def _stay(self) -> None:
        """The other tier cannot take the answer: it stays with its own."""
        self._answer.switch = None
        self._answer.stays_on_tier = True

    def _unserved(self) -> Ending:
        """Return the last event of a request that no replica has."""
        if self._is_aborted:
            return self._answer.aborted()
        message = SHUT_DOWN_MESSAGE if self._fleet.is_closed else DIED_MESSAGE
        return self._answer.failed(EngineDiedError.code, message)

    # ---- the end --------------------------------------------------------------------------

    def _end(self, ending: Ending) -> Ending:
        """Tell the end and return it as the reader's last event."""
        if ending.request_id != self.request_id:
            ending = replace(ending, request_id=self.request_id)
        self._report_end(ending)
        return ending

    def _leave(self) -> None:
        """The reader has left: where a replica still has the request, its last word is awaited."""
        if self._is_over:
            return
        self._has_left = True
        if self._attempt is None:
            self._end(self._answer.aborted())
        elif self._attempt.has_ended:
            self._end_late(self._attempt.ending)

    def _end_late(self, ending: Ending | None) -> None:
        if ending is not None:
            self._end(self._answer.ended(ending))
        elif self._answer.is_resumed:
            self._end(self._answer.aborted())
        else:
            self._report_end(None)

    def _report_end(self, ending: Ending | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._fleet.leave(self)
        tell_end(self._on_end, self.request_id, ending)
