"""Metrics of batches, as this process works on them."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

LineOutcome = Literal["completed", "failed", "repeated"]
"""A request's result is stored, as an answer or an error; or it will be asked again."""


class BatchMetrics:
    """Instruments of batches and their requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.batches = Gauge(
            "outrider_batches_running", "Batches that are worked on.", registry=registry
        )
        self.requests = Gauge(
            "outrider_batch_requests_running",
            "Requests of batches that are being answered.",
            registry=registry,
        )
        self.is_held = Gauge(
            "outrider_batch_held", "1: other requests keep batches waiting.", registry=registry
        )
        self._ended = Counter(
            "outrider_batch_requests",
            "Requests of batches, by how they ended.",
            ["outcome"],
            registry=registry,
        )
        self._over = Counter(
            "outrider_batches", "Batches that are over, by status.", ["status"], registry=registry
        )

    def ended(self, outcome: LineOutcome, number: int = 1) -> None:
        """Count requests that have ended so."""
        self._ended.labels(outcome).inc(number)

    def over(self, status: str) -> None:
        """Count a batch that has ended so."""
        self._over.labels(status).inc()
