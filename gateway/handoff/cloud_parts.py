"""The upstream tiers, and the rules by which requests are handed over to them."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from gateway.planning.placement import PlacementPolicy
from gateway.upstream.metrics import UpstreamMetrics
from gateway.upstream.mirror import Mirror
from gateway.upstream.tier import UpstreamTier


def _unexported_metrics() -> UpstreamMetrics:
    return UpstreamMetrics(CollectorRegistry())


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudParts:
    """The upstream tiers in the order of the settings, and the rules by which they answer.

    `gateway_id` recognises a request that has come through this gateway before. `secrets` are sent
    to servers and must not reach clients.
    """

    tiers: Mapping[str, UpstreamTier] = field(default_factory=dict)
    rules: PlacementPolicy = field(default_factory=PlacementPolicy)
    mirror: Mirror | None = None
    secrets: Collection[str] = field(default=(), repr=False)
    gateway_id: str = field(default_factory=lambda: secrets.token_hex(8))
    metrics: UpstreamMetrics = field(default_factory=_unexported_metrics)
