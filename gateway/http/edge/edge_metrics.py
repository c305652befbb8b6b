"""Metrics of connections and repeated requests."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Repeat = Literal["first", "replayed", "waited", "reused"]
"""The result of a request with an idempotency-key: answered anew, answered with a kept answer, the
same after waiting for it, or refused since the key had come with another body."""


class EdgeMetrics:
    """Counters of events that no endpoint sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge(
            "outrider_http_connections", "Clients' connections that are open.", registry=registry
        )
        self._refusals = Counter(
            "outrider_http_refusals",
            "Requests and connections refused before they reached an endpoint.",
            ["reason"],
            registry=registry,
        )
        self._repeats = Counter(
            "outrider_idempotent_requests",
            "Requests with an idempotency-key, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self.kept_bytes = Gauge(
            "outrider_idempotent_bytes", "Memory for answers to repeat.", registry=registry
        )

        self.body_bytes = Gauge(
            "outrider_http_body_bytes",
            "Bytes of request bodies that are held, declared lengths included.",
            registry=registry,
        )

    def refused(self, reason: str) -> None:
        """Count a refusal by its error code."""
        self._refusals.labels(reason).inc()

    def repeated(self, outcome: Repeat) -> None:
        """Count a request with an idempotency-key."""
        self._repeats.labels(outcome).inc()
