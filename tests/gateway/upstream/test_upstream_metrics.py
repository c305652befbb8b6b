"""Attempts, mirrors and hand-offs as Prometheus sees them, and gauges read at the scrape."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from outrider.gateway.upstream.attempts import UpstreamAttempt
from outrider.gateway.upstream.replicas import ReplicaSet
from outrider.gateway.upstream.upstream_metrics import UpstreamMetrics
from outrider.gateway.upstream.upstream_usage import UpstreamUsage


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> UpstreamMetrics:
    return UpstreamMetrics(registry)


def attempt(**changes: Any) -> UpstreamAttempt:
    whole: dict[str, Any] = {
        "request_id": "r",
        "tier": "cloud",
        "replica": "127.0.0.1:1",
        "kind": "answer",
        "outcome": "answered",
        "started_s": 10.0,
        "ended_s": 12.0,
        "first_token_s": 10.25,
    }
    return UpstreamAttempt(**(whole | changes))


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"outrider_{name}", labels)


def test_an_attempt_is_counted_with_its_times(
    registry: CollectorRegistry, metrics: UpstreamMetrics
) -> None:
    metrics.on_attempt(attempt())
    labels = {"tier": "cloud", "kind": "answer", "outcome": "answered"}
    assert value(registry, "upstream_attempts_total", **labels) == 1
    assert value(registry, "upstream_time_to_first_token_seconds_sum", tier="cloud") == 0.25
    assert value(registry, "upstream_request_seconds_sum", tier="cloud") == 2.0
    assert value(registry, "mirror_request_seconds_count", tier="cloud") is None


def test_a_failure_has_its_kind_and_no_whole_time(
    registry: CollectorRegistry, metrics: UpstreamMetrics
) -> None:
    metrics.on_attempt(
        attempt(kind="retry", outcome="failed", failure="reset", first_token_s=None, status=None)
    )
    labels = {"tier": "cloud", "kind": "retry"}
    assert value(registry, "upstream_failures_total", failure="reset", **labels) == 1
    assert value(registry, "upstream_attempts_total", outcome="failed", **labels) == 1
    assert value(registry, "upstream_time_to_first_token_seconds_count", tier="cloud") is None
    assert value(registry, "upstream_request_seconds_count", tier="cloud") is None


def test_a_mirror_is_booked_apart(registry: CollectorRegistry, metrics: UpstreamMetrics) -> None:
    metrics.on_attempt(attempt(kind="mirror", cost_usd=0.5))
    metrics.on_attempt(attempt(cost_usd=0.25))
    metrics.on_attempt(attempt(kind="hedge", outcome="lost", cost_usd=0.125))
    assert value(registry, "mirror_request_seconds_count", tier="cloud") == 1
    assert value(registry, "upstream_request_seconds_count", tier="cloud") == 1
    assert value(registry, "upstream_time_to_first_token_seconds_count", tier="cloud") == 2
    for kind, cost in (("mirror", 0.5), ("answer", 0.25), ("hedge", 0.125)):
        assert value(registry, "upstream_cost_usd_total", tier="cloud", kind=kind) == cost


def test_tokens_are_labelled_by_their_source(
    registry: CollectorRegistry, metrics: UpstreamMetrics
) -> None:
    usage = UpstreamUsage(num_prompt_tokens=7, num_cached_tokens=4, num_completion_tokens=3)
    metrics.on_attempt(attempt(usage=usage))
    counted = UpstreamUsage(num_completion_tokens=5, source="counted", is_corrected=True)
    metrics.on_attempt(attempt(usage=counted))
    found = {
        (sample.labels["type"], sample.labels["source"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "outrider_upstream_tokens_total"
    }
    assert found == {
        ("prompt", "reported"): 7,
        ("cached_prompt", "reported"): 4,
        ("completion", "reported"): 3,
        ("completion", "counted"): 5,
    }
    assert value(registry, "upstream_usage_corrected_total", tier="cloud") == 1


def test_hand_offs_and_copies(registry: CollectorRegistry, metrics: UpstreamMetrics) -> None:
    metrics.handed_off("confidence", "small", "cloud")
    metrics.degraded()
    metrics.mirrored("cloud", "dropped")
    labels = {"kind": "confidence", "from_tier": "small", "to_tier": "cloud"}
    assert value(registry, "handoffs_total", **labels) == 1
    assert value(registry, "degraded_total") == 1
    assert value(registry, "mirror_copies_total", tier="cloud", outcome="dropped") == 1


@dataclass
class Tier:
    replicas: ReplicaSet
    is_available: bool = True
    failures: list[str] = field(default_factory=list)


def test_health_is_read_at_the_scrape(
    registry: CollectorRegistry, metrics: UpstreamMetrics
) -> None:
    replicas = ReplicaSet(
        ("http://a/v1", "http://b:81/v1"),
        clock=lambda: 0.0,
        rng=random.Random(1),
        has_prefix_cache=False,
    )
    tier = Tier(replicas)
    metrics.observe({"cloud": tier}, {})

    def states(replica: str) -> dict[str, float | None]:
        labels = {"tier": "cloud", "replica": replica}
        return {
            state: value(registry, "upstream_breaker_state", state=state, **labels)
            for state in ("closed", "open", "half_open")
        }

    lease = replicas.replicas[0].begin()
    assert value(registry, "upstream_in_flight", tier="cloud", replica="a:80") == 1
    lease.cancelled()
    assert value(registry, "upstream_in_flight", tier="cloud", replica="a:80") == 0
    assert states("a:80") == {"closed": 1, "open": 0, "half_open": 0}
    for _ in range(5):
        replicas.replicas[0].begin().failed("reset")
    assert states("a:80") == {"closed": 0, "open": 1, "half_open": 0}
    assert states("b:81") == {"closed": 1, "open": 0, "half_open": 0}
    assert value(registry, "upstream_ejected", tier="cloud", replica="b:81") == 0
    replicas.replicas[1].eject(0.0)
    assert value(registry, "upstream_ejected", tier="cloud", replica="b:81") == 1
    assert value(registry, "upstream_available", tier="cloud") == 1
    tier.is_available = False
    assert value(registry, "upstream_available", tier="cloud") == 0


def test_nothing_is_exported_before_it_is_registered(registry: CollectorRegistry) -> None:
    metrics = UpstreamMetrics()
    metrics.degraded()
    assert generate_latest(registry) == b""
    metrics.register(registry)
    assert value(registry, "degraded_total") == 1
