"""Metrics of several processes as one."""

import pickle

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.gateway.workers.merging import Families, WorkerMetrics, collected, exposition


def families(requests: int, connections: int, draining: int = 0, ratio: float = 1.0) -> Families:
    registry = CollectorRegistry()
    Counter("outrider_requests", "Requests.", ["tier"], registry=registry).labels("x").inc(requests)
    Gauge("outrider_http_connections", "Open.", registry=registry).set(connections)
    Gauge("outrider_draining", "1: it ends.", registry=registry).set(draining)
    Gauge("outrider_slo_attainment_ratio", "Share.", registry=registry).set(ratio)
    times = Histogram("outrider_times_seconds", "Times.", buckets=(1.0,), registry=registry)
    times.observe(0.5 * requests)
    return pickle.loads(pickle.dumps(collected(registry)))  # type: ignore[no-any-return]


def value(metrics: WorkerMetrics, line: str) -> float | None:
    found = [text for text in exposition(metrics.all()).decode().splitlines() if line in text]
    return float(found[-1].rpartition(" ")[2]) if found and not found[-1].startswith("#") else None


def test_counters_and_amounts_are_summed() -> None:
    metrics = WorkerMetrics()
    metrics.add(1, families(2, connections=3, ratio=0.5))
    metrics.add(2, families(5, connections=4, draining=1))
    assert value(metrics, 'outrider_requests_total{tier="x"}') == 7
    assert value(metrics, "outrider_http_connections") == 7
    assert value(metrics, "outrider_draining") == 1
    assert value(metrics, "outrider_slo_attainment_ratio") == pytest.approx(0.75)
    assert value(metrics, 'outrider_times_seconds_bucket{le="1.0"}') == 1
    assert value(metrics, "outrider_times_seconds_sum") == pytest.approx(3.5)
    assert "# TYPE outrider_requests_total counter" in exposition(metrics.all()).decode()


def test_what_a_worker_has_counted_stays_when_it_ends() -> None:
    metrics = WorkerMetrics()
    metrics.add(1, families(2, connections=3))
    metrics.add(2, families(5, connections=4))
    metrics.ended(1)
    metrics.ended(7)  # one that was never heard
    assert value(metrics, 'outrider_requests_total{tier="x"}') == 7
    assert value(metrics, "outrider_http_connections") == 4
    metrics.add(3, families(1, connections=1))  # its successor
    metrics.ended(2)
    metrics.ended(3)
    assert value(metrics, 'outrider_requests_total{tier="x"}') == 8
    assert value(metrics, "outrider_times_seconds_count") == 3
    assert value(metrics, "outrider_http_connections") is None


def test_a_worker_that_says_nothing_counts_as_it_did() -> None:
    metrics = WorkerMetrics()
    metrics.add(1, families(2, connections=3))
    metrics.add(2, families(5, connections=4))
    metrics.add(1, families(4, connections=0))
    assert value(metrics, 'outrider_requests_total{tier="x"}') == 9
    assert value(metrics, "outrider_http_connections") == 4
