"""The principal of a request, and its scopes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.tenants.amounts import NO_LIMITS, LimitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Scopes:
    """The permissions of a key. None: every model, every tier.

    `models` are names as requests write them (`auto`, a checkpoint, `cloud/NAME`); `tiers` are
    local and upstream tiers that may answer, for any requested name. `reads_metrics` allows
    /metrics, as `is_admin` does.
    """

    models: frozenset[str] | None = None
    tiers: frozenset[str] | None = None
    is_admin: bool = False
    reads_metrics: bool = False

    def allows_model(self, name: str) -> bool:
        """Return whether requests may name this model."""
        return self.models is None or name in self.models

    def allows_tier(self, name: str) -> bool:
        """Return whether this tier may answer."""
        return self.tiers is None or name in self.tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """One key, as a request needs to know it.

    `key_id` and `team_id` are public ids, never the secret. `tenant` shares a queue's fairness and
    a prefix cache: the team, or the key where it is in none. `cache_salt` separates prefix caches;
    empty where tenants are not isolated. `weight`: its share of a full queue, against others.
    """

    key_id: str
    name: str
    tenant: str
    team_id: str | None = None
    scopes: Scopes = field(default_factory=Scopes)
    limits: LimitSpec = NO_LIMITS
    team_limits: LimitSpec = NO_LIMITS
    cache_salt: str = ""
    weight: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    is_limited: bool = field(init=False, compare=False, default=False)
    """True if any limit counts the usage of this tenant."""

    def __post_init__(self) -> None:
        """Find out once whether there are limits: every request needs to know."""
        has_limits = not (self.limits.is_empty and self.team_limits.is_empty)
        object.__setattr__(self, "is_limited", has_limits)


ANONYMOUS: Final = Principal(key_id="anonymous", name="anonymous", tenant="anonymous")
"""The principal of every request while no key exists. It has no admin scope."""
