"""The places that may answer a request, their order and deadline, by options, settings and key."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NoReturn

from engine.events import TierInfo
from engine.request import Tier
from gateway.errors.tree import BadRequestError, PermissionDeniedError
from gateway.schema.common import OutriderOptions
from gateway.schema.kinds import Policy
from gateway.settings.tiers import HandoffSettings
from gateway.tenants.keys import Principal

Place = Literal["local", "cloud"]
"""Models of this machine, or an upstream tier."""
Named = Literal["auto", "local", "cloud"]
"""The meaning of a request's model: any that suits, a local model, or an upstream tier."""

_PLACES: Final[dict[Policy, tuple[Place, ...]]] = {
    "local_only": ("local",),
    "prefer_local": ("local", "cloud"),
    "prefer_cloud": ("cloud", "local"),
    "cloud_only": ("cloud",),
}
_NO_LOCAL: Final = "no model is loaded on this machine"
_NO_CLOUD: Final = "this server has no upstream tier; its operator sets one in tiers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """The settings for hand-offs.

    `policy` is for requests that name none. `cloud`: the tier that takes hand-offs; None without
    upstream tiers. `strong`: the place for what is too hard for the small model. `max_queue_s`:
    requests that would wait longer for the local models are handed over. `deadline_s`: from the
    arrival of requests that name no deadline. `continue_on_failure`: another model may continue an
    answer that broke off.
    """

    policy: Policy = "prefer_local"
    cloud: str | None = None
    has_local: bool = True
    strong: Place = "local"
    max_queue_s: float | None = None
    deadline_s: float | None = None
    continue_on_failure: bool = False

    @classmethod
    def of(
        cls, settings: HandoffSettings, *, tiers: Sequence[str], local: Collection[Tier]
    ) -> "PlacementPolicy":
        """Resolve each `auto` of the settings.

        `tiers` are the names of the upstream ones, in the file's order; `local` those that are
        loaded here. Raises ValueError, with a message, for settings that cannot be met.
        """
        cloud = settings.tier or next(iter(tiers), None)
        if cloud is not None and cloud not in tiers:
            raise ValueError(f"handoff.tier: unknown tier {cloud!r}; set tiers.{cloud}.url")
        policy: Policy
        if settings.policy == "auto":
            policy = "prefer_local" if local else "cloud_only"
        else:
            policy = settings.policy
        if _PLACES[policy][0] == "local" and not local:
            raise ValueError(f"handoff.policy: {policy}, but {_NO_LOCAL}")
        if _PLACES[policy][0] == "cloud" and cloud is None:
            raise ValueError(f"handoff.policy: {policy}, but there is no upstream tier")
        if settings.strong == "cloud" and cloud is None:
            raise ValueError("handoff.strong: cloud, but there is no upstream tier")
        if settings.strong == "local" and not local:
            raise ValueError(f"handoff.strong: local, but {_NO_LOCAL}")
        strong: Place
        if settings.strong == "auto":
            strong = "local" if "large" in local or cloud is None else "cloud"
        else:
            strong = settings.strong
        return cls(
            policy=policy,
            cloud=cloud,
            has_local=bool(local),
            strong=strong,
            max_queue_s=_seconds(settings.max_queue_ms),
            deadline_s=_seconds(settings.deadline_ms),
            continue_on_failure=settings.continue_on_failure,
        )


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
        places = tuple(place for place in _PLACES[policy] if exists[place])
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
        _contradicts("privacy", f"a private request stays on this machine, but {_NO_LOCAL}")


def _check_policy(policy: Policy, rules: PlacementPolicy, named: Named, cloud: str | None) -> None:
    """Raise BadRequestError if the request's policy contradicts its model or the tiers."""
    if policy == "local_only" and named == "cloud":
        _contradicts("policy", f"local_only contradicts the model, which means the {cloud} tier")
    if policy == "cloud_only" and named == "local":
        _contradicts("policy", "cloud_only contradicts the model, which is one of this machine")
    first = _PLACES[policy][0]
    if first == "local" and not rules.has_local:
        _contradicts("policy", f"{policy}, but {_NO_LOCAL}")
    if first == "cloud" and rules.cloud is None and named != "cloud":
        _contradicts("policy", f"{policy}, but {_NO_CLOUD}")


def _contradicts(option: str, complaint: str) -> NoReturn:
    param = f"outrider.{option}"
    raise BadRequestError(f"{param}: {complaint}.", param=param)


def _deadline(options: OutriderOptions, rules: PlacementPolicy, arrival_s: float) -> float | None:
    own = _seconds(options.deadline_ms)
    lasts_s = rules.deadline_s if own is None else own
    return None if lasts_s is None else arrival_s + lasts_s


def _reason(options: OutriderOptions, policy: Policy, named: Named, is_private: bool) -> str:
    if is_private:
        return "private"
    if named != "auto" and options.policy is None:
        return "requested"
    return f"policy: {policy}"


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


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
        raise _denied(named)
    allowed = [info for info in candidates if scopes.allows_tier(info.tier)]
    if candidates and not allowed:
        raise _denied(" or ".join(info.tier for info in candidates))
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
        raise _denied(constraints.cloud or " or ".join(local))
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


def _denied(tier: str) -> PermissionDeniedError:
    return PermissionDeniedError(f"This key may not use the {tier} tier.", code="tier_not_allowed")
