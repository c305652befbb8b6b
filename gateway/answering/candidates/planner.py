"""Plans a request from its bytes: the tiers that may answer, their order, and the deadline."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from outrider.engine.errors import EngineError, PromptTooLongError
from outrider.gateway.answering.candidates.arm_models import ArmedRequest, ArmWalk, with_arms_model
from outrider.gateway.answering.candidates.chain_walk import ChainWalk
from outrider.gateway.answering.candidates.chains import ChainBook
from outrider.gateway.answering.candidates.cloud_calls import CloudCalls
from outrider.gateway.answering.candidates.fallback import AnswerCandidate, FallbackChain, Lineup
from outrider.gateway.answering.candidates.local_responder import LocalLoad, LocalResponder, Writing
from outrider.gateway.answering.candidates.small_calls import SmallCalls
from outrider.gateway.answering.jobs.job import Job
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.answering.jobs.routing_parts import RoutingParts
from outrider.gateway.answering.reading.cloud_parts import CloudParts
from outrider.gateway.answering.reading.model_catalog import AUTO
from outrider.gateway.answering.reading.parsed_request import (
    ParsedRequest,
    RequestContext,
    trace_request,
    without_tier,
)
from outrider.gateway.answering.reading.reading import RequestReader
from outrider.gateway.answering.streaming.generation import Generation
from outrider.gateway.answering.streaming.usage_summary import usage_summary
from outrider.gateway.contract.answers.responder import (
    DIRECT,
    DraftAnswer,
    HandOffError,
    Place,
    Responder,
    RouteReason,
    TakenOver,
    UpstreamEscalation,
)
from outrider.gateway.contract.errors.tree import BudgetError, GatewayError, RateLimitError
from outrider.gateway.contract.schema.kinds import Endpoint
from outrider.gateway.contract.schema.routing import RouteReport
from outrider.gateway.contract.schema.turns import end_turn
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.tenancy.metering.local_work import LocalWork
from outrider.gateway.tenancy.metering.meter import RequestMeter
from outrider.gateway.tenancy.metering.metrics import GatewayMetrics
from outrider.gateway.tenancy.metering.reserved_usage import UsageEstimate
from outrider.gateway.tenancy.metering.token_allowance import TokenAllowance
from outrider.gateway.upstream.mirror import MirroredAnswer

# A share of the deadline: means are not promises, and some tier has to write the answer.
_RESERVE: Final = 0.1
_SHARE_OF_CHAIN: Final = 0.5
"""The share of the time to the deadline in which a model of a chain must begin to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """The places in order, and why the first one is the first."""

    places: tuple[Place, ...]
    origin: RouteReason


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A job that may be answered, its allowance of tokens, and the account of its work."""

    job: Job
    credit: TokenAllowance | None = None
    work: LocalWork | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans requests. `load` holds the measured load of the local models."""

    engine: EngineClient
    cloud: CloudParts
    jobs: JobBuilder
    load: LocalLoad
    calls: CloudCalls
    small: SmallCalls
    reader: RequestReader
    chains: ChainBook
    routing: RoutingParts
    metrics: GatewayMetrics
    local_tiers: Collection[str]
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
            instead=walk.instead,
            basis=walk.basis(parsed),
        )

    def _walk(
        self, endpoint: Endpoint, body: bytes, context: RequestContext
    ) -> ChainWalk | ArmWalk:
        """Return the way of a request along the models that its arm, its alias or itself names."""

        def along(body: bytes, context: RequestContext) -> ChainWalk:
            chain = self.chains.chain_of(endpoint, body, context.principal)
            return ChainWalk(self.reader, self._lineup, endpoint, body, context, chain)

        armed = self._armed(endpoint, body, context)
        if isinstance(armed, RequestContext):
            return along(body, armed)
        return ArmWalk(along, self._lineup, armed, body, self.reader.note_left_out)

    def _armed(
        self, endpoint: Endpoint, body: bytes, context: RequestContext
    ) -> ArmedRequest | RequestContext:
        """Find the arms of a request before its chain, where either may name another model."""
        experiments = self.reader.experiments
        if not experiments.registry.sets_models and not self.chains.aliases:
            return context
        return with_arms_model(experiments, endpoint, body, context)

    def _lineup(self, parsed: ParsedRequest, before: RouteReason = DIRECT) -> Lineup:
        """Line up the candidates that may answer; `before`: why the model before did not."""
        order = self._order(parsed)
        if before is not DIRECT:
            origin = replace(before, reason=before.explain(order.origin.reason))
            order = replace(order, origin=origin)
        places = [self._place(parsed, order, index) for index in range(len(order.places))]
        if len(places) > 1 and order.places[0] != "cloud":
            # If the answer that they hand over is refused, the first models give it.
            again = self._open_local if order.places[0] == "local" else self._open_server
            places.append(
                msgspec.structs.replace(
                    places[0], open=partial(again, parsed, None), patience_s=lambda: None
                )
            )
        return Lineup(
            candidates=places,
            origin=order.origin,
            continues_on_failure=parsed.continues_elsewhere(self.cloud.rules),
            on_begin=self.calls.count_origin,
            arm=parsed.context.arm,
        )

    async def route_report(
        self, endpoint: Endpoint, body: bytes, context: RequestContext
    ) -> RouteReport:
        """Return where the request would go. Raises what the request would."""
        armed = self._armed(endpoint, body, context)
        if isinstance(armed, RequestContext):
            context = armed
        else:
            body, context = armed.body, armed.context
        chain = self.chains.chain_of(endpoint, body, context.principal)
        if chain is not None:
            body = chain.body(0)
            context = msgspec.structs.replace(context, is_named_by_chain=True)
        parsed = await self.reader.read(endpoint, body, context)
        try:
            return await self._route_of(parsed)
        except (GatewayError, EngineError) as error:
            plain = await self.reader.without_arms(parsed, body, context, error)
            if plain is None:
                raise
            return await self._route_of(plain)

    async def _route_of(self, parsed: ParsedRequest) -> RouteReport:
        order = self._order(parsed)
        origin = order.origin
        if order.places[0] == "server":
            strong = self._strong(parsed, order)
            try:
                return self.small.route_report(parsed, strong)
            except HandOffError as handed:
                origin = handed.origin
            if "cloud" not in order.places or self.cloud.rules.strong == "local":
                assert parsed.request is not None
                return await self.jobs.route_report(parsed.request, parsed.context, None)
        if order.places[0] == "local":
            assert parsed.request is not None
            upstream = self._upstream(parsed, order)
            try:
                return await self.jobs.route_report(parsed.request, parsed.context, upstream)
            except HandOffError as handed:
                origin = handed.origin
            except PromptTooLongError:
                if "cloud" not in order.places:
                    raise
                origin = RouteReason(hand_off="capability", reason="too long for the local models")
        return self.calls.route_report(parsed, origin)

    def _order(self, parsed: ParsedRequest) -> _Order:
        """Order the places by the request's constraints, unless the local models are too busy."""
        constraints = parsed.constraints
        places = constraints.places
        if self.engine.is_paused and "local" in places:  # the others need not wait
            places = (*(place for place in places if place != "local"), "local")
        if parsed.origin is not DIRECT:
            return _Order(places=places, origin=parsed.origin)
        if self.engine.is_paused and constraints.places[0] == "local" and len(places) > 1:
            origin = RouteReason(hand_off="failure", reason="the local models are being restarted")
            return _Order(places=places, origin=origin)
        if constraints.may_hand_over:
            busy = self._is_busy(parsed)
            if busy is not None:
                origin = RouteReason(hand_off="load", reason=busy)
                return _Order(places=("cloud", "local"), origin=origin)
        origin = DIRECT
        if constraints.places[0] == "cloud" and constraints.reason != "requested":
            has_local = self.cloud.rules.has_local  # else there was no local model to hand it off
            origin = RouteReason(
                hand_off="policy" if has_local else None, reason=constraints.reason
            )
        return _Order(places=places, origin=origin)

    def _is_busy(self, parsed: ParsedRequest) -> str | None:
        """Return why the local models would answer too late; None where they would not."""
        fleet = self.jobs.models.fleet
        if fleet is not None and fleet.is_asleep:
            fleet.wake(self.jobs.tokenizers)
            return "load: no engine runs; one is being started"
        max_queue_s = self.cloud.rules.max_queue_s
        busy = None if max_queue_s is None else self.load.queues_longer_than(max_queue_s)
        if busy is None and parsed.constraints.deadline_s is not None:
            busy = self.load.would_miss(parsed.constraints.deadline_s, self._num_tokens(parsed))
        return busy

    def _num_tokens(self, parsed: ParsedRequest) -> int:
        """The likely number of tokens of the answer."""
        typical = round(self.routing.typical.num_completion_tokens.value)
        return min(parsed.token_limit or typical, typical)

    # ---- places -------------------------------------------------------------------------------

    def _place(self, parsed: ParsedRequest, order: _Order, index: int) -> AnswerCandidate:
        name = order.places[index]
        if name == "server":
            strong = self._strong(parsed, order) if index == 0 else None
            opener: Callable[[RouteReason], Any] = partial(self._open_server, parsed, strong)
            ignored = self.calls.ignored_fields(parsed.for_small())
        elif name == "cloud":
            opener = partial(self._open_cloud, parsed)
            ignored = self.calls.ignored_fields(parsed)
        else:
            upstream = self._upstream(parsed, order) if index == 0 else None
            opener = partial(self._open_local, parsed, upstream)
            ignored = parsed.ignored_fields
        return AnswerCandidate(
            name=name,
            open=opener,
            patience_s=self._patience(parsed, order, index),
            ignored_fields=(*parsed.context.ignored_fields, *ignored),
        )

    def _patience(
        self, parsed: ParsedRequest, order: _Order, index: int
    ) -> Callable[[], float | None]:
        """Return the seconds left before the next place could no longer meet the deadline."""
        deadline_s = parsed.constraints.deadline_s
        is_last = index + 1 >= len(order.places)
        if deadline_s is None or (is_last and "deadline" not in parsed.falls_back_on):
            return lambda: None
        if is_last:  # the models of the rest of the chain share what is left
            return lambda: max(deadline_s - self.clock(), 0.0) * _SHARE_OF_CHAIN

        def until_s() -> float | None:
            if order.places[index + 1] == "local":
                needed_s: float | None = self.load.expected(self._num_tokens(parsed)).total_s
            else:
                is_small = order.places[index + 1] == "server"
                needed_s = self.calls.expected_s(parsed.for_small() if is_small else parsed)
            if not needed_s:  # not measured yet
                return None
            needed_s += _RESERVE * (deadline_s - parsed.context.arrival_s)
            left_s = deadline_s - self.clock() - needed_s
            return left_s if left_s > 0 else None  # the next one would be late anyway

        return until_s

    def _upstream(self, parsed: ParsedRequest, order: _Order) -> UpstreamEscalation | None:
        """Return the upstream tier if it plays the large model's part for this request."""
        constraints = parsed.constraints
        if (
            "cloud" not in order.places
            or constraints.strong != "cloud"
            or constraints.cloud is None
        ):
            return None
        return self._to_cloud(parsed, constraints.cloud)

    def _strong(self, parsed: ParsedRequest, order: _Order) -> UpstreamEscalation | None:
        """Return the tier for what is too hard for the small model's server; None without one."""
        strong = next((place for place in order.places if place != "server"), None)
        if strong is None:
            return None
        if strong == "cloud":
            assert parsed.constraints.cloud is not None
            return self._to_cloud(parsed, parsed.constraints.cloud)
        return UpstreamEscalation(
            name="large",
            take_over=partial(self._local_takes_over, parsed),
            second_opinion=partial(self.small.local_opinion, parsed),
        )

    def _to_cloud(self, parsed: ParsedRequest, tier: str) -> UpstreamEscalation:
        return UpstreamEscalation(
            name=tier,
            take_over=partial(self.calls.take_over, parsed),
            second_opinion=partial(self.calls.second_opinion, parsed),
        )

    async def _local_takes_over(self, parsed: ParsedRequest, weak: DraftAnswer) -> TakenOver | None:
        return await self.calls.taken_over(
            "local", parsed, weak, partial(self._open_local, parsed, None, weak.origin)
        )

    async def _open_server(
        self, parsed: ParsedRequest, strong: UpstreamEscalation | None, origin: RouteReason
    ) -> Responder:
        """Open the small model's server. Raises HandOffError where another tier is to answer."""
        if origin.continues is not None or strong is None:
            reason = origin.reason or parsed.constraints.reason
            return await self.calls.responder(parsed.for_small(), replace(origin, reason=reason))
        return await self.small.responder(parsed, strong, origin)

    async def _open_cloud(self, parsed: ParsedRequest, origin: RouteReason) -> Responder:
        return await self.calls.responder(parsed, origin)

    async def _open_local(
        self, parsed: ParsedRequest, upstream: UpstreamEscalation | None, origin: RouteReason
    ) -> Responder:
        """Open the local models. Raises HandOffError where the upstream tier is to answer."""
        if self.cloud.tiers and "failure" in parsed.falls_back_on:
            self.jobs.models.require_ready()  # the chain's next model need not wait for a restart
        if origin.continues is not None:
            parsed, upstream = parsed.continued(origin.continues), None
        request, context = parsed.request, parsed.context
        assert request is not None, "a request for the local models was read as one"
        admitted = await self._admitted_job(parsed, upstream)
        job, work = admitted.job, admitted.work
        if context.meter is not None and origin.continues is not None:
            context.meter.continued()
        if context.with_trace and parsed.is_streamed:
            job = job.traced()
        ticket = self.load.admit()
        generation = Generation(
            self.engine,
            msgspec.structs.replace(
                job, credit=admitted.credit, work=work, on_prefill=ticket.began
            ),
            self.metrics,
            self.clock,
        )
        if context.meter is not None and work is not None:
            context.meter.follow_local(work, partial(usage_summary, generation, origin))
        return LocalResponder(
            generation,
            Writing(
                is_streamed=parsed.is_streamed,
                with_usage=request.wants_usage_chunk,
                with_running_usage=request.wants_running_usage,
                with_trace=context.with_trace,
            ),
            origin,
            ticket,
            on_answered=(
                partial(self._mirror, parsed, generation) if self._is_mirrored(parsed) else None
            ),
            is_continuable=parsed.continues_elsewhere(self.cloud.rules),
        )

    async def _admitted_job(
        self, parsed: ParsedRequest, upstream: UpstreamEscalation | None
    ) -> _Admitted:
        """Reserve a job; with `auto`, a tier whose own limit is used up is passed over.

        Raises RateLimitError or BudgetError.
        """
        request, context = parsed.request, parsed.context
        assert request is not None
        principal, cloud = context.principal, parsed.constraints.cloud
        while True:
            if principal is not context.principal:
                context = msgspec.structs.replace(context, principal=principal)
            job = await self.jobs.job(request, context, upstream)
            if context.meter is None:
                return _Admitted(job)
            try:
                credit = await self._reserved(context.meter, job, cloud)
                return _Admitted(job, credit, LocalWork(self.clock))
            except (RateLimitError, BudgetError) as error:
                is_named = request.outrider is not None and request.outrider.tier is not None
                if error.tier is None or request.model != AUTO or is_named:
                    raise
                left = without_tier(principal, error.tier, self.local_tiers)
                if left is None and error.tier != cloud:
                    raise
                if error.tier == cloud:
                    cloud = upstream = None
                else:
                    principal = left or principal

    @staticmethod
    async def _reserved(meter: RequestMeter, job: Job, cloud: str | None) -> TokenAllowance | None:
        """Reserve the job; `cloud` takes it over, or answers if it fails.

        Raises RateLimitError or BudgetError.
        """
        if not meter.principal.is_limited:
            return None
        tiers: list[str] = [job.tier]
        if job.escalation is not None:
            tiers.append(job.escalation.tier)
        if cloud is not None:
            tiers.append(cloud)
        return await meter.admit(
            UsageEstimate(
                tiers=tuple(tiers),
                num_prompt_tokens=job.num_prompt_tokens,
                num_choices=len(job.choices),
                max_tokens=max(c.request.sampling.max_tokens for c in job.choices),
                is_bounded=job.is_bounded,
            )
        )

    def _is_mirrored(self, parsed: ParsedRequest) -> bool:
        """Return whether it may be copied: requests for this machine only never leave it."""
        options = None if parsed.request is None else parsed.request.outrider
        wants_local = options is not None and options.policy == "local_only"
        return self.cloud.mirror is not None and not (parsed.constraints.is_private or wants_local)

    def _mirror(
        self, parsed: ParsedRequest, generation: Generation, texts: tuple[str, ...]
    ) -> None:
        """Offer a local answer's request for a second opinion."""
        answer = MirroredAnswer(
            tier=generation.tier,
            texts=texts,
            duration_s=generation.duration_s(),
            num_completion_tokens=sum(c.usage.num_tokens for c in generation.choices),
            is_private=parsed.constraints.is_private,
            finish_reason=generation.choices[0].finish_reason,
        )
        self.calls.mirror(parsed, answer)
