"""The upstream tiers, and the rules by which requests are handed off to them."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from outrider.gateway.answering.reading.placement_policy import PlacementPolicy
from outrider.gateway.contract.schema.kinds import ModelState
from outrider.gateway.upstream.mirror import Mirror
from outrider.gateway.upstream.on_demand.pool import ModelPool
from outrider.gateway.upstream.small_server import SmallServer
from outrider.gateway.upstream.tier import UpstreamTier
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics


def _unexported_metrics() -> UpstreamMetrics:
    return UpstreamMetrics(CollectorRegistry())


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamParts:
    """The upstream tiers in the order of the settings, and the rules by which they answer."""

    tiers: Mapping[str, UpstreamTier] = field(default_factory=dict)
    rules: PlacementPolicy = field(default_factory=PlacementPolicy)
    mirror: Mirror | None = None
    secrets: Collection[str] = field(default=(), repr=False)
    """Sent to servers; must not reach clients."""
    gateway_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Recognises a request that has come through this gateway before."""
    metrics: UpstreamMetrics = field(default_factory=_unexported_metrics)
    small: SmallServer | None = None
    """The tier in the small model's part."""
    pool: ModelPool | None = None
    """The models on demand, which are tiers; None where there are none."""

    def state_of(self, tier: str) -> ModelState | None:
        """Return the state of a model on demand; None for another tier."""
        model = None if self.pool is None else self.pool.models.get(tier)
        return None if model is None else model.state

    async def start(self) -> None:
        """Start the tiers."""
        for tier in self.tiers.values():
            await tier.start()
        if self.pool is not None:
            await self.pool.start()
        if self.small is not None:
            await self.small.start()
        if self.mirror is not None:
            await self.mirror.start()

    async def close(self) -> None:
        """Close the tiers, and what uses them."""
        if self.small is not None:
            await self.small.close()
        if self.mirror is not None:
            await self.mirror.close()
        for tier in self.tiers.values():
            await tier.close()
        if self.pool is not None:
            await self.pool.close()
