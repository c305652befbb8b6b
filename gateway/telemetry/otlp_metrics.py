"""The metrics of /metrics, sent to a collector by OTLP. Import it only where that is wanted."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, cast

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from outrider.gateway.contract.errors.tree import GatewayError
from outrider.gateway.settings.errors import SettingsError
from outrider.gateway.telemetry.otel import done_by, make_resource

logger = logging.getLogger(__name__)

ReadFamilies = Callable[[], Awaitable[Iterable[Metric]]]

_CUMULATIVE: Final = otel.AggregationTemporality.CUMULATIVE
_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_NANOS: Final = 1_000_000_000
_CLOSE_TIMEOUT_S: Final = 5.0


class MetricsPush:
    """Sends all metrics at an interval, one batch at a time."""

    def __init__(
        self,
        exporter: OTLPMetricExporter,
        resource: Resource,
        *,
        interval_s: float,
        wall_clock: Callable[[], float],
    ) -> None:
        """`wall_clock`: seconds since 1970."""
        self._exporter = exporter
        self._resource = resource
        self._interval_s = interval_s
        self._wall_clock = wall_clock
        self._started_nanos = round(wall_clock() * _NANOS)

    async def run(self, read: ReadFamilies) -> None:
        """Send what `read` returns, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self._send(read, None)  # the exporter's own timeout ends it

    async def close(self, read: ReadFamilies) -> None:
        """Send the last figures, for some seconds at most."""
        await self._send(read, _CLOSE_TIMEOUT_S)

    async def _send(self, read: ReadFamilies, timeout_s: float | None) -> None:
        try:
            data = self._data(await read())
        except GatewayError as error:
            logger.warning("metrics not read error=%s", type(error).__name__)
            return
        if not await done_by(timeout_s, partial(self._exporter.export, data)):
            logger.warning("metrics lost at the end timeout_s=%g", timeout_s)

    def _data(self, families: Iterable[Metric]) -> otel.MetricsData:
        times = (self._started_nanos, round(self._wall_clock() * _NANOS))
        metrics = [metric for family in families for metric in _metrics(family, times)]
        scope = otel.ScopeMetrics(InstrumentationScope("outrider"), metrics, "")
        return otel.MetricsData([otel.ResourceMetrics(self._resource, [scope], "")])


def _metrics(family: Metric, times: tuple[int, int]) -> Iterable[otel.Metric]:
    """Yield a family under the names that Prometheus reads it by."""
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            samples[sample.name].append(sample)
    data: otel.Histogram | otel.Sum | otel.Gauge
    if family.type == "histogram":
        data = otel.Histogram(_histograms(family, times), _CUMULATIVE)
        yield otel.Metric(family.name, family.documentation, family.unit, data)
        return
    for name, each in samples.items():
        points = [otel.NumberDataPoint(s.labels, *times, s.value) for s in each]
        if family.type == "counter":
            data = otel.Sum(points, _CUMULATIVE, is_monotonic=True)
        else:
            data = otel.Gauge(points)
        yield otel.Metric(name, family.documentation, family.unit, data)


def build_push(
    url: str | None, service_name: str | None, environ: Mapping[str, str]
) -> MetricsPush:
    """Build what sends to a collector; what is None is as OTEL_* variables say.

    Raises SettingsError for an interval that is none.
    """
    interval_ms = environ.get(_INTERVAL) or "60000"
    if not interval_ms.isdecimal() or not int(interval_ms):
        raise SettingsError(f"{_INTERVAL}={interval_ms!r}: write whole milliseconds, at least 1")
    return MetricsPush(
        OTLPMetricExporter(endpoint=url),
        make_resource(service_name),
        interval_s=int(interval_ms) / 1000,
        wall_clock=time.time,
    )


def _histograms(family: Metric, times: tuple[int, int]) -> Sequence[otel.HistogramDataPoint]:
    """Return a point for each set of labels: OTLP's buckets are not cumulative."""
    buckets: defaultdict[tuple[tuple[str, str], ...], list[tuple[float, float]]]
    buckets, sums = defaultdict(list), {}
    for sample in family.samples:
        labels = dict(sample.labels)
        if sample.name.endswith("_bucket"):
            bound = float(labels.pop("le"))
            buckets[tuple(labels.items())].append((bound, sample.value))
        elif sample.name.endswith("_sum"):
            sums[tuple(labels.items())] = sample.value
    points, unknown = [], cast(float, None)  # the protocol leaves them out
    for key, each in buckets.items():
        ordered = sorted(each)
        counts = [int(more - less) for (_, less), (_, more) in pairwise([(0.0, 0.0), *ordered])]
        bounds = [bound for bound, _ in ordered[:-1]]
        total = sums.get(key, 0.0)
        points.append(
            otel.HistogramDataPoint(
                attributes=dict(key),
                start_time_unix_nano=times[0],
                time_unix_nano=times[1],
                count=int(ordered[-1][1]),
                sum=total,
                bucket_counts=counts,
                explicit_bounds=bounds,
                min=unknown,
                max=unknown,
            )
        )
    return points
