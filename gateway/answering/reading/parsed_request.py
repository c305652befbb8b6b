"""A request as it came and as it was parsed, and the places that may answer it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import msgspec

from outrider.engine.events import TierInfo
from outrider.gateway.answering.reading.model_catalog import ResolvedModel
from outrider.gateway.answering.reading.placement_policy import (
    NO_LOCAL,
    PLACES,
    Named,
    PlacementPolicy,
)
from outrider.gateway.contract.answers.responder import (
    DIRECT,
    AnswerCheck,
    PartialAnswer,
    Place,
    RouteReason,
)
from outrider.gateway.contract.errors.tree import BadRequestError, PermissionDeniedError
from outrider.gateway.contract.schema.chat import ChatRequest
from outrider.gateway.contract.schema.common import OutriderOptions
from outrider.gateway.contract.schema.completions import CompletionRequest
from outrider.gateway.contract.schema.kinds import Endpoint, FallbackKind, Policy
from outrider.gateway.contract.schema.parsing import RequestJson
from outrider.gateway.experiments.assigner import Assignment
from outrider.gateway.settings.server_traits import ServerTraits
from outrider.gateway.telemetry.spans import RequestMarks, record_request
from outrider.gateway.telemetry.tracer import NULL_SPAN, Span
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal
from outrider.gateway.tenancy.metering.meter import RequestMeter
from outrider.gateway.upstream.call import UpstreamCall
from outrider.gateway.upstream.dialects.base import Resume
from outrider.gateway.upstream.dialects.openai_request import is_resumable, request_body
from outrider.router.tier_policy import TierRoute

_NO_UPSTREAM: Final = "this server has no upstream tier; its operator sets one in tiers"
_AS_IT_IS: Final = ServerTraits(streams_usage=False, token_limit=None)

ApiRequest = ChatRequest | CompletionRequest


class PlacementConstraints(msgspec.Struct, frozen=True, kw_only=True):
    """The places that may answer one request, in the order in which they are tried."""

    policy: Policy
    is_private: bool
    places: tuple[Place, ...]
    upstream_tier: str | None
    """The upstream tier that is resolved where "upstream" is among the places; else None."""
    strong_place: Place
    """The place for what the router finds too hard for the small model."""
    deadline_s: float | None
    """On the gateway's clock."""
    reason: str
    """Why the first place is the first, one line of ASCII."""
    is_requested: bool = False
    """The request names its model, and no policy."""
    small: str | None = None
    """The small model's upstream tier, where "small_upstream" is among the places."""

    def restricted(self, places: tuple[Place, ...]) -> "PlacementConstraints":
        """Return the constraints with some of the places, at least one."""
        return msgspec.structs.replace(
            self,
            places=places,
            strong_place=self.strong_place if self.strong_place in places else places[0],
            upstream_tier=self.upstream_tier if "upstream" in places else None,
            small=self.small if "small_upstream" in places else None,
        )

    @property
    def may_hand_off(self) -> bool:
        """True if an answer may begin here and end upstream, or be handed off before."""
        return self.places == ("local", "upstream")


class RequestContext(msgspec.Struct, frozen=True, kw_only=True):
    """The facts known of a request beside its body."""

    arrival_s: float
    request_id: str
    hops: tuple[str, ...] = ()
    """The gateways that it has passed, without this one."""
    with_trace: bool = False
    """The client wants to see where tokens came from."""
    principal: Principal = ANONYMOUS
    meter: RequestMeter | None = None
    """The request's account; None where it is only planned."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By names in lower case."""
    arm: str = ""
    """Its arms of experiments, as text."""
    has_arms_slo: bool = False
    """An arm set its latency objective, not the request."""
    is_named_by_chain: bool = False
    """An alias or `models` names the model, which the key may use through it."""
    is_assigned: bool = False
    """`assignment` is known, by the model that the client named."""
    assignment: Assignment | None = None
    span: Span = NULL_SPAN
    ignored_fields: tuple[str, ...] = ()
    """Fields of another API's request that its translation has left out."""
    begins_with_usage: bool = False
    """Another API's writer wants the prompt's tokens in the first chunk of a stream."""
    check: AnswerCheck | None = None
    """Checks the answer on its way to the client; None where no check is for the request."""


class LocalQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the form that this gateway's engine answers."""

    request: ApiRequest
    ignored_fields: tuple[str, ...] = ()
    """The client's fields that these models do not get."""

    def for_rest(self, rest: RequestJson) -> ApiRequest:
        """Return the request for the rest of an answer, for which this JSON asks."""
        request = type(self.request).model_validate_json(rest.raw)
        kept = {"model": self.request.model, "outrider": self.request.outrider}
        return request.model_copy(update=kept)


class UpstreamQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the form that a server gets: the `document`, for one of the server's models."""

    tier: str
    model: str | None
    """The model to request from the server; None while it has not said which ones it has."""
    resolved: ResolvedModel
    """The model or alias that the client named, resolved."""
    has_small_model: bool = False
    """It is the small model's server, for which the router decides."""


