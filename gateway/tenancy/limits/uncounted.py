"""Limits of several processes without a Redis to count them in: what has limits is refused."""

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.tenancy.keys.amounts import Want
from outrider.gateway.tenancy.keys.keys import Principal
from outrider.gateway.tenancy.limits.unlimited import Unlimited, UnlimitedReservation


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
