"""Plans a request from its bytes: the tiers that may answer, their order, and the deadline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider.engine.errors import EngineError, PromptTooLongError
from outrider.gateway.answering.candidates.candidate import Candidate, Lineup, Patience, unbounded
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.candidates.fallback import FallbackChain
from outrider.gateway.answering.candidates.local_calls import LocalCandidate, LocalParts
from outrider.gateway.answering.candidates.small_calls import SmallParts, SmallServerCandidate
from outrider.gateway.answering.candidates.upstream_calls import UpstreamCalls, UpstreamCandidate
from outrider.gateway.answering.candidates.walk import RequestWalk
from outrider.gateway.answering.reading.parsed_request import (
    LocalQuery,
    ParsedRequest,
    Query,
    RequestContext,
    UpstreamQuery,
    trace_request,
)
from outrider.gateway.answering.reading.reading import RequestReader
from outrider.gateway.contract.answers.responder import DIRECT, HandOffError, RouteReason
from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.parsing import RequestJson
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.contract.schema.turns import end_turn
from outrider.gateway.engines.backends.client import EngineClient

# A share of the deadline: means are not promises, and some tier has to write the answer.
_RESERVE: Final = 0.1
_SHARE_OF_CHAIN: Final = 0.5
"""The share of the time to the deadline in which a model of a chain must begin to answer."""

_Strong = LocalCandidate | UpstreamCandidate
"""The models that answer what is too hard for a small one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The places in order, and why the first one is the first."""

    queries: Sequence[Query]
    origin: RouteReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans requests."""

    engine: EngineClient
    local: LocalParts
    calls: UpstreamCalls
    small: SmallParts
    reader: RequestReader
    chains: ChainBook
    clock: Callable[[], float]

    async def plan(self, endpoint: Endpoint, body: bytes, context: RequestContext) -> FallbackChain:
        """Plan the answer. Raises GatewayError or EngineError."""
        walk = self._walk(endpoint, body, context)
        await end_turn(body)
        parsed = await walk.begin()
        trace_request(parsed)
        return FallbackChain(
            self._lineup(parsed),
            is_streamed=parsed.is_streamed,
            is_private=parsed.constraints.is_private,
            deadline_s=parsed.constraints.deadline_s,
            walk=walk,
            basis=parsed,
        )

    def _walk(self, endpoint: Endpoint, body: bytes, context: RequestContext) -> RequestWalk:
        return RequestWalk(
            self.reader, self.chains, self._lineup, endpoint, RequestJson(body), context
        )

    def _lineup(self, parsed: ParsedRequest, before: RouteReason = DIRECT) -> Lineup:
        """Line up the candidates that may answer; `before`: why the model before did not."""
        order = self._order(parsed)
        if before is not DIRECT:
            origin = replace(before, reason=before.explain(order.origin.reason))
            order = replace(order, origin=origin)
        return Lineup(
            candidates=self._candidates(parsed, order.queries),
            origin=order.origin,
            continues_on_failure=parsed.continues_elsewhere(self.calls.upstream.rules),
            on_begin=self.calls.count_origin,
            arm=parsed.context.arm,
        )

    async def route_report(
        self, endpoint: Endpoint, body: bytes, context: RequestContext
    ) -> RouteReport:
        """Return where the request would go. Raises what the request would."""
        walk = self._walk(endpoint, body, context)
        parsed = await walk.read()
        try:
            return await self._route_of(parsed)
        except (GatewayError, EngineError) as error:
            plain = await walk.without_arms(error)
            if plain is None:
                raise
            return await self._route_of(plain)

    async def _route_of(self, parsed: ParsedRequest) -> RouteReport:
        order = self._order(parsed)
        origin = order.origin
        *first, last = self._candidates(parsed, order.queries)
        for candidate in first:
            try:
                return await candidate.route_report(origin)
            except HandOffError as handed:
                origin = handed.origin
            except PromptTooLongError as error:
                origin = candidate.after(DIRECT, error)
        return await last.route_report(origin)

    def _order(self, parsed: ParsedRequest) -> _Order:
        """Order the places by the request's constraints, unless the local models are too busy."""
        constraints = parsed.constraints
        queries: Sequence[Query] = parsed.queries
        first = queries[0]
        if self.engine.is_paused:  # the others need not wait
            queries = sorted(queries, key=lambda query: isinstance(query, LocalQuery))
        if parsed.origin is not DIRECT:
            return _Order(queries=queries, origin=parsed.origin)
        if first is not queries[0]:
            origin = RouteReason(hand_off="failure", reason="the local models are being restarted")
            return _Order(queries=queries, origin=origin)
        if constraints.may_hand_over:
            busy = self.local.busy_reason(parsed)
            if busy is not None:
                origin = RouteReason(hand_off="load", reason=busy)
                return _Order(queries=queries[::-1], origin=origin)
        origin = DIRECT
        is_upstream = isinstance(first, UpstreamQuery) and not first.has_small_model
        if is_upstream and constraints.reason != "requested":
            has_local = self.calls.upstream.rules.has_local  # else no model handed it off
            origin = RouteReason(
                hand_off="policy" if has_local else None, reason=constraints.reason
            )
        return _Order(queries=queries, origin=origin)

    def _candidates(self, parsed: ParsedRequest, queries: Sequence[Query]) -> Sequence[Candidate]:
        """Return the candidates in order. The first may hand over to the one behind it."""
        made: list[Candidate] = []
        for query in reversed(queries):
            behind = made[0] if made else None
            strong = behind if query is queries[0] and isinstance(behind, _Strong) else None
            made.insert(0, self._candidate(parsed, query, behind, strong))
        return made

    def _candidate(
        self, parsed: ParsedRequest, query: Query, behind: Candidate | None, strong: _Strong | None
    ) -> Candidate:
        patience = self._patience(parsed, behind)
        if isinstance(query, LocalQuery):
            hands_over = parsed.constraints.strong == "cloud"
            return LocalCandidate(
                parts=self.local,
                parsed=parsed,
                query=query,
                strong=strong if hands_over else None,
                patience_s=patience,
            )
        if query.has_small_model:
            return SmallServerCandidate(
                calls=self.calls,
                parsed=parsed,
                query=query,
                patience_s=patience,
                parts=self.small,
                strong=strong,
            )
        return UpstreamCandidate(calls=self.calls, parsed=parsed, query=query, patience_s=patience)

    def _patience(self, parsed: ParsedRequest, behind: Candidate | None) -> Patience:
        """Return the seconds left before the next candidate could no longer meet the deadline."""
        deadline_s = parsed.constraints.deadline_s
        if deadline_s is None or (behind is None and "deadline" not in parsed.falls_back_on):
            return unbounded
        if behind is None:  # the models of the rest of the chain share what is left
            return lambda: max(deadline_s - self.clock(), 0.0) * _SHARE_OF_CHAIN

        def until_s() -> float | None:
            needed_s = behind.expected_s()
            if not needed_s:  # not measured yet
                return None
            needed_s += _RESERVE * (deadline_s - parsed.context.arrival_s)
            left_s = deadline_s - self.clock() - needed_s
            return left_s if left_s > 0 else None  # the next one would be late anyway

        return until_s
