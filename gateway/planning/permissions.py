"""The rights of a key: models that it may name, and tiers that may answer it."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.events import TierInfo
from gateway.errors.tree import PermissionDeniedError
from gateway.planning.placement import PlacementConstraints
from gateway.tenants.principal import Principal


def check_model(principal: Principal, name: str) -> None:
    """Raise PermissionDeniedError for a model that the key may not name."""
    if not principal.scopes.allows_model(name):
        allowed = ", ".join(sorted(principal.scopes.models or ())) or "no model"
        raise PermissionDeniedError(
            f"This key may not ask for the model {name!r}; it may ask for {allowed}.",
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
    return PermissionDeniedError(
        f"This key may not be answered by the {tier} tier.", code="tier_not_allowed"
    )
