"""Metrics of batches, as this process works on them."""

from prometheus_client import CollectorRegistry, Counter, Gauge


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
        self.requests_ended = Counter(
            "outrider_batch_requests",
            "Requests of batches, by how they ended: completed, failed, or to be repeated.",
            ["outcome"],
            registry=registry,
        )
        self.batches_over = Counter(
            "outrider_batches", "Batches that are over, by status.", ["status"], registry=registry
        )
