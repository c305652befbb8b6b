"""Metrics of models on demand, read from them at each scrape."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.gateway.upstream.on_demand.model import OnDemandModel

_COUNTERS: Final[Mapping[str, tuple[str, Callable[[OnDemandModel], float]]]] = {
    "loads": ("Times that it was loaded.", lambda model: model.counts.num_loads),
    "load_seconds": ("Time of these loads.", lambda model: model.counts.load_s),
    "load_failures": ("Times that it failed to load.", lambda model: model.counts.num_failures),
    "refused_requests": (
        "Requests that were refused since it was not loaded.",
        lambda model: model.counts.num_refused,
    ),
}


class ModelCollector(Collector):
    """Collects the metrics of models."""

    def __init__(self) -> None:
        self.models: Mapping[str, OnDemandModel] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield a sample for each model, and of evictions for each reason."""
        for stem, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(f"outrider_on_demand_{stem}", text, labels=["tier"])
            for name, model in self.models.items():
                counter.add_metric([name], read(model))
            yield counter
        evictions = CounterMetricFamily(
            "outrider_on_demand_evictions", "Times that it was put out.", labels=["tier", "why"]
        )
        loaded = GaugeMetricFamily("outrider_on_demand_loaded", "1: it serves.", labels=["tier"])
        waiting = GaugeMetricFamily(
            "outrider_on_demand_waiting_requests", "Requests that wait for it.", labels=["tier"]
        )
        for name, model in self.models.items():
            for why, number in model.counts.put_out.items():
                evictions.add_metric([name, why], number)
            loaded.add_metric([name], model.is_loaded)
            waiting.add_metric([name], model.num_waiting)
        yield from (evictions, loaded, waiting)
