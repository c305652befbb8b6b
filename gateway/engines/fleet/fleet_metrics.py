"""Metrics of a pool's replicas."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.gateway.engines.fleet.pool import EnginePool


class FleetMetrics(Collector):
    """Tells, at each scrape, which replicas are up, what they got, and what moved between them."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each number, with one sample for each replica."""
        up = GaugeMetricFamily(
            "outrider_replica_up", "1 of an engine replica that serves.", labels=["replica"]
        )
        in_flight = GaugeMetricFamily(
            "outrider_replica_requests_in_flight",
            "This gateway's requests that a replica has.",
            labels=["replica"],
        )
        requests = CounterMetricFamily(
            "outrider_replica_requests", "Requests sent to a replica.", labels=["replica"]
        )
        for state in self._pool.states():
            up.add_metric([state.name], state.is_up)
            in_flight.add_metric([state.name], state.num_in_flight)
            requests.add_metric([state.name], state.num_requests)
        failovers = CounterMetricFamily(
            "outrider_failovers",
            "Requests that went on at another replica, by cause.",
            labels=["reason"],
        )
        for reason, count in self._pool.failovers.items():
            failovers.add_metric([reason], count)
        audits = CounterMetricFamily(
            "outrider_audits",
            "What audits of answers found of a replica.",
            labels=["replica", "outcome"],
        )
        for name, outcome, count in self._pool.audits.counts():
            audits.add_metric([name, outcome], count)
        yield from (up, in_flight, requests, failovers, audits)
