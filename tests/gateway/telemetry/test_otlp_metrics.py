"""Metrics by OTLP: the same series as /metrics, and no wait for a collector that is away."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric

from outrider.gateway.contract.errors.tree import UnavailableError
from outrider.gateway.settings.errors import SettingsError
from outrider.gateway.telemetry.otel import make_resource
from outrider.gateway.telemetry.otlp_metrics import MetricsPush, build_push
from tests.gateway.telemetry.collectors import serve_collector


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    counter = Counter("a_seen", "Seen.", ["kind"], registry=made)
    counter.labels("x").inc(3)
    counter.labels("y").inc(4)
    Gauge("a_load", "Load.", registry=made).set(0.5)
    times = Histogram("a_time_seconds", "Time.", ["tier"], buckets=(1, 2), registry=made)
    for value in (0.5, 0.7, 1.5, 9.0):
        times.labels("small").observe(value)
    return made


async def families() -> Iterable[Metric]:
    return list(registry().collect())


def test_the_series_of_metrics_reach_a_collector_at_the_end() -> None:
    with serve_collector(ExportMetricsServiceRequest) as collector:
        push = build_push(f"{collector.url}/v1/metrics", "mine", {})
        asyncio.run(push.close(families))
    ((path, request),) = collector.requests
    assert path == "/v1/metrics"
    (resource,) = request.resource_metrics
    assert "mine" in str(resource.resource)
    found: dict[str, Any] = {each.name: each for each in resource.scope_metrics[0].metrics}
    assert set(found) == {"a_seen_total", "a_load", "a_time_seconds"}
    seen = found["a_seen_total"].sum
    assert seen.is_monotonic
    assert {p.attributes[0].value.string_value: p.as_double for p in seen.data_points} == {
        "x": 3,
        "y": 4,
    }
    assert found["a_load"].gauge.data_points[0].as_double == 0.5
    (point,) = found["a_time_seconds"].histogram.data_points
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([2, 1, 1], [1, 2])
    assert (point.count, point.sum) == (4, 11.7)
    assert not point.HasField("min")


def test_metrics_are_sent_again_and_again_also_after_a_failure() -> None:
    num_read, has_sent = 0, asyncio.Event()

    async def read() -> Iterable[Metric]:
        nonlocal num_read
        num_read += 1
        if num_read == 1:
            raise UnavailableError("a worker is starting", retry_after_s=1.0)
        if num_read == 3:
            has_sent.set()
        return await families()

    async def until_sent() -> None:
        sending = asyncio.create_task(push.run(read))
        async with asyncio.timeout(10):
            await has_sent.wait()
        sending.cancel()

    with serve_collector(ExportMetricsServiceRequest) as collector:
        push = build_push(collector.url, None, {"OTEL_METRIC_EXPORT_INTERVAL": "10"})
        asyncio.run(until_sent())
    assert collector.requests


@pytest.mark.parametrize("interval", ["0", "-1", "soon", "0.5"])
def test_an_interval_that_is_none_is_refused(interval: str) -> None:
    with pytest.raises(SettingsError, match="whole milliseconds, at least 1"):
        build_push(None, None, {"OTEL_METRIC_EXPORT_INTERVAL": interval})


def test_an_absent_collector_holds_up_no_end(caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("outrider.gateway.telemetry.otlp_metrics._CLOSE_TIMEOUT_S", 0.05)

    class Stuck(OTLPMetricExporter):
        def export(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(1.0)

    push = MetricsPush(Stuck(), make_resource(None), interval_s=1.0, wall_clock=time.time)
    begun_s = time.monotonic()
    asyncio.run(push.close(families))
    assert time.monotonic() - begun_s < 0.9
    assert "metrics lost at the end" in caplog.text
