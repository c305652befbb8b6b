"""Plans a request from its bytes: the tiers that may answer, their order, and the deadline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from outrider.engine.errors import EngineError, PromptTooLongError
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.candidates.fallback import (
    Candidate,
    FallbackChain,
    Lineup,
    StartTimeout,
    unbounded,
)
from outrider.gateway.answering.candidates.local_candidate import LocalCandidate, LocalParts
from outrider.gateway.answering.candidates.small_candidate import SmallServerCandidate
from outrider.gateway.answering.candidates.upstream_calls import UpstreamCalls, UpstreamCandidate
from outrider.gateway.answering.candidates.walk import RequestWalk
from outrider.gateway.answering.jobs.route_report import routed_report
from outrider.gateway.answering.reading.parsed_request import (
    LocalQuery,
    ParsedRequest,
    PlacementConstraints,
    Query,
    RequestContext,
    trace_request,
)
from outrider.gateway.answering.reading.reading import RequestReader
from outrider.gateway.contract.answers.responder import (
    DIRECT,
    RouteReason,
    TryNextPlace,
)
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.parsing import RequestJson, yield_if_long
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.router.policy import RoutePolicy

# A share of the deadline: means are not promises, and some tier has to write the answer.
_RESERVE: Final = 0.1
_SHARE_OF_CHAIN: Final = 0.5
"""The share of the time to the deadline in which a model of a chain must begin to answer."""

_Strong = LocalCandidate | UpstreamCandidate
"""Targets of an escalation: the engine's other models, or an upstream tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans requests."""

    local: LocalParts
    calls: UpstreamCalls
    router: RoutePolicy
    reader: RequestReader
    chains: ChainBook

    async def plan(self, endpoint: Endpoint, body: bytes, context: RequestContext) -> FallbackChain:
        """Plan the answer. Raises GatewayError or EngineError."""
        walk = self._walk(endpoint, body, context)
        await yield_if_long(body)
        parsed = await walk.begin()
        trace_request(parsed)
        return FallbackChain(parsed, walk, self._lineup)

    def _walk(self, endpoint: Endpoint, body: bytes, context: RequestContext) -> RequestWalk:
        return RequestWalk(self.reader, self.chains, endpoint, RequestJson(body), context)

    def _lineup(self, parsed: ParsedRequest) -> Lineup:
        """Line up the candidates that may answer."""
        parsed = self._ordered(parsed)
        origin, failed = parsed.origin, parsed.chain_reason
        if failed is not DIRECT:
            origin = replace(failed, reason=failed.explain(origin.reason))
        return Lineup(
            candidates=self._candidates(parsed),
            origin=origin,
            continues_on_failure=parsed.continues_elsewhere(self.calls.upstreams.rules),
            on_begin=self.calls.count_origin,
            arm=parsed.context.arm,
        )

    async def route_report(
        self, endpoint: Endpoint, body: bytes, context: RequestContext
    ) -> RouteReport:
        """Return where the request would go. Raises what the request would."""
        walk = self._walk(endpoint, body, context)
        parsed = await walk.begin()
        while True:
            try:
                return routed_report(await self._route_of(parsed), parsed)
            except (GatewayError, EngineError) as error:
                parsed = await walk.after(error)

    async def _route_of(self, parsed: ParsedRequest) -> RouteReport:
        parsed = self._ordered(parsed)
        origin = parsed.origin
        *first, last = self._candidates(parsed)
        for candidate in first:
            try:
                return await candidate.route_report(origin)
            except TryNextPlace as signal:
                origin = signal.origin
            except PromptTooLongError as error:
                origin = candidate.after(DIRECT, error)
        return await last.route_report(origin)

    def _ordered(self, parsed: ParsedRequest) -> ParsedRequest:
        """Order the places by the request's constraints, unless the local models are too busy."""
        constraints, queries, origin = parsed.constraints, parsed.queries, parsed.origin
        first = queries[0]
        if self.local.jobs.models.engine.is_paused:  # the others need not wait
            queries = tuple(sorted(queries, key=lambda query: isinstance(query, LocalQuery)))
        if origin is DIRECT and first is not queries[0]:
            origin = RouteReason(hand_off="failure", reason="the local models are being restarted")
        elif origin is DIRECT and constraints.may_hand_off:
            busy = self.local.busy_reason(parsed)
            if busy is not None:
                queries, origin = queries[::-1], RouteReason(hand_off="load", reason=busy)
        elif origin is DIRECT and constraints.places[0] == "upstream":
            origin = self._policy_origin(constraints)
        return msgspec.structs.replace(parsed, queries=queries, origin=origin)

    def _policy_origin(self, constraints: PlacementConstraints) -> RouteReason:
        """Return why an upstream tier is the first: by policy, or because the request names it."""
        if constraints.is_requested:
            return DIRECT
        has_local = self.calls.upstreams.rules.has_local  # else no model handed it off
        return RouteReason(hand_off="policy" if has_local else None, reason=constraints.reason)

    def _candidates(self, parsed: ParsedRequest) -> Sequence[Candidate]:
        """Return the candidates in order. The first may escalate to the next."""
        candidates: list[Candidate] = []
        for query in reversed(parsed.queries):
            following = candidates[0] if candidates else None
            is_first = query is parsed.queries[0]
            strong_tier = following if is_first and isinstance(following, _Strong) else None
            candidates.insert(0, self._candidate(parsed, query, following, strong_tier))
        return candidates

    def _candidate(
        self,
        parsed: ParsedRequest,
        query: Query,
        following: Candidate | None,
        strong_tier: _Strong | None,
    ) -> Candidate:
        start_timeout = self._start_timeout(parsed, following)
        if isinstance(query, LocalQuery):
            escalates_upstream = parsed.constraints.strong_place == "upstream"
            return LocalCandidate(
                parts=self.local,
                parsed=parsed,
                query=query,
                strong_tier=strong_tier if escalates_upstream else None,
                start_timeout=start_timeout,
            )
        if query.has_small_model:
            return SmallServerCandidate(
                calls=self.calls,
                parsed=parsed,
                query=query,
                start_timeout=start_timeout,
                router=self.router,
                strong_tier=strong_tier,
            )
        return UpstreamCandidate(
            calls=self.calls, parsed=parsed, query=query, start_timeout=start_timeout
        )

    def _start_timeout(self, parsed: ParsedRequest, following: Candidate | None) -> StartTimeout:
        """Return the start timeout after which the next candidate could not meet the deadline."""
        deadline_s = parsed.constraints.deadline_s
        if deadline_s is None or (following is None and "deadline" not in parsed.falls_back_on):
            return unbounded
        if following is None:  # the models of the rest of the chain share what is left
            return lambda: max(deadline_s - self.calls.clock(), 0.0) * _SHARE_OF_CHAIN

        def until_s() -> float | None:
            needed_s = following.expected_s()
            if not needed_s:  # not measured yet
                return None
            needed_s += _RESERVE * (deadline_s - parsed.context.arrival_s)
            left_s = deadline_s - self.calls.clock() - needed_s
            return left_s if left_s > 0 else None  # the next one would be late anyway

        return until_s
