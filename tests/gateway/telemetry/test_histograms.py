"""Histograms of one thread: what is scraped is what prometheus_client's own would say."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from outrider.gateway.telemetry.histograms import ThreadHistogram

BUCKETS = (0.001, 0.01, 1.0, 60.0)
VALUES = (0.0, 0.001, 0.0011, 0.5, 1.0, 60.0, 61.0, float("inf"))


def exposed(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_it_says_what_prometheus_client_s_says() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = (
        ThreadHistogram("a_seconds", "Words.", "tier", buckets=BUCKETS, registry=ours),
        Histogram("a_seconds", "Words.", ["tier"], buckets=BUCKETS, registry=theirs),
    )
    for histogram in histograms:
        histogram.labels("small")
        for value in VALUES:
            histogram.labels("large").observe(value)
    assert exposed(ours) == exposed(theirs)
    labels = {"tier": "large", "le": "1.0"}
    assert ours.get_sample_value("a_seconds_bucket", labels) == 5
