"""Metrics of limits."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from outrider.gateway.tenancy.limits.limit_rules import LimitRule

_PREFIX: Final = "outrider_limit_"


class LimitMetrics:
    """Instruments of one limiter; not exported where there is no registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._refusals = Counter(
            f"{_PREFIX}refusals",
            "Requests refused because of a limit.",
            ("limit", "scope"),
            registry=registry,
        )
        self._growths_refused = Counter(
            f"{_PREFIX}growths_refused",
            "Answers ended early because of a limit.",
            ("limit", "scope"),
            registry=registry,
        )
        self._reservations = Gauge(
            f"{_PREFIX}reservations",
            "Reservations that are not settled yet.",
            registry=registry,
        )
        self._store_errors = Counter(
            f"{_PREFIX}store_errors",
            "Failed requests to the limits' store.",
            registry=registry,
        )

        self._gateways = Gauge(
            f"{_PREFIX}uncoordinated_gateways",
            "Other gateways on the same database that count limits in their own memory.",
            registry=registry,
        )

    def report_gateways(self, num_others: Callable[[], int]) -> None:
        """Have the number of other gateways read at each scrape."""
        self._gateways.set_function(num_others)

    def refused(self, rule: LimitRule) -> None:
        """Count a request that was refused."""
        self._refusals.labels(rule.name, rule.scope).inc()

    def growth_refused(self, rule: LimitRule) -> None:
        """Count an answer that was cut for lack of room."""
        self._growths_refused.labels(rule.name, rule.scope).inc()

    def report_open(self, num_open: Callable[[], int]) -> None:
        """Read the number of open reservations at each scrape."""
        self._reservations.set_function(num_open)

    def store_failed(self) -> None:
        """Count a failure of the store."""
        self._store_errors.inc()
