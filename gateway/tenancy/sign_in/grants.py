"""What the claims of a token grant, by the table in the settings."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from outrider.gateway.settings.sign_in import GrantSettings, IssuerSettings
from outrider.gateway.tenancy.keys.keys import Scopes

_WORDS: Final = frozenset({"scope", "scp"})
"""Claims that are lists of words (RFC 8693). Others may be texts that users write themselves."""


def matching(grants: Mapping[str, GrantSettings], claims: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the grants that a token has, in the order of the settings."""
    return tuple(name for name, grant in grants.items() if _matches(grant, claims))


def _matches(grant: GrantSettings, claims: Mapping[str, Any]) -> bool:
    if grant.claim is None:
        return True
    found = _claim(claims, grant.claim)
    if isinstance(found, str):
        words = found.split() if grant.claim in _WORDS else (found,)
        return grant.value in words
    return isinstance(found, list) and grant.value in found


def _claim(claims: Mapping[str, Any], name: str) -> object:
    """Return a claim: of exactly this name, else along its dots. None: there is none."""
    if name in claims:
        return claims[name]
    found: object = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def team_of(grants: Iterable[GrantSettings]) -> str | None:
    """Return the first team that is named."""
    return next((grant.team for grant in grants if grant.team is not None), None)


def team_claims(issuer: IssuerSettings) -> list[str]:
    """Return the claims that could have named a team."""
    named = (grant.claim for grant in issuer.grants.values() if grant.team is not None)
    return sorted({claim for claim in named if claim is not None})


def scopes_of(grants: Iterable[GrantSettings]) -> Scopes:
    """Return what several grants allow together."""
    chosen = tuple(grants)
    return Scopes(
        models=_together(grant.models for grant in chosen),
        tiers=_together(grant.tiers for grant in chosen),
        is_admin=any(grant.admin for grant in chosen),
        reads_metrics=any(grant.metrics for grant in chosen),
    )


def _together(lists: Iterable[Iterable[str] | None]) -> frozenset[str] | None:
    """Return all names of the lists; None where there is no list."""
    named = [names for names in lists if names is not None]
    return frozenset(name for names in named for name in names) if named else None
