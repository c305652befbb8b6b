"""Parses a request's bytes: its terms, its arms, and its latency objective."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.errors import EngineError
from gateway.answers.route_reason import RouteReason
from gateway.errors.tree import GatewayError, LoopError
from gateway.experiments.assigner import Assignment
from gateway.experiments.experiments import Experiments
from gateway.handoff.arms import (
    assignment_of,
    choosing_of,
    may_be_arms_fault,
    overlaid,
    with_arms,
)
from gateway.handoff.cloud_calls import CloudCalls
from gateway.handoff.cloud_parts import CloudParts
from gateway.handoff.live_model_catalog import LiveModelCatalog
from gateway.handoff.misplaced_options import refuse_misplaced_options, refuse_privacy_header
from gateway.handoff.parsed_request import ParsedRequest, RequestContext
from gateway.handoff.required_capabilities import describe, lacking, required_capabilities
from gateway.planning.engine_requests import ApiRequest
from gateway.planning.model_catalog import AUTO, ResolvedModel
from gateway.planning.permissions import check_model, permitted_terms
from gateway.planning.placement import PlacementConstraints, constraints_of
from gateway.schema.chat import ChatRequest
from gateway.schema.common import OutriderOptions
from gateway.schema.completions import CompletionRequest
from gateway.schema.doubled_names import refuse_doubled_names
from gateway.schema.envelope import ReadRequest, read_request
from gateway.schema.kinds import Endpoint
from gateway.schema.parsing import parse
from gateway.schema.template_variables import FIELD, read_variables
from gateway.slo.classes import SloClasses

_REQUESTS: Final[dict[Endpoint, type[ChatRequest] | type[CompletionRequest]]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
}
_NO_OPTIONS: Final = OutriderOptions()
_MAX_HOPS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Reads requests. Keeps nothing of them."""

    cloud: CloudParts
    names: LiveModelCatalog
    calls: CloudCalls
    experiments: Experiments
    classes: SloClasses
    local_tiers: tuple[str, ...]

    async def read(
        self, endpoint: Endpoint, body: bytes, incoming: RequestContext
    ) -> ParsedRequest:
        """Parse a request. Raises GatewayError.

        A request that cannot be served as its arm wants it is put in no arm.
        """
        if self.cloud.gateway_id in incoming.hops or len(incoming.hops) >= _MAX_HOPS:
            raise LoopError(
                "The request has come through this gateway before: its tiers point at each other."
                if self.cloud.gateway_id in incoming.hops
                else f"The request has come through {len(incoming.hops)} gateways."
            )
        if not self.cloud.tiers:
            return self._read_for_local(endpoint, body, incoming)
        return await self._read_for_tiers(endpoint, body, incoming)

    def _read_for_local(
        self, endpoint: Endpoint, body: bytes, incoming: RequestContext
    ) -> ParsedRequest:
        """Parse a request where there are no upstream tiers."""
        request = parse(_REQUESTS[endpoint], body)
        refuse_doubled_names(body)
        check_model(incoming.principal, request.model)
        assignment = self._assigned(request, body, endpoint, incoming)
        try:
            return self._asked_here(endpoint, request, incoming, assignment)
        except (GatewayError, EngineError) as error:
            if assignment is None or not may_be_arms_fault(assignment, error):
                raise
            asked = self._asked_here(endpoint, request, incoming, None)
            self._note(assignment, error, incoming)
            return asked

    def _asked_here(
        self,
        endpoint: Endpoint,
        request: ApiRequest,
        incoming: RequestContext,
        assignment: Assignment | None,
    ) -> ParsedRequest:
        incoming = with_arms(incoming, assignment, request.outrider)
        request = overlaid(request, assignment)
        return ParsedRequest(
            endpoint=endpoint,
            incoming=incoming,
            terms=self._terms(request.outrider or _NO_OPTIONS, request.model, None, incoming),
            request=request,
            is_streamed=bool(request.stream),
            num_choices=request.n or 1,
            token_limit=request.token_limit,
            assignment=assignment,
        )

    async def _read_for_tiers(
        self, endpoint: Endpoint, body: bytes, incoming: RequestContext
    ) -> ParsedRequest:
        read = read_request(body, endpoint)
        envelope = read.envelope
        refuse_doubled_names(body)
        if envelope.options.privacy is None:
            refuse_privacy_header(incoming.headers)
        refuse_misplaced_options(read.document)
        read_variables(read.document.get(FIELD))
        check_model(incoming.principal, envelope.model)
        assignment = self._assigned(read, body, endpoint, incoming)
        try:
            return await self._asked_anywhere(endpoint, body, read, incoming, assignment)
        except (GatewayError, EngineError) as error:
            if assignment is None or not may_be_arms_fault(assignment, error):
                raise
            asked = await self._asked_anywhere(endpoint, body, read, incoming, None)
            self._note(assignment, error, incoming)
            return asked

    async def without_arms(
        self, asked: ParsedRequest, body: bytes, incoming: RequestContext, error: Exception
    ) -> ParsedRequest | None:
        """Return the request without experiments if its arm may have led to this error.

        None where the arm is not at fault. Raises GatewayError.
        """
        assignment = asked.assignment
        if assignment is None or not may_be_arms_fault(assignment, error):
            return None
        if not self.cloud.tiers:
            plain = self._asked_here(
                asked.endpoint, parse(_REQUESTS[asked.endpoint], body), incoming, None
            )
        else:
            read = read_request(body, asked.endpoint)
            plain = await self._asked_anywhere(asked.endpoint, body, read, incoming, None)
        self._note(assignment, error, incoming)
        return plain

    async def _asked_anywhere(
        self,
        endpoint: Endpoint,
        body: bytes,
        read: ReadRequest,
        incoming: RequestContext,
        assignment: Assignment | None,
    ) -> ParsedRequest:
        envelope = read.envelope
        options = envelope.options
        if assignment is not None:
            options = assignment.overlay.merge(envelope.outrider) or options
        self._serve_under(options, read.document, incoming)
        meant = await self.names.resolve(envelope.model, options.tier)
        asked = ParsedRequest(
            endpoint=endpoint,
            incoming=with_arms(incoming, assignment, envelope.outrider),
            terms=self._terms(options, envelope.model, meant, incoming),
            is_streamed=envelope.is_streamed,
            num_choices=envelope.num_choices,
            token_limit=envelope.token_limit,
            meant=meant,
            document=read.outward(),
            max_cost_usd=options.max_cost_usd,
            assignment=assignment,
        )
        asked = self._without_impossible(asked)
        if "local" in asked.terms.places:
            request = overlaid(parse(_REQUESTS[endpoint], body), assignment)
            if meant.named == "cloud":  # a name that no local model has
                request = _for_any(request)
            asked = replace(asked, request=request)
        if "cloud" in asked.terms.places:
            names = await self.names.current()
            asked = replace(asked, model=self.calls.model(asked, names))
        return asked

    def _note(self, assignment: Assignment, error: Exception, incoming: RequestContext) -> None:
        if incoming.outcome is not None:  # None: the request is only planned
            self.experiments.left_out.note(assignment, error)

    def _assigned(
        self,
        asked: ApiRequest | ReadRequest,
        body: bytes,
        endpoint: Endpoint,
        incoming: RequestContext,
    ) -> Assignment | None:
        """The request's arms of experiments. Raises BadRequestError."""
        assigner = self.experiments.assigner
        return assignment_of(assigner, choosing_of(asked), body, endpoint, incoming)

    def _serve_under(
        self, options: OutriderOptions, document: Mapping[str, Any], incoming: RequestContext
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
        if incoming.outcome is not None:
            incoming.outcome.serve_under(resolved)

    def _terms(
        self,
        options: OutriderOptions,
        model: str,
        meant: ResolvedModel | None,
        incoming: RequestContext,
    ) -> PlacementConstraints:
        named = meant.named if meant else ("auto" if model == AUTO else "local")
        cloud = meant.tier if meant else None
        terms = constraints_of(
            options, self.cloud.rules, arrival_s=incoming.arrival_s, named=named, cloud=cloud
        )
        return permitted_terms(incoming.principal, terms, self.local_tiers)

    def _without_impossible(self, asked: ParsedRequest) -> ParsedRequest:
        """Leave out the places that cannot answer this request, as long as one is left."""
        terms = asked.terms
        if "cloud" in terms.places:
            complaint = self.calls.complaint(asked)
            if complaint is not None and "local" not in terms.places:
                raise complaint
            if complaint is not None:
                return replace(asked, terms=replace(terms, places=("local",), cloud=None))
        if terms.places and "local" in terms.places and terms.cloud is not None:
            needs = required_capabilities(asked.document, asked.endpoint)
            supports = self.cloud.tiers[terms.cloud].settings.supports
            if needs and not lacking(needs, supports):
                return replace(
                    asked,
                    terms=replace(terms, places=("cloud",)),
                    origin=RouteReason(hand_off="capability", reason=describe(needs)),
                )
        return asked


def _for_any(request: ApiRequest) -> ApiRequest:
    """The request, for any of the local models."""
    options = request.outrider and request.outrider.model_copy(update={"tier": None})
    return request.model_copy(update={"model": AUTO, "outrider": options})
