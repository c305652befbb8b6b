"""Parses a request's bytes: its constraints, its arms, and its latency objective."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.reading.arms import (
    assignment_of,
    choosing_of,
    may_be_arms_fault,
    overlaid,
    sampled,
    unarmed,
    with_arms,
)
from outrider.gateway.answering.reading.live_model_catalog import LiveModelCatalog
from outrider.gateway.answering.reading.misplaced_options import (
    refuse_misplaced_options,
    refuse_privacy_header,
)
from outrider.gateway.answering.reading.model_catalog import ResolvedModel
from outrider.gateway.answering.reading.parsed_request import (
    ApiRequest,
    LocalQuery,
    ParsedRequest,
    PlacementConstraints,
    RequestContext,
    UpstreamQuery,
    check_model,
    constraints_of,
    permitted_places,
)
from outrider.gateway.answering.reading.required_capabilities import (
    describe,
    lacking,
    required_capabilities,
)
from outrider.gateway.answering.reading.tier_checks import TierChecks
from outrider.gateway.answering.reading.upstream_parts import UpstreamParts
from outrider.gateway.contract.answers.responder import Place, RouteReason
from outrider.gateway.contract.errors.tree import GatewayError, LoopError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.envelope import ReadRequest, read_request
from outrider.gateway.contract.schema.kinds import AUTO, Endpoint
from outrider.gateway.contract.schema.parsing import (
    RequestJson,
    refuse_doubled_names,
    yield_if_long,
)
from outrider.gateway.contract.schema.template_variables import FIELD, read_variables
from outrider.gateway.contract.schema.unknown_fields import read_known
from outrider.gateway.experiments.assigner import ARM_HEADER, Assignment
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.experiments.slo.classes import SloClasses

_REQUESTS: Final[dict[Endpoint, type[ChatRequest] | type[CompletionRequest]]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
}
_NO_OPTIONS: Final = OutriderOptions()
_MAX_HOPS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Reads requests. Keeps nothing of them."""

    upstreams: UpstreamParts
    names: LiveModelCatalog
    checks: TierChecks
    experiments: Experiments
    classes: SloClasses
    local_tiers: tuple[str, ...]
    ignores_unknown: bool = False
    fills_in: bool = True
    """A local model has tokens for text in the middle."""

    async def read(
        self, endpoint: Endpoint, body: RequestJson, context: RequestContext
    ) -> ParsedRequest:
        """Parse a request. Raises GatewayError.

        A request that cannot be served as its arm wants it is put in no arm.
        """
        if self.upstreams.gateway_id in context.hops or len(context.hops) >= _MAX_HOPS:
            raise LoopError(
                "The request has come through this gateway before: its tiers point at each other."
                if self.upstreams.gateway_id in context.hops
                else f"The request has come through {len(context.hops)} gateways."
            )
        if not self.upstreams.tiers:
            return await self._read_for_local(endpoint, body, context)
        return await self._read_for_tiers(endpoint, body, context)

    async def _read_for_local(
        self, endpoint: Endpoint, body: RequestJson, context: RequestContext
    ) -> ParsedRequest:
        """Parse a request where there are no upstream tiers."""
        request, ignored = read_known(_REQUESTS[endpoint], None, body.raw, self.ignores_unknown)
        await yield_if_long(body.raw)
        refuse_doubled_names(body.raw)
        _check_model(context, request.model)
        if context.meter is not None:
            await context.meter.count_for(request.end_user)
        assignment = self._assigned(request, body, endpoint, context)
        parsing = partial(self._parsed_for_local, endpoint, body, request, ignored)
        return await self._in_its_arms(assignment, parsing, context)

    async def _in_its_arms(
        self,
        assignment: Assignment | None,
        parsing: Callable[[RequestContext, Assignment | None], Awaitable[ParsedRequest]],
        context: RequestContext,
    ) -> ParsedRequest:
        """Parse the request in its arms, or in none where it cannot be served in them."""
        try:
            return await parsing(context, assignment)
        except (GatewayError, EngineError) as error:
            if assignment is None or not may_be_arms_fault(assignment, error):
                raise
            if assignment.overlay.model is not None:
                raise  # the body names the arm's model: the planner has the client's
            parsed = await parsing(unarmed(context), None)
            self.note_left_out(assignment, error, context)
            return parsed

    async def _parsed_for_local(
        self,
        endpoint: Endpoint,
        body: RequestJson,
        request: ApiRequest,
        ignored: tuple[str, ...],
        context: RequestContext,
        assignment: Assignment | None,
    ) -> ParsedRequest:
        if assignment is not None:
            context = with_arms(context, assignment, request.outrider)
            request = overlaid(request, assignment)
        options = request.outrider or _NO_OPTIONS
        return ParsedRequest(
            endpoint=endpoint,
            context=context,
            constraints=self._constraints(options, request.model, None, context),
            queries=(LocalQuery(request=request, ignored_fields=ignored),),
            body=body,
            outward=body,
            options=options,
            is_streamed=bool(request.stream),
            num_choices=request.n or 1,
            token_limit=request.token_limit,
            assignment=assignment,
        )

    async def _read_for_tiers(
        self, endpoint: Endpoint, body: RequestJson, context: RequestContext
    ) -> ParsedRequest:
        read = read_request(body, endpoint)
        envelope = read.envelope
        await yield_if_long(body.raw)
        refuse_doubled_names(body.raw)
        if envelope.options.privacy is None:
            refuse_privacy_header(context.headers)
        await yield_if_long(body.raw)
        refuse_misplaced_options(read.document)
        await yield_if_long(body.raw)
        read_variables(read.document.get(FIELD))
        _check_model(context, envelope.model)
        if context.meter is not None:
            await context.meter.count_for(envelope.end_user)
        assignment = self._assigned(read, body, endpoint, context)
        parsing = partial(self._parsed_for_tiers, endpoint, body, read)
        return await self._in_its_arms(assignment, parsing, context)

    async def _parsed_for_tiers(
        self,
        endpoint: Endpoint,
        body: RequestJson,
        read: ReadRequest,
        context: RequestContext,
        assignment: Assignment | None,
    ) -> ParsedRequest:
        if assignment is not None:
            read = sampled(read, assignment)
        envelope = read.envelope
        options = envelope.options
        if assignment is not None:
            options = assignment.overlay.merge(envelope.outrider) or options
            context = with_arms(context, assignment, envelope.outrider)
        self._serve_under(options, read.document, context)
        resolved = await self.names.resolve(envelope.model, options.tier, context.principal.scopes)
        parsed = ParsedRequest(
            endpoint=endpoint,
            context=context,
            constraints=self._constraints(options, envelope.model, resolved, context),
            queries=(),
            body=body,
            outward=RequestJson(document=read.outward()),
            options=options,
            is_streamed=envelope.is_streamed,
            num_choices=envelope.num_choices,
            token_limit=envelope.token_limit,
            assignment=assignment,
        )
        upstream_queries = await self._upstream_queries(parsed.constraints, resolved)
        parsed = self._without_impossible(parsed, upstream_queries)
        await yield_if_long(body.raw)
        queries = tuple(
            upstream_queries.get(place) or self._local_query(parsed, body, read, resolved)
            for place in parsed.constraints.places
        )
        return msgspec.structs.replace(parsed, queries=queries)

    async def _upstream_queries(
        self, constraints: PlacementConstraints, resolved: ResolvedModel
    ) -> dict[Place, UpstreamQuery]:
        """Return what the upstream tiers among the places are asked."""
        queries: dict[Place, UpstreamQuery] = {}
        tiers: dict[Place, str | None] = {
            "small_upstream": constraints.small,
            "upstream": constraints.upstream_tier,
        }
        for place, tier in tiers.items():
            if tier is not None:
                names = await self.names.current()
                queries[place] = UpstreamQuery(
                    tier=tier,
                    model=resolved.model if tier == resolved.tier else names.usual_model(tier),
                    resolved=resolved,
                    has_small_model=tier == constraints.small,
                )
        return queries

    def _local_query(
        self, parsed: ParsedRequest, body: RequestJson, read: ReadRequest, resolved: ResolvedModel
    ) -> LocalQuery:
        """Return what the local models are asked. Raises BadRequestError."""
        request, ignored = read_known(
            _REQUESTS[parsed.endpoint], read.document, body.raw, self.ignores_unknown
        )
        if parsed.assignment is not None:
            request = overlaid(request, parsed.assignment)
        if resolved.tier is not None:  # a name that no local model has
            request = _for_any(request)
        return LocalQuery(request=request, ignored_fields=ignored)

    def note_left_out(
        self, assignment: Assignment, error: Exception, context: RequestContext
    ) -> None:
        """Count a request that is served outside its arms, which led to this error."""
        if context.meter is not None:  # None: the request is only planned
            self.experiments.left_out.note(assignment, error)

    def _assigned(
        self,
        parsed: ApiRequest | ReadRequest,
        body: RequestJson,
        endpoint: Endpoint,
        context: RequestContext,
    ) -> Assignment | None:
        """The request's arms of experiments. Raises BadRequestError."""
        if context.is_assigned:
            return context.assignment
        registry = self.experiments.registry
        if registry.assigner is None and ARM_HEADER not in context.headers:
            return None
        return assignment_of(self.experiments, choosing_of(parsed), body, endpoint, context)

    def _serve_under(
        self, options: OutriderOptions, document: Mapping[str, Any], context: RequestContext
    ) -> None:
        """Note the request's latency objective for any tier. Raises BadRequestError.

        The local models know its token counts, and note it again.
        """
        service_tier = document.get("service_tier")
        resolved = self.classes.resolve(
            options,
            has_tools=bool(document.get("tools")),
            service_tier=service_tier if isinstance(service_tier, str) else None,
        )
        if context.meter is not None:
            context.meter.serve_under(resolved.class_name, resolved.objective)

    def _constraints(
        self,
        options: OutriderOptions,
        model: str,
        resolved: ResolvedModel | None,
        context: RequestContext,
    ) -> PlacementConstraints:
        named = resolved.named if resolved else ("auto" if model == AUTO else "local")
        constraints = constraints_of(
            options,
            self.upstreams.rules,
            arrival_s=context.arrival_s,
            named=named,
            upstream_tier=resolved.tier if resolved else None,
        )
        return permitted_places(context.principal, constraints, self.local_tiers)

    def _without_impossible(
        self, parsed: ParsedRequest, upstream_queries: Mapping[Place, UpstreamQuery]
    ) -> ParsedRequest:
        """Leave out the places that cannot answer this request, as long as one is left."""
        for place, query in upstream_queries.items():
            complaint = self.checks.complaint(parsed, query)
            if complaint is None:
                continue
            left = tuple(other for other in parsed.constraints.places if other != place)
            if not left:
                raise complaint
            parsed = msgspec.structs.replace(
                parsed, constraints=parsed.constraints.restricted(left)
            )
        constraints = parsed.constraints
        if "local" in constraints.places and constraints.upstream_tier is not None:
            needs = required_capabilities(parsed.document, parsed.endpoint, fills_in=self.fills_in)
            supports = self.upstreams.tiers[constraints.upstream_tier].settings.supports
            if needs and not lacking(needs, supports):
                return msgspec.structs.replace(
                    parsed,
                    constraints=constraints.restricted(("upstream",)),
                    origin=RouteReason(hand_off="capability", reason=describe(needs)),
                )
        return parsed


def _check_model(context: RequestContext, name: str) -> None:
    """Raise PermissionDeniedError for a model that the key may not name."""
    if not context.is_named_by_chain:
        check_model(context.principal, name)


def _for_any(request: ApiRequest) -> ApiRequest:
    """The request, for any of the local models."""
    options = request.outrider and request.outrider.model_copy(update={"tier": None})
    return request.model_copy(update={"model": AUTO, "outrider": options})
