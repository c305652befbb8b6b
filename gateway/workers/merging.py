"""Metrics of several processes as those of one: sums that go on when one of them has ended."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from statistics import fmean as mean
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Families = list[Metric]
"""What a registry's collectors yield."""

_Key = tuple[str, tuple[tuple[str, str], ...]]

_TOTALS: Final = frozenset({"counter", "histogram", "summary", "gaugehistogram"})
_SUMMED_GAUGES: Final = frozenset(
    {
        "outrider_event_loop_tasks",
        "outrider_goodput_requests_per_second",
        "outrider_http_body_bytes",
        "outrider_http_connections",
        "outrider_idempotent_bytes",
        "outrider_ledger_pending_rows",
        "outrider_limit_reservations",
        "outrider_replica_requests_in_flight",
        "outrider_router_outcomes",
        "outrider_upstream_in_flight",
    }
)
_AVERAGED: Final = frozenset({"outrider_slo_attainment_ratio"})


class WorkerMetrics:
    """Adds up workers' metrics, and keeps the counters of those that have ended."""

    def __init__(self) -> None:
        self._last: dict[int, Families] = {}
        self._ended: Families = []

    def add(self, worker: int, families: Families) -> None:
        """Keep a worker's metrics of this moment. `worker`: a number that no other one ever has."""
        self._last[worker] = families

    def ended(self, worker: int) -> None:
        """Keep a worker's counters, as they were last heard, among those of all that have ended."""
        lasting = [each for each in self._last.pop(worker, []) if each.type in _TOTALS]
        self._ended = merged([self._ended, lasting])

    def all(self) -> Families:
        """Return the sums over all workers."""
        return merged([self._ended, *self._last.values()])


def collected(registry: CollectorRegistry) -> Families:
    """Return the metrics of a registry at this moment."""
    return list(registry.collect())


def exposition(families: Iterable[Metric]) -> bytes:
    """Return metrics as Prometheus scrapes them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given(families))
    return generate_latest(registry)


def merged(parts: Sequence[Families]) -> Families:
    """Return one family for each name. Counters, histograms and gauges of amounts are summed.

    Other gauges say the same in each process, or that something is so in one of them: of these the
    largest is taken. Of the times at which counters were made, the first.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, list[float]]] = {}
    for family in chain.from_iterable(parts):
        families.setdefault(family.name, family)
        found = values.setdefault(family.name, {})
        for sample in family.samples:
            found.setdefault((sample.name, tuple(sample.labels.items())), []).append(sample.value)
    whole = []
    for name, family in families.items():
        joined = Metric(name, family.documentation, family.type, family.unit)
        for (sample_name, labels), found_values in values[name].items():
            joined.add_sample(sample_name, dict(labels), _joined(family, sample_name, found_values))
        whole.append(joined)
    return whole


def _joined(family: Metric, sample_name: str, values: Sequence[float]) -> float:
    if sample_name.endswith("_created"):
        return min(values)
    if family.type in _TOTALS or family.name in _SUMMED_GAUGES:
        return sum(values)
    return mean(values) if family.name in _AVERAGED else max(values)


class _Given(Collector):
    """Metrics that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        yield from self._families
