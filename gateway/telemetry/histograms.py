"""Histograms of what happens for each token."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """One label's observations: how many in each bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper ones, ascending, the last one infinite."""
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket that holds it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class ThreadHistogram(Collector):
    """A histogram that one thread observes, with a quarter of prometheus_client's instructions.

    That takes a lock for each number and goes through all bounds. Scraped by any thread.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`buckets`: upper bounds, ascending, without the infinite one."""
        self._name, self._text, self._label = name, text, label
        self._bounds = (*buckets, inf)
        self._series: dict[str, Series] = {}
        if registry is not None:
            registry.register(self)

    def labels(self, value: str) -> Series:
        """Return the observations of a value of the label."""
        if value not in self._series:
            self._series[value] = Series(self._bounds)
        return self._series[value]

    def collect(self) -> Iterator[Metric]:
        """Yield all series, with buckets that hold what those before them hold."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        names = [floatToGoString(b) for b in self._bounds]  # type: ignore[no-untyped-call]
        for value, series in list(self._series.items()):
            buckets = list(zip(names, accumulate(series.counts), strict=True))
            family.add_metric([value], buckets=buckets, sum_value=series.total)
        yield family
