"""Experiments in the path of a request: what they look at, and what an assignment changes."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from outrider.gateway.answering.reading.parsed_request import ApiRequest, RequestContext
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import BudgetError, RateLimitError
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.envelope import ReadRequest
from outrider.gateway.contract.schema.kinds import AUTO, Endpoint
from outrider.gateway.contract.schema.parsing import RequestJson
from outrider.gateway.experiments.assigner import Assignment, Subject, conversation_unit
from outrider.gateway.experiments.experiments import Experiments
from outrider.gateway.settings.arm_overlay import MODEL, MODELS, SAMPLING_FIELDS, SERVICE_TIER
from outrider.gateway.tenancy.keys.keys import ANONYMOUS
from outrider.gateway.tenancy.ledger.row import MAX_LENGTHS

_NO_OPTIONS: Final = OutriderOptions()
_REFUSALS: Final = frozenset({400, 403, 404, 409, 413, 422})


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """The fields of a request that experiments look at."""

    model: str
    options: OutriderOptions | None = None
    """The request's own `outrider` object."""
    user: str = ""
    service_tier: str | None = None
    others: frozenset[str] = frozenset()
    """Further fields that it sets itself, of those that arms are about."""

    @property
    def own_fields(self) -> frozenset[str]:
        """Name the fields that the request sets itself, so that no experiment may set them."""
        options = self.options or _NO_OPTIONS
        own = {name for name in options.model_fields_set if getattr(options, name) is not None}
        if self.service_tier is not None:
            own.add(SERVICE_TIER)
        if self.model != AUTO:
            own.add(MODEL)
        return self.others.union(own)


def choosing_of(parsed: ApiRequest | ReadRequest) -> Choosing:
    """Read it from a request parsed for the local models, or from one parsed for upstream tiers."""
    if not isinstance(parsed, ReadRequest):
        return Choosing(
            model=parsed.model,
            options=parsed.outrider,
            user=parsed.end_user,
            service_tier=parsed.service_tier,
            others=frozenset(name for name in SAMPLING_FIELDS if getattr(parsed, name) is not None),
        )
    document, envelope = parsed.document, parsed.envelope
    service_tier = document.get("service_tier")
    return Choosing(
        model=envelope.model,
        options=envelope.outrider,
        user=envelope.end_user,
        service_tier=service_tier if isinstance(service_tier, str) else None,
        others=frozenset(
            name for name in (*SAMPLING_FIELDS, MODELS) if document.get(name) is not None
        ),
    )


def assignment_of(
    experiments: Experiments,
    choosing: Choosing,
    body: RequestJson,
    endpoint: Endpoint,
    context: RequestContext,
) -> Assignment | None:
    """Return the arms of a request. Raises BadRequestError for a forced arm that does not exist."""
    principal, meter = context.principal, context.meter
    conversation = ""
    registry = experiments.registry
    if registry.wants_conversation:
        conversation = conversation_unit(principal.key_id, _first_words(body))
    subject = Subject(
        key_id=principal.key_id,
        team_id=principal.team_id or "",
        user=principal.end_user or choosing.user,
        conversation=conversation,
        request_id=context.request_id,
        model=choosing.model,
        endpoint=endpoint if meter is None else meter.endpoint,
        headers=context.headers,
        own_fields=choosing.own_fields,
        tiers=principal.scopes.tiers,
        models=principal.scopes.models,
        is_admin=principal.scopes.is_admin or principal is ANONYMOUS,
    )
    if meter is None:  # the request is only planned
        return registry.assign(subject)
    return experiments.assign(subject)


def with_arms(
    context: RequestContext, assignment: Assignment, own: OutriderOptions | None
) -> RequestContext:
    """Return the context with these arms, and note them in the request's account.

    `own`: the request's own options.
    """
    if context.meter is not None:
        context.meter.arm = _kept(assignment.label)
        context.meter.arms = assignment.measured
    has_own_slo = own is not None and own.slo is not None
    has_arms_slo = "slo" in assignment.overlay.fields and not has_own_slo
    return msgspec.structs.replace(context, arm=assignment.label, has_arms_slo=has_arms_slo)


def unarmed(context: RequestContext) -> RequestContext:
    """Return the context in no arm, and note in the request's account that it is in none."""
    if context.meter is not None:
        context.meter.arm = ""
        context.meter.arms = ()
    return msgspec.structs.replace(context, is_assigned=True, assignment=None)


def overlaid(request: ApiRequest, assignment: Assignment) -> ApiRequest:
    """Return the request with the values that its arms set."""
    overlay = assignment.overlay
    changes: dict[str, Any] = {
        "outrider": overlay.merge(request.outrider),
        SERVICE_TIER: overlay.merge_service_tier(request.service_tier),
    }
    return request.model_copy(update=changes).with_defaults(overlay.sampling)


def sampled(read: ReadRequest, assignment: Assignment) -> ReadRequest:
    """Return a request for upstream tiers with the sampling fields that its arms set."""
    defaults = assignment.overlay.sampling
    new = {name: value for name, value in defaults.items() if read.document.get(name) is None}
    if not new:
        return read
    known = {name: value for name, value in new.items() if name in type(read.envelope).model_fields}
    return ReadRequest(
        envelope=read.envelope.model_copy(update=known), document={**read.document, **new}
    )


def may_be_arms_fault(assignment: Assignment | None, error: Exception) -> bool:
    """Return whether the request might be served outside its arms, which it did not ask for.

    True for refusals of what it asks for, and for limits of one tier, which an arm may have named;
    not for the failures and lack of room that experiments measure, nor for a forced arm.
    """
    if assignment is None or assignment.is_forced or not assignment.overlay.fields:
        return False
    if isinstance(error, RateLimitError | BudgetError):
        return error.tier is not None
    return problem_of(error).status in _REFUSALS


def _kept(label: str) -> str:
    """Cut to the ledger's length at whole arms: a cut name may be another's."""
    while len(label) > MAX_LENGTHS["arm"]:
        label = label.rpartition(",")[0]
    return label


def _first_words(body: RequestJson) -> str:
    """The beginning of a conversation, or the whole prompt; empty for a body that is no request."""
    try:
        document = body.document
    except ValueError:  # other parsers accept what JSON forbids
        return ""
    messages = document.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return str(message.get("content"))
    return str(document.get("prompt", ""))
