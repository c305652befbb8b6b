"""Metrics of requests that wait for an engine."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.gateway.engines.backends.client import EngineClient


class PauseMetrics(Collector):
    """Reports, at each scrape, how many new requests wait for an engine that is not there."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the number of now, and that of all so far."""
        paused = self._engine.paused
        yield GaugeMetricFamily(
            "outrider_num_requests_paused",
            "New requests that wait for an engine to restart or start.",
            value=paused.num_now,
        )
        yield CounterMetricFamily(
            "outrider_requests_paused",
            "New requests that waited for an engine to restart or start.",
            value=paused.num_ever,
        )
