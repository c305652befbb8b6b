"""Reservations of principals without limits."""

from collections.abc import Mapping
from typing import ClassVar

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.tenancy.keys.amounts import Amounts, Want
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.limit_rules import Holding
from outrider.gateway.tenancy.limits.limiter import LimitState


class UnlimitedReservation:
    """A reservation without bounds. It keeps the rules of settling all the same."""

    __slots__ = ("_is_settled", "_want")
    never_waits: ClassVar[bool] = True

    def __init__(self, want: Want) -> None:
        self._want = want
        self._is_settled = False

    @property
    def states(self) -> tuple[LimitState, ...]:
        """Return no limits."""
        return ()

    @property
    def reported(self) -> tuple[LimitState, ...]:
        """Return no limits."""
        return ()

    @property
    def reserved(self) -> Want:
        """Return the amounts that are reserved now."""
        return self._want

    async def count_for(self, end_user: str) -> None:
        """Do nothing."""

    async def grow(self, more: Want) -> bool:
        """Reserve more; False once it is settled."""
        if self._is_settled:
            return False
        await self.extend(more)
        return True

    async def extend(self, more: Want) -> None:
        """Reserve more; there is always room."""
        holding = Holding(self._want.by_tier, self._want.most)
        holding.add(*holding.growth(more))
        self._want = Want(by_tier=holding.by_tier)

    async def settle(self, used: Mapping[str, Amounts]) -> None:
        """Do nothing. Raises ValueError for more than is reserved at one of the tiers."""
        if self._is_settled:
            return
        self._is_settled = True
        for tier, amounts in used.items():
            held = self._want.by_tier.get(tier)
            if held is None or amounts.tokens > held.tokens or amounts.usd_nanos > held.usd_nanos:
                raise ValueError(f"more than is reserved: tier {tier!r}: {amounts} of {held}")


class Unlimited:
    """A limiter that counts nothing."""

    async def reserve(self, principal: Principal, want: Want) -> UnlimitedReservation:
        """Reserve without any check."""
        return UnlimitedReservation(want)

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class UncountedLimits(Unlimited):
    """Serves principals without limits, and never others: no process knows what the others do."""

    async def reserve(self, principal: Principal, want: Want) -> UnlimitedReservation:
        """Reserve without any check. Raises StorageError for a principal with limits."""
        if principal.is_limited:
            raise StorageError(
                "This key has limits, which a gateway with several processes (server.workers) can "
                "count only in Redis: its operator has to set redis_url, or start it with one "
                "process."
            )
        return await super().reserve(principal, want)
