"""Stored keys and teams, without their secrets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from outrider.gateway.tenancy.keys.amounts import NO_LIMITS, LimitSpec
from outrider.gateway.tenancy.keys.keys import Scopes, prefix_of

KeyStatus = Literal["active", "expired", "revoked"]

DEFAULT_WEIGHT: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamOrder:
    """The fields of a new team."""

    name: str
    limits: LimitSpec = NO_LIMITS
    weight: float = DEFAULT_WEIGHT
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOrder:
    """The fields of a new key. `expires_at`: seconds since 1970 (UTC); None: never."""

    name: str
    team_id: str | None = None
    scopes: Scopes = field(default_factory=Scopes)
    limits: LimitSpec = NO_LIMITS
    weight: float = DEFAULT_WEIGHT
    labels: Mapping[str, str] = field(default_factory=dict)
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamRecord(TeamOrder):
    """A team. Times are seconds since 1970 (UTC)."""

    team_id: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord(KeyOrder):
    """A key. Times are seconds since 1970 (UTC)."""

    key_id: str
    key_hash: bytes = field(repr=False)
    hashed_with: str
    """The name of its hash's secret."""
    old_hash: bytes | None = field(default=None, repr=False)
    """Accepted until `old_hash_until`."""
    old_hash_until: float | None = None
    created_at: float
    revoked_at: float | None = None

    @property
    def prefix(self) -> str:
        """Return the start of the key."""
        return prefix_of(self.key_id)

    def status(self, now_s: float) -> KeyStatus:
        """Return whether the key is valid at this time, and if not, why."""
        if self.revoked_at is not None:
            return "revoked"
        is_over = self.expires_at is not None and self.expires_at <= now_s
        return "expired" if is_over else "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """All keys and teams at one moment."""

    version: int
    """Changes when any of them does."""
    sequence: int = 0
    """Of the audit log's last row."""
    changed: frozenset[str] | None = None
    """The ids of what changed since another table, of which `keys` are; None: `keys` are all."""
    num_keys: int = 0
    """All of them, also those that cannot be read."""
    has_any: bool = False
    """True if there is a key, or was one in the other table."""
    keys: tuple[KeyRecord, ...] = ()
    teams: Mapping[str, TeamRecord] = field(default_factory=dict)
