"""A request as it came and as it was parsed, and the places that may answer it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import msgspec

from engine.events import TierInfo
from gateway.answers.responder import DIRECT, PartialAnswer, Place, RouteReason
from gateway.errors.tree import BadRequestError, PermissionDeniedError
from gateway.experiments.assigner import Assignment
from gateway.metering.meter import RequestMeter
from gateway.planning.job import ApiRequest
from gateway.planning.model_catalog import ResolvedModel
from gateway.planning.placement import NO_LOCAL, PLACES, Named, PlacementPolicy
from gateway.schema.common import OutriderOptions
from gateway.schema.kinds import Endpoint, FallbackKind, Policy
from gateway.settings.server_traits import ServerTraits
from gateway.telemetry.spans import RequestMarks, record_request
from gateway.telemetry.tracer import NULL_SPAN, Span
from gateway.tenants.keys import ANONYMOUS, Principal
from gateway.upstream.call import UpstreamCall
from gateway.upstream.dialects.base import Resume
from gateway.upstream.dialects.openai_request import is_resumable, request_body

_NO_CLOUD: Final = "this server has no upstream tier; its operator sets one in tiers"
_AS_IT_IS: Final = ServerTraits(streams_usage=False, token_limit=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConstraints:
    """The places that may answer one request.

    `places` in the order in which they are tried. `cloud`: the upstream tier that is meant where
    "cloud" is among them; else None. `strong`: the place for what the router finds too hard for the
    small model. `deadline_s` is on the gateway's clock. `reason`: why the first place is the first,
    one line of ASCII.
    """

    policy: Policy
    is_private: bool
    places: tuple[Place, ...]
    cloud: str | None
    strong: Place
    deadline_s: float | None
    reason: str

    @property
    def may_hand_over(self) -> bool:
        """True if an answer may begin here and end upstream, or be handed over before."""
        return self.places == ("local", "cloud")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The context of a request's body. `hops`: the gateways that it has passed, without this one.

    `with_trace`: the client wants to see where tokens came from. `meter`: the request's account,
    None where it is only planned. `headers` by names in lower case. `arm`: its arms of experiments
    as text. has_arms_slo: an arm set its latency objective, not the request.
    is_named_by_chain: an alias or `models` names the model, which the key may use through it.
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
    is_named_by_chain: bool = False
    span: Span = NULL_SPAN


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request, parsed for every responder.

    `request` as the local models read it, None where they may not answer. `document`, without its
    `outrider` object, and `meant` as an upstream tier gets them: only where there are such tiers;
    `model` is the one to request from its server. `origin`: why no other tier may answer.
    `assignment`: its arms of experiments. `falls_back_on`: why the next model of its chain would be
    tried; empty where there is none. `ignored_fields`: those that the local models do not get.
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
    falls_back_on: frozenset[FallbackKind] = frozenset()
    ignored_fields: tuple[str, ...] = ()

    def continues_elsewhere(self, rules: PlacementPolicy) -> bool:
        """Return whether another model may continue the answer if it breaks off."""
        wanted = rules.continue_on_failure
        if wanted is None:
            wanted = self.constraints.policy == "prefer_local" or bool(self.falls_back_on)
        has_others = len(self.constraints.places) > 1 or bool(self.falls_back_on)
        return wanted and has_others and self.is_continuable

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


def constraints_of(
    options: OutriderOptions,
    rules: PlacementPolicy,
    *,
    arrival_s: float,
    named: Named,
    cloud: str | None = None,
) -> PlacementConstraints:
    """Return the constraints of a request; `cloud` is the upstream tier that it names, if any.

    A model that is named answers alone, unless the request itself says prefer_local or
    prefer_cloud. Raises BadRequestError where the request contradicts itself, or asks for a place
    that does not exist.
    """
    tier = cloud if named == "cloud" else rules.cloud
    is_private = options.privacy == "private"
    if is_private:
        _check_private(options, rules, named, cloud)
    policy = _policy(options, rules, named)
    if options.policy is not None:
        _check_policy(options.policy, rules, named, cloud)
    places: tuple[Place, ...] = ("local",)
    if not is_private:
        exists = {"local": rules.has_local, "cloud": tier is not None}
        places = tuple(place for place in PLACES[policy] if exists[place])
    return PlacementConstraints(
        policy=policy,
        is_private=is_private,
        places=places,
        cloud=tier if "cloud" in places else None,
        strong=rules.strong if named == "auto" and rules.strong in places else places[0],
        deadline_s=_deadline(options, rules, arrival_s),
        reason=_reason(options, policy, named, is_private),
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
        case "cloud":
            return "cloud_only"


def _check_private(
    options: OutriderOptions, rules: PlacementPolicy, named: Named, cloud: str | None
) -> None:
    """Raise BadRequestError where a private request names a place that is not this machine."""
    if options.policy == "cloud_only":
        _contradicts(
            "privacy",
            "a private request stays on this machine, which outrider.policy "
            "cloud_only does not allow",
        )
    if named == "cloud":
        _contradicts(
            "privacy",
            f"a private request stays on this machine, and the {cloud} tier is an upstream server",
        )
    if not rules.has_local:
        _contradicts("privacy", f"a private request stays on this machine, but {NO_LOCAL}")


def _check_policy(policy: Policy, rules: PlacementPolicy, named: Named, cloud: str | None) -> None:
    """Raise BadRequestError if the request's policy contradicts its model or the tiers."""
    if policy == "local_only" and named == "cloud":
        _contradicts("policy", f"local_only contradicts the model, which means the {cloud} tier")
    if policy == "cloud_only" and named == "local":
        _contradicts("policy", "cloud_only contradicts the model, which is one of this machine")
    first = PLACES[policy][0]
    if first == "local" and not rules.has_local:
        _contradicts("policy", f"{policy}, but {NO_LOCAL}")
    if first == "cloud" and rules.cloud is None and named != "cloud":
        _contradicts("policy", f"{policy}, but {_NO_CLOUD}")


def _contradicts(option: str, complaint: str) -> NoReturn:
    param = f"outrider.{option}"
    raise BadRequestError(f"{param}: {complaint}.", param=param)


def _deadline(options: OutriderOptions, rules: PlacementPolicy, arrival_s: float) -> float | None:
    own_ms = options.deadline_ms
    lasts_s = rules.deadline_s if own_ms is None else own_ms / 1000
    return None if lasts_s is None else arrival_s + lasts_s


def _reason(options: OutriderOptions, policy: Policy, named: Named, is_private: bool) -> str:
    if is_private:
        return "private"
    if named != "auto" and options.policy is None:
        return "requested"
    return f"policy: {policy}"


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
    places = tuple(
        place
        for place in constraints.places
        if (
            any(scopes.allows_tier(tier) for tier in local)
            if place == "local"
            else constraints.cloud is not None and scopes.allows_tier(constraints.cloud)
        )
    )
    if not places:
        raise tier_not_allowed(constraints.cloud or " or ".join(local))
    if places == constraints.places:
        return constraints
    strong = constraints.strong if constraints.strong in places else places[0]
    cloud = constraints.cloud if "cloud" in places else None
    return replace(constraints, places=places, strong=strong, cloud=cloud)


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
