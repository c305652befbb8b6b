"""Amounts that limits count: requests, tokens, money; and the limits of a tenant."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

NANOS_PER_USD: Final = 10**9
"""Money is counted in whole billionths of a dollar, so that sums add up."""

_Count = Annotated[int, Field(ge=0, le=2**53)]
UsdLimit = Annotated[float, Field(ge=0, le=1e9)]

LimitName = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "requests_per_day",
    "tokens_per_day",
    "concurrent_requests",
    "usd_per_day",
    "usd_per_week",
    "usd_per_month",
    "usd_per_7_days",
    "usd_per_30_days",
]


class LimitSpec(BaseModel):
    """The limits of a key or a team; None is no limit, 0 admits no request.

    Minutes slide; days, weeks and months are UTC's; 7 and 30 days end today.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    requests_per_day: _Count | None = None
    tokens_per_day: _Count | None = None
    concurrent_requests: _Count | None = None
    usd_per_day: UsdLimit | None = None
    usd_per_week: UsdLimit | None = None
    usd_per_month: UsdLimit | None = None
    usd_per_7_days: UsdLimit | None = None
    usd_per_30_days: UsdLimit | None = None
    models: Mapping[str, "LimitSpec"] = Field(default_factory=dict)
    """Further limits by the name of the tier that answers, beside the ones for all of them."""
    end_user: "LimitSpec | None" = None
    """Limits of each end user by itself, over all tiers."""

    @property
    def is_empty(self) -> bool:
        """True if no limit is set."""
        return self is NO_LIMITS or self == NO_LIMITS


NO_LIMITS: Final = LimitSpec()


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of one request. `tokens` are prompt and answer together."""

    requests: int = 1
    tokens: int = 0
    usd_nanos: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a negative amount."""
        if self.requests < 0 or self.tokens < 0 or self.usd_nanos < 0:
            raise ValueError(f"amounts are never negative: {self}")


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts that a request reserves before its work starts."""

    by_tier: Mapping[str, Amounts] = msgspec.field(default_factory=dict)
    """For each tier that may answer, its usage there. Limits of all tiers together get the largest
    of them; limits of one tier get that tier's."""

    @property
    def most(self) -> Amounts:
        """Return the largest of all tiers, each amount by itself."""
        amounts = self.by_tier.values()
        if len(amounts) == 1:  # by far the most requests
            return next(iter(amounts))
        return Amounts(
            requests=max((a.requests for a in amounts), default=0),
            tokens=max((a.tokens for a in amounts), default=0),
            usd_nanos=max((a.usd_nanos for a in amounts), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PastUse:
    """The charge of one key at one tier, in a stretch of time."""

    at_s: int
    """Its beginning, whole seconds since 1970 (UTC)."""
    key_id: str
    team_id: str | None
    tier: str
    """Empty for all tiers together."""
    end_user: str = ""
    """As the ledger has it; empty where none was named."""
    requests: int
    """API requests; one that two tiers were charged for counts at each."""
    tokens: int
    usd_nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PastUses:
    """The last minute second by second, and the days of UTC that limits count now."""

    minute: tuple[PastUse, ...] = ()
    days: tuple[PastUse, ...] = ()
    end_user_days: tuple[PastUse, ...] = ()
    """Of the end users of keys and teams with limits for them: those with the largest charges."""
