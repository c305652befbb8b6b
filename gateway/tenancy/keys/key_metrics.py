"""Metrics of keys."""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

FailureReason = Literal[
    "missing", "malformed", "unknown", "expired", "revoked", "throttled", "token"
]


class TenantMetrics:
    """Counts failures, without their keys."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "outrider_auth_failures",
            "Requests without an accepted key, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in get_args(FailureReason):
            self._failures.labels(reason)
        self._keys = Gauge(
            "outrider_keys", "Keys in memory, revoked ones included.", registry=registry
        )

        self._lost_sight = Counter(
            "outrider_key_refresh_failures",
            "Failed refreshes of the keys, after which the last known keys stay in use.",
            registry=registry,
        )

    def lost_sight(self) -> None:
        """Count a look at the keys that failed."""
        self._lost_sight.inc()

    def failed(self, reason: FailureReason) -> None:
        """Count a request that was refused."""
        self._failures.labels(reason).inc()

    def report_keys(self, num_keys: Callable[[], int]) -> None:
        """Ask this for the number of keys."""
        self._keys.set_function(num_keys)
