"""Gets an answer begun: other replicas, waits between attempts, a second request if it is late."""

import asyncio
import math
from collections.abc import Collection, Mapping
from typing import Final

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_exponential,
)

from outrider.gateway.contract.errors.tree import (
    DeadlineExceededError,
    GatewayError,
    ThrottledError,
    UnavailableError,
    UpstreamError,
)
from outrider.gateway.upstream.attempts import AttemptKind, AttemptOutcome
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.dialects.base import Resume
from outrider.gateway.upstream.replicas import Replica
from outrider.gateway.upstream.tier_parts import TierState
from outrider.gateway.upstream.upstream_request import UpstreamRequest

_FIRST_WAIT_S: Final = 0.1
_MAX_WAIT_S: Final = 5.0
_MAX_ASKED_WAIT_S: Final = 10.0
"""A server that asks for a longer wait than this is not waited for."""
_LATE_QUANTILE: Final = 0.95
_TICK_S: Final = 0.005
"""Timers may fire a little early, and a replica that is held back is held to its time."""

_backoff = wait_exponential(multiplier=_FIRST_WAIT_S, max=_MAX_WAIT_S)


class Opening:
    """The attempts at one answer, or at its continuation, until one of them has begun.

    Replicas not yet asked are asked at once. When all were asked, there is a wait: full
    jitter below 0.1 s, 0.2 s, 0.4 s ... 5 s, after the waits that servers asked for by retry-after.

    With hedging on, an attempt that is later than the tier's usual 95 % gets a rival; the one that
    begins first continues, the other is cut off and booked as lost. There is one rival at most.

    `requests` keeps every request that was made. When `run` raises, all of them are over.
    """

    def __init__(
        self,
        tier: TierState,
        call: UpstreamCall,
        *,
        kind: AttemptKind,
        started_s: float,
        resume: Resume | None = None,
        avoid: Collection[Replica] = (),
        num_repeated_tokens: int = 0,
    ) -> None:
        """Store `started_s`, the start of the whole answer. Raises the dialect's BadRequestError.

        `avoid`: replicas that are asked only when there is no other.
        """
        self.requests: list[UpstreamRequest] = []
        self.is_hedged = False
        self._tier = tier
        self._call = call
        self._kind = kind
        self._end_s = started_s + tier.settings.timeouts.total_s
        if call.deadline_s is not None:
            self._end_s = min(self._end_s, call.deadline_s)
        self._num_repeated_tokens = num_repeated_tokens
        self._body = tier.parts.dialect.body(call, tier.traits, resume)
        self._round: list[Replica] = list(avoid)
        """Replicas asked since the last wait."""
        self._errors: list[UpstreamError] = []
        self._num_earlier_errors = 0
        # A copy is not worth a second attempt, and a probe is repeated by its own plan.
        self._max_attempts = 1 if kind in ("mirror", "probe") else 1 + tier.settings.max_retries
        self._retry_kind: AttemptKind = "retry" if kind == "answer" else kind

    async def run(self) -> UpstreamRequest:
        """Return the request whose answer has begun.

        Raises UpstreamRefusalError and LoopError at once, DeadlineExceededError at the deadline,
        BadRequestError for what cannot be redacted.
        When all attempts failed: ThrottledError if there were too many requests; UnavailableError
        if no replica could be asked, or only the time to come back is known; else the last
        UpstreamError.
        """
        if (redact := self._tier.parts.redact) is not None:
            self._body = await redact(self._body)
        if self._kind == "answer":
            self._tier.hedges.earn()
        try:
            try:
                return await self._attempt()
            except UpstreamError as error:
                return await self._retry(error)
        except UpstreamError as error:
            verdict = self._verdict()
            if verdict is error:
                raise
            raise verdict from error
        except BaseException:
            # One may have begun just when we were cancelled.
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Give up all unfinished requests."""
        for request in self.requests:
            await request.aclose()

    async def _retry(self, first: UpstreamError) -> UpstreamRequest:
        """Retry after a first failure. An answer that begins at once never gets here."""
        failures = [first]

        async def attempt() -> UpstreamRequest:
            if failures:
                raise failures.pop()
            return await self._attempt()

        retries = AsyncRetrying(
            retry=retry_if_exception_type(UpstreamError),
            wait=self._wait_s,
            stop=self._gives_up,
            sleep=asyncio.sleep,
            reraise=True,
        )
        return await retries(attempt)

    def _wait_s(self, state: RetryCallState) -> float:
        """Return the seconds until the next attempt; infinite where waiting would not help."""
        replicas = self._tier.parts.replicas
        if replicas.pick(exclude=self._round) is not None:
            return 0.0
        errors = self._errors[self._num_earlier_errors :]
        wait_s = min((error.asked_wait_s or 0.0 for error in errors), default=0.0)
        if not replicas.is_available:
            # Time alone frees a throttled replica; an open breaker needs a trial as well.
            breakers = [replica.breaker for replica in replicas.replicas]
            held_s = [breaker.wait_s for breaker in breakers if breaker.state != "open"]
            wait_s = max(wait_s, min(held_s, default=math.inf))
        if wait_s > _MAX_ASKED_WAIT_S:
            return math.inf
        backoff_s = self._tier.parts.rng.uniform(0, _backoff(state))
        return wait_s + backoff_s + _TICK_S

    def _gives_up(self, state: RetryCallState) -> bool:
        """Return whether the last failure is final."""
        assert state.outcome is not None
        error = state.outcome.exception()
        assert isinstance(error, UpstreamError)
        # If all replicas are throttled, do not wait: other tiers may answer meanwhile.
        is_final = error.failure == "ejected" or not error.is_retryable
        if is_final or state.attempt_number >= self._max_attempts:
            return True
        return self._tier.parts.clock() + state.upcoming_sleep >= self._end_s

    def _verdict(self) -> GatewayError:
        """Return the error that best explains the missing answer."""
        name, replicas = self._tier.name, self._tier.parts.replicas
        asked_s = [error.asked_wait_s for error in self._errors if error.asked_wait_s is not None]
        wait_s = replicas.retry_after_s or min(asked_s, default=1.0)
        spoken = f"{max(wait_s, 0.1):.1f}".removesuffix(".0")
        now_s = self._tier.parts.clock()
        is_throttled = any(error.failure == "throttled" for error in self._errors)
        if not self._errors:
            is_throttled = any(r.breaker.held_until_s > now_s for r in replicas.replicas)
        if is_throttled:
            return ThrottledError(
                f"The {name} tier has too many requests at the moment. Try again in {spoken} s.",
                retry_after_s=wait_s,
            )
        if not self._errors:
            return UnavailableError(
                f"The {name} tier does not answer at the moment. Try again in {spoken} s.",
                retry_after_s=wait_s,
            )
        if asked_s:
            return UnavailableError(
                f"{self._errors[-1]} Try again in {spoken} s.", retry_after_s=wait_s
            )
        return self._errors[-1]

    async def _attempt(self) -> UpstreamRequest:
        """Ask one replica, or two if the first is late."""
        self._require_time()
        if (model := self._tier.parts.on_demand) is not None:
            await model.until_loaded(self._end_s)
        request = self._ask(self._pick(), self._kind if not self.requests else self._retry_kind)
        late_s = self._late_s()
        if late_s is None:
            await self._start(request)
            return request
        return await self._race(request, late_s)

    async def _start(self, request: UpstreamRequest) -> None:
        try:
            await request.start()
        except UpstreamError as error:
            self._errors.append(error)
            raise

    def _require_time(self) -> None:
        deadline_s = self._call.deadline_s
        if deadline_s is not None and self._tier.parts.clock() >= deadline_s:
            raise DeadlineExceededError(
                f"The deadline passed before the request was sent to the {self._tier.name} tier."
            )

    def _pick(self) -> Replica:
        """Pick a replica that was not asked yet; else any but the last one; else any.

        Raises UpstreamError `ejected` where no replica admits requests.
        """
        pick, affinity = self._tier.parts.replicas.pick, self._call.affinity
        replica = pick(affinity=affinity, exclude=self._round)
        if replica is None and self._round:
            last = self._round[-1:]
            self._round.clear()
            self._num_earlier_errors = len(self._errors)
            replica = pick(affinity=affinity, exclude=last) or pick(affinity=affinity)
        if replica is None:
            raise UpstreamError(
                f"The {self._tier.name} tier takes no requests now.", failure="ejected"
            )
        return replica

    def _ask(self, replica: Replica, kind: AttemptKind) -> UpstreamRequest:
        """Return an unsent request to it. No await may lie between this and its being picked."""
        request = UpstreamRequest(
            self._tier,
            self._call,
            replica,
            kind=kind,
            body=self._body,
            num_repeated_tokens=self._num_repeated_tokens,
        )
        self.requests.append(request)
        self._round.append(replica)
        return request

    def _late_s(self) -> float | None:
        """Return the seconds after which a rival is sent; None for no rival."""
        if not self._tier.hedges.is_on or self.is_hedged or self._kind != "answer":
            return None
        learned = self._tier.first_token if self._call.is_streamed else self._tier.whole
        return learned.quantile(_LATE_QUANTILE)

    async def _race(self, first: UpstreamRequest, late_s: float) -> UpstreamRequest:
        """Return the first request, or its hedge if that begins earlier."""
        runs = {asyncio.create_task(self._start(first)): first}
        winner = None
        given_up_as: AttemptOutcome = "lost"
        try:
            done, _ = await asyncio.wait(runs, timeout=late_s)
            if not done and (rival := self._rival(first)):
                runs[asyncio.create_task(self._start(rival))] = rival
            winner = await _first_to_begin(runs)
            return winner
        except asyncio.CancelledError:
            given_up_as = "cancelled"
            raise
        finally:
            losers = [request for request in runs.values() if request is not winner]
            for task, request in runs.items():
                if request is not winner:
                    request.given_up_as = given_up_as
                    task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            for request in losers:
                await request.aclose()

    def _rival(self, first: UpstreamRequest) -> UpstreamRequest | None:
        """Return a second request, at another replica if possible; None where it is not allowed."""
        pick, affinity = self._tier.parts.replicas.pick, self._call.affinity
        replica = pick(affinity=affinity, exclude=(first.replica,)) or pick(affinity=affinity)
        if replica is None or not self._tier.hedges.spend():
            return None
        self.is_hedged = True
        return self._ask(replica, "hedge")


async def _first_to_begin(
    runs: Mapping[asyncio.Task[None], UpstreamRequest],
) -> UpstreamRequest:
    """Return the first that has begun, of equals the first that was asked.

    Raises the error of the last one when all have failed; at once an error that is not the server's
    fault.
    """
    pending = set(runs)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        errors = {task: task.exception() for task in runs if task in done}
        for task, error in errors.items():
            if error is None:
                return runs[task]
        for error in errors.values():
            assert error is not None
            if not (pending and isinstance(error, UpstreamError)):
                raise error
