"""The seam between a request and the counters: reserve, grow, settle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.tenants.amounts import Amounts, LimitName, Want
from gateway.tenants.principal import Principal

Scope = Literal["key", "team"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitState:
    """One limit after a reservation, for headers. `model`: the tier, where it is one tier's limit.

    `limit` and `remaining` are requests, tokens, or nano-dollars. `reset_s`: seconds until all of
    it is free again if no other request takes it.
    """

    scope: Scope
    name: LimitName
    limit: int
    remaining: int
    reset_s: float
    model: str | None = None


class Reservation(Protocol):
    """What one request has been given. Settle it exactly once, whatever happens; again is nothing.

    What is charged never is more than what is reserved, and reservations are only given where the
    limits have room. So no limit is ever overshot.
    """

    @property
    def states(self) -> tuple[LimitState, ...]:
        """The limits that count this request, the tightest of each name first."""

    @property
    def reserved(self) -> Want:
        """What it has now."""

    async def grow(self, more: Want) -> bool:
        """Reserve more, all or nothing; False where a limit has no room for it. Never raises."""

    async def extend(self, more: Want) -> None:
        """Reserve more, all or nothing. Raises what `Limiter.reserve` raises.

        Raises StorageError where the reservation is gone: it was settled, or its lease was lost.
        """

    async def settle(self, used: Mapping[str, Amounts]) -> None:
        """Give back what was not used; `used` is by tier, at most what is reserved for each.

        Empty: all is given back, requests included. Raises ValueError for more than is reserved.
        """


class Limiter(Protocol):
    """Counts what tenants have taken, of one process or of several."""

    async def reserve(self, principal: Principal, want: Want) -> Reservation:
        """All or nothing, atomically over all limits of the key and its team.

        Raises RateLimitError with the wait, or BudgetError where waiting does not help soon.
        """

    async def start(self) -> None:
        """Connect, and learn what was used before this process began."""

    async def close(self) -> None:
        """Give back what is still reserved, and disconnect."""
