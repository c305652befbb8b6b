"""Metrics of the response cache."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter

CacheStatus = Literal["hit", "miss", "shared", "bypass"]
"""shared: the answer of an equal request that was under way. bypass: it may not be kept."""


class CacheMetrics:
    """Counts requests that asked for the cache."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._requests = Counter(
            "outrider_cache_requests",
            "Requests that asked for the response cache.",
            ["status"],
            registry=registry or CollectorRegistry(),
        )

    def count(self, status: CacheStatus) -> None:
        """Count a request."""
        self._requests.labels(status).inc()