Query = LocalQuery | UpstreamQuery


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was read, with a query for each place that may answer it."""

    endpoint: Endpoint
    context: RequestContext
    constraints: PlacementConstraints
    queries: tuple[Query, ...]
    """One for each place, in their order; at least one."""
    body: RequestJson
    """As the client sent it, but for the model's name where its arm or its alias names one."""
    outward: RequestJson
    """As servers get it, without its `outrider` object; the same where there are no servers."""
    options: OutriderOptions
    """Its `outrider` object, with its arms'."""
    is_streamed: bool
    num_choices: int
    token_limit: int | None = None
    origin: RouteReason = DIRECT
    """Why the first place is the first."""
    chain_reason: RouteReason = DIRECT
    """Why the model before it in its chain did not answer."""
    assignment: Assignment | None = None
    falls_back_on: frozenset[FallbackKind] = frozenset()
    """Why the next model of its chain would be tried; empty where there is none."""
    next_models: tuple[str, ...] = ()
    """The further models of its chain."""
    route: TierRoute | None = None
    """The decision of its alias's router."""

    def most_tokens(self, default: int) -> int:
        """Return the most tokens that a choice may have, where `default` is without a limit."""
        return default if self.token_limit is None else self.token_limit

    @property
    def document(self) -> Mapping[str, Any]:
        """Return the request's object, as servers get it."""
        return self.outward.document

    @property
    def local(self) -> LocalQuery | None:
        """Return the query of the local models; None where they may not answer."""
        return next((query for query in self.queries if isinstance(query, LocalQuery)), None)

    @property
    def upstream_model(self) -> str | None:
        """Return the model of the upstream tier that may answer; None where none is known."""
        asked = (query for query in self.queries if isinstance(query, UpstreamQuery))
        return next((query.model for query in asked if not query.has_small_model), None)

    def continues_elsewhere(self, rules: PlacementPolicy) -> bool:
        """Return whether another model may continue the answer if it breaks off."""
        wanted = rules.continue_on_failure
        if wanted is None:
            wanted = self.constraints.policy == "prefer_local" or bool(self.falls_back_on)
        has_others = len(self.queries) > 1 or bool(self.falls_back_on)
        may_be = wanted and has_others and self.is_streamed
        return may_be and is_resumable(self._call(), "final_message")

    def rest_after(self, unfinished: PartialAnswer) -> RequestJson:
        """Return the JSON that asks for the rest of an answer that broke off."""
        resume = Resume(
            text=unfinished.text, num_tokens=unfinished.num_tokens, strategy="final_message"
        )
        return RequestJson(request_body(self._call(), _AS_IT_IS, resume))

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
    request = None if parsed.local is None else parsed.local.request
    record_request(
        context.span,
        RequestMarks(
            request_id=context.request_id,
            model=str(parsed.document.get("model", "")) if request is None else request.model,
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


def constraints_of(
    options: OutriderOptions,
    rules: PlacementPolicy,
    *,
    arrival_s: float,
    named: Named,
    upstream_tier: str | None = None,
) -> PlacementConstraints:
    """Return the constraints of a request; `upstream_tier` is the one that it names, if any.

    A model that is named answers alone, unless the request itself says prefer_local or
    prefer_cloud. Raises BadRequestError where the request contradicts itself, or asks for a place
    that does not exist.
    """
    tier = upstream_tier if named == "upstream" else rules.upstream_tier
    is_private = options.privacy == "private"
    is_requested = named != "auto" and options.policy is None and not is_private
    if is_private:
        _check_private(options, rules, named, upstream_tier)
    policy = _policy(options, rules, named)
    if options.policy is not None:
        _check_policy(options.policy, rules, named, upstream_tier)
    stays_here = is_private or policy == "local_only"
    exists: dict[Place, bool] = {
        "small_upstream": named == "auto"
        and rules.small is not None
        and (rules.is_small_on_device or not stays_here),
        "local": rules.has_local,
        "upstream": tier is not None and (not is_private or tier in rules.on_device),
    }
    order = PLACES["prefer_local" if is_private else policy]
    places = tuple(place for place in order if exists[place])
    if not places and exists["upstream"] and tier in rules.on_device:
        places = ("upstream",)  # its server is on this device
    if rules.strong_place == "upstream" and places == PLACES["prefer_local"]:
        places = ("small_upstream", "upstream", "local")
    if not places:
        _contradicts("policy", f"{policy}, but {NO_LOCAL}")
    is_open = named == "auto" and rules.strong_place in places
    return PlacementConstraints(
        policy=policy,
        is_private=is_private,
        places=places,
        upstream_tier=tier if "upstream" in places else None,
        small=rules.small if "small_upstream" in places else None,
        strong_place=rules.strong_place if is_open else places[0],
        deadline_s=_deadline(options, rules, arrival_s),
        reason=_reason(policy, is_private=is_private, is_requested=is_requested),
        is_requested=is_requested,
    )


def _policy(options: OutriderOptions, rules: PlacementPolicy, named: Named) -> Policy:
    """The policy that holds: the request's own, else its model's, else the configured one."""
    if options.policy is not None:
        return options.policy
    match named:
        case "auto":
            return rules.policy
        case "local":
            return "local_only"
        case "upstream":
            return "cloud_only"


def _check_private(
    options: OutriderOptions, rules: PlacementPolicy, named: Named, upstream_tier: str | None
) -> None:
    """Raise BadRequestError where a private request names a place that is not this machine."""
    if options.policy == "cloud_only":
        _contradicts(
            "privacy",
            "a private request stays on this machine, which outrider.policy "
            "cloud_only does not allow",
        )
    if named == "upstream" and upstream_tier not in rules.on_device:
        _contradicts(
            "privacy",
            f"a private request stays on this machine, and the {upstream_tier} tier is an upstream "
            f"server that is not marked as local (tiers.{upstream_tier}.local)",
        )
    if not rules.answers_here:
        _contradicts("privacy", f"a private request stays on this machine, but {NO_LOCAL}")


def _check_policy(
    policy: Policy, rules: PlacementPolicy, named: Named, upstream_tier: str | None
) -> None:
    """Raise BadRequestError if the request's policy contradicts its model or the tiers."""
    is_here = upstream_tier is not None and upstream_tier in rules.on_device
    if policy == "local_only" and named == "upstream" and not is_here:
        _contradicts(
            "policy", f"local_only contradicts the model, which means the {upstream_tier} tier"
        )
    if policy == "cloud_only" and named == "local":
        _contradicts("policy", "cloud_only contradicts the model, which is one of this machine")
    answers_first = rules.answers_here or (policy == "prefer_local" and rules.small is not None)
    if policy in ("local_only", "prefer_local") and not answers_first:
        _contradicts("policy", f"{policy}, but {NO_LOCAL}")
    if PLACES[policy][0] == "upstream" and rules.upstream_tier is None and named != "upstream":
        _contradicts("policy", f"{policy}, but {_NO_UPSTREAM}")


def _contradicts(option: str, complaint: str) -> NoReturn:
    param = f"outrider.{option}"
    raise BadRequestError(f"{param}: {complaint}.", param=param)


def _deadline(options: OutriderOptions, rules: PlacementPolicy, arrival_s: float) -> float | None:
    own_ms = options.deadline_ms
    lasts_s = rules.deadline_s if own_ms is None else own_ms / 1000
    return None if lasts_s is None else arrival_s + lasts_s


def _reason(policy: Policy, *, is_private: bool, is_requested: bool) -> str:
    if is_private:
        return "private"
    return "requested" if is_requested else f"policy: {policy}"


def check_model(principal: Principal, name: str) -> None:
    """Raise PermissionDeniedError for a model that the key may not name."""
    if not principal.scopes.allows_model(name):
        allowed = ", ".join(sorted(principal.scopes.models or ())) or "no model"
        raise PermissionDeniedError(
            f"This key may not use the model {name!r}; allowed: {allowed}.",
            param="model",
            code="model_not_allowed",
        )


def permitted(
    principal: Principal, candidates: Sequence[TierInfo], named: str | None
) -> Sequence[TierInfo]:
    """Return the local models that may answer this key; `named` is the tier that the request names.

    Raises PermissionDeniedError where none may.
    """
    scopes = principal.scopes
    if named is not None and not scopes.allows_tier(named):
        raise tier_not_allowed(named)
    allowed = [info for info in candidates if scopes.allows_tier(info.tier)]
    if candidates and not allowed:
        raise tier_not_allowed(" or ".join(info.tier for info in candidates))
    return allowed


def permitted_places(
    principal: Principal, constraints: PlacementConstraints, local: Sequence[str]
) -> PlacementConstraints:
    """Leave out the places where no tier may answer this key; `local` are this machine's tiers.

    Raises PermissionDeniedError where none is left.
    """
    scopes = principal.scopes
    if scopes.tiers is None:
        return constraints
    tiers: Mapping[Place, Sequence[str | None]] = {
        "local": local,
        "small_upstream": (constraints.small,),
        "upstream": (constraints.upstream_tier,),
    }
    places = tuple(
        place
        for place in constraints.places
        if any(scopes.allows_tier(tier or "") for tier in tiers[place])
    )
    if not places:
        raise tier_not_allowed(constraints.upstream_tier or constraints.small or " or ".join(local))
    return constraints.restricted(places)


def without_tier(
    principal: Principal, tier: str | None, local: Collection[str]
) -> Principal | None:
    """Return the same key without one of the `local` tiers; None where no other would be left."""
    if tier is None or tier not in local:
        return None
    left = frozenset(name for name in local if name != tier and principal.scopes.allows_tier(name))
    if not left:
        return None
    return replace(principal, scopes=replace(principal.scopes, tiers=left))


def tier_not_allowed(tier: str) -> PermissionDeniedError:
    """Return the error of a key that may not use a tier."""
    return PermissionDeniedError(f"This key may not use the {tier} tier.", code="tier_not_allowed")
