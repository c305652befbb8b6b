"""A request as it came, and as it was parsed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from gateway.answers.responder import DIRECT, PartialAnswer, RouteReason
from gateway.experiments.assigner import Assignment
from gateway.metering.meter import RequestMeter
from gateway.planning.job import ApiRequest
from gateway.planning.model_catalog import ResolvedModel
from gateway.planning.placement import PlacementConstraints
from gateway.schema.kinds import Endpoint
from gateway.settings.server_traits import ServerTraits
from gateway.telemetry.spans import RequestMarks, record_request
from gateway.telemetry.tracer import NULL_SPAN, Span
from gateway.tenants.keys import ANONYMOUS, Principal
from gateway.upstream.call import UpstreamCall
from gateway.upstream.dialects.base import Resume
from gateway.upstream.dialects.openai_request import is_resumable, request_body

_AS_IT_IS: Final = ServerTraits(streams_usage=False, token_limit=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The context of a request's body. `hops`: the gateways that it has passed, without this one.

    `with_trace`: the client wants to see where tokens came from. `meter`: the request's account,
    None where it is only planned. `headers` by names in lower case. `arm`: its arms of experiments
    as text. has_arms_slo: an arm set its latency objective, not the request.
    """

    arrival_s: float
    request_id: str
    hops: tuple[str, ...] = ()
    with_trace: bool = False
    principal: Principal = ANONYMOUS
    meter: RequestMeter | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    arm: str = ""
    has_arms_slo: bool = False
    span: Span = NULL_SPAN


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request, parsed for every responder.

    `request` as the local models read it, None where they may not answer. `document`, without its
    `outrider` object, and `meant` as an upstream tier gets them: only where there are such tiers;
    `model` is the one to request from its server. `origin`: why no other tier may answer.
    `assignment`: its arms of experiments.
    """

    endpoint: Endpoint
    context: RequestContext
    constraints: PlacementConstraints
    is_streamed: bool
    num_choices: int
    token_limit: int | None = None
    request: ApiRequest | None = None
    meant: ResolvedModel | None = None
    document: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    max_cost_usd: float | None = None
    origin: RouteReason = DIRECT
    assignment: Assignment | None = None

    @property
    def is_continuable(self) -> bool:
        """Return whether another model can continue in the middle of the answer."""
        return self.is_streamed and is_resumable(self._call(), "final_message")

    def continued(self, unfinished: PartialAnswer) -> "ParsedRequest":
        """Return the request for the rest of an answer that broke off."""
        resume = Resume(
            text=unfinished.text, num_tokens=unfinished.num_tokens, strategy="final_message"
        )
        body = request_body(self._call(), _AS_IT_IS, resume)
        request = self.request
        if request is not None:
            request = type(request).model_validate_json(body)
            assert self.request is not None
            kept = {"model": self.request.model, "outrider": self.request.outrider}
            request = request.model_copy(update=kept)
        return replace(self, document=msgspec.json.decode(body), request=request)

    def _call(self) -> UpstreamCall:
        return UpstreamCall(
            endpoint=self.endpoint,
            document=self.document,
            model=str(self.document.get("model")),
            request_id=self.context.request_id,
            arrival_s=self.context.arrival_s,
        )


def trace_request(parsed: ParsedRequest) -> None:
    """Note on the request's span what it asks for, without any of its text."""
    context = parsed.context
    if not context.span.is_recording:
        return
    request, document = parsed.request, parsed.document
    record_request(
        context.span,
        RequestMarks(
            request_id=context.request_id,
            model=str(document.get("model", "")) if request is None else request.model,
            operation="chat" if parsed.endpoint == "chat" else "text_completion",
            key_id=context.principal.key_id,
            team_id=context.principal.team_id,
            is_streamed=parsed.is_streamed,
            num_choices=parsed.num_choices,
            max_tokens=parsed.token_limit,
            temperature=None if request is None else request.temperature,
            top_p=None if request is None else request.top_p,
        ),
    )
