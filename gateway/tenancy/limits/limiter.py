"""The seam between a request and the counters: reserve, grow, settle."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol

import msgspec

from outrider.gateway.tenancy.keys.amounts import Amounts, LimitName, Want
from outrider.gateway.tenancy.keys.keys import Principal

Scope = Literal["key", "team", "end_user"]
"""Whose limit it is; an end user's: of each one under a key or a team."""


class LimitState(msgspec.Struct, frozen=True, kw_only=True):
    """One limit after a reservation, for headers."""

    scope: Scope
    name: LimitName
    limit: int
    """Requests, tokens, or nano-dollars."""
    remaining: int
    """In the unit of `limit`."""
    reset_s: float
    """Seconds until all of it is free again if no other request takes it."""
    model: str | None = None
    """The tier, where it is one tier's limit."""


class Reservation(Protocol):
    """The reservation of one request. Settle it exactly once; further calls do nothing.

    A charge never exceeds its reservation, and reservations are only made where the limits have
    room. So no limit is ever exceeded.
    """

    never_waits: ClassVar[bool]
    """True where its methods wait for nothing: the counters are in this process's memory."""

    @property
    def states(self) -> tuple[LimitState, ...]:
        """Return the limits that count this request, the tightest of each name first."""

    @property
    def reported(self) -> Sequence[LimitState]:
        """Return those of the states that headers tell of, in any order."""

    @property
    def reserved(self) -> Want:
        """Return the amounts that are reserved now."""

    async def count_for(self, end_user: str) -> None:
        """Count the request for an end user, too, from now on and with what it has reserved.

        Once for a request. Raises RateLimitError or BudgetError, and counts it for none.
        """

    async def grow(self, more: Want) -> bool:
        """Reserve more, all or nothing; False where a limit has no room for it. Never raises."""

    async def extend(self, more: Want) -> None:
        """Reserve more, all or nothing. Raises the errors of `Limiter.reserve`.

        Raises StorageError where the reservation is gone: it was settled, or its lease was lost.
        """

    async def settle(self, used: Mapping[str, Amounts]) -> None:
        """Give back the unused rest; `used` is by tier, at most the amounts reserved for each.

        Empty: all is given back, requests included. Raises ValueError for more than is reserved.
        """


class Limiter(Protocol):
    """Counts the usage of tenants, for one process or for several."""

    async def reserve(self, principal: Principal, want: Want) -> Reservation:
        """Reserve all or nothing, atomically over all limits of the key and its team.

        Raises RateLimitError with the wait, or BudgetError where waiting does not help soon.
        """

    async def start(self) -> None:
        """Connect, and load the usage from before this process began."""

    async def close(self) -> None:
        """Give back all open reservations, and disconnect."""
