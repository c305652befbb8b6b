"""Metrics of upstream tiers: attempts, failures, times, tokens, cost, health.

Attempts are counted as they end. Gauges are read from the tiers at each scrape.
"""

from collections.abc import Iterator, Mapping
from typing import Final, Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.gateway.contract.answers.responder import HandOffKind
from outrider.gateway.telemetry.children import Children
from outrider.gateway.upstream.attempts import UpstreamAttempt
from outrider.gateway.upstream.breaker import BreakerState
from outrider.gateway.upstream.on_demand.metrics import ModelCollector
from outrider.gateway.upstream.on_demand.model import OnDemandModel
from outrider.gateway.upstream.replicas import ReplicaSet
from outrider.gateway.upstream.upstream_usage import UpstreamUsage

MirrorOutcome = Literal["answered", "failed", "dropped"]
"""dropped: there were too many copies at that time."""

_FIRST_TOKEN_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0,
    60.0,
)  # fmt: skip
_WHOLE_S: Final = (
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip


class ObservedTier(Protocol):
    """The source of the gauges."""

    @property
    def is_available(self) -> bool:
        """Return whether a request would be sent now."""

    @property
    def replicas(self) -> ReplicaSet:
        """Return the tier's servers."""


class UpstreamMetrics:
    """Instruments of all upstream tiers. Only as thread-safe as prometheus_client."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Make the instruments. Without a registry they are not exported until `register`."""
        self._attempts = _counter(
            "upstream_attempts", "Requests to servers that ended.", "tier", "kind", "outcome"
        )
        self._failures = _counter(
            "upstream_failures", "Requests to servers that failed.", "tier", "kind", "failure"
        )
        self._first_token = _histogram(
            "upstream_time_to_first_token_seconds",
            "From a request's sending to its first token; mirrored ones apart.",
            _FIRST_TOKEN_S,
        )
        self._whole = _histogram(
            "upstream_request_seconds",
            "From sending to the end, of those that were answered; mirrored ones apart.",
            _WHOLE_S,
        )
        self._mirror_whole = _histogram(
            "mirror_request_seconds", "The same of mirrored ones.", _WHOLE_S
        )
        self._tokens = _counter(
            "upstream_tokens", "Tokens of servers' answers.", "tier", "kind", "type", "source"
        )
        self._corrected = _counter(
            "upstream_usage_corrected", "Answers whose usage was told wrongly.", "tier"
        )
        self._cost = _counter("upstream_cost_usd", "Cost of requests.", "tier", "kind")
        self._hand_offs = _counter(
            "handoffs", "Requests that went to another tier.", "kind", "from_tier", "to_tier"
        )
        self._degraded = Counter(
            "outrider_degraded",
            "Local answers because no upstream tier was available.",
            registry=None,
        )
        self._untrusted = _counter(
            "cascade_untrusted", "Watched answers judged without log-probabilities.", "tier"
        )
        self._mirrored = _counter("mirror_copies", "Copies of requests.", "tier", "outcome")
        self._health = _HealthCollector()
        self._models = ModelCollector()
        if registry is not None:
            self.register(registry)

    def register(self, registry: CollectorRegistry) -> None:
        """Export all instruments there; once."""
        for part in vars(self).values():
            registry.register(part.instrument if isinstance(part, Children) else part)

    def observe(
        self, tiers: Mapping[str, ObservedTier], models: Mapping[str, OnDemandModel]
    ) -> None:
        """Read these tiers' health at each scrape, and the models that some of them load."""
        self._health.tiers = tiers
        self._models.models = models

    def on_attempt(self, attempt: UpstreamAttempt) -> None:
        """Count a request that has ended: an `OnAttempt`."""
        tier, kind = attempt.tier, attempt.kind
        self._attempts.of(tier, kind, attempt.outcome).inc()
        if attempt.failure is not None:
            self._failures.of(tier, kind, attempt.failure).inc()
        if attempt.first_token_s is not None and kind not in ("mirror", "probe"):
            waited_s = attempt.first_token_s - attempt.started_s
            self._first_token.of(tier).observe(waited_s)
        if attempt.outcome == "answered":
            whole = self._mirror_whole if kind == "mirror" else self._whole
            whole.of(tier).observe(attempt.ended_s - attempt.started_s)
        if attempt.usage is not None:
            self._count_tokens(attempt, attempt.usage)
        if attempt.cost_usd:
            self._cost.of(tier, kind).inc(attempt.cost_usd)

    def handed_off(self, kind: HandOffKind, from_tier: str, to_tier: str) -> None:
        """Count a request that is answered by another tier than the one that was first chosen."""
        self._hand_offs.of(kind, from_tier, to_tier).inc()

    def degraded(self) -> None:
        """Count a local answer that an upstream tier should have given."""
        self._degraded.inc()

    def untrusted(self, tier: str) -> None:
        """Count a watched answer whose log-probabilities could not be used."""
        self._untrusted.of(tier).inc()

    def mirrored(self, tier: str, outcome: MirrorOutcome) -> None:
        """Count a copy of a request."""
        self._mirrored.of(tier, outcome).inc()

    def _count_tokens(self, attempt: UpstreamAttempt, usage: UpstreamUsage) -> None:
        counts = {
            "prompt": usage.num_prompt_tokens,
            "cached_prompt": usage.num_cached_tokens,
            "completion": usage.num_completion_tokens,
            "reasoning": usage.num_reasoning_tokens,
        }
        for name, count in counts.items():
            if count > 0:
                self._tokens.of(attempt.tier, attempt.kind, name, usage.source).inc(count)
        if usage.is_corrected:
            self._corrected.of(attempt.tier).inc()


class _HealthCollector(Collector):
    """Collects the tiers' health at each scrape."""

    def __init__(self) -> None:
        self.tiers: Mapping[str, ObservedTier] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield a sample for each tier, replica, and state of its breaker (1: the present one)."""
        available = _gauge("upstream_available", "Whether a request would be sent now.", "tier")
        breakers = _gauge(
            "upstream_breaker_state", "1: the breaker's state.", "tier", "replica", "state"
        )
        in_flight = _gauge("upstream_in_flight", "Requests under way.", "tier", "replica")
        ejected = _gauge(
            "upstream_ejected", "1: left out, slower than the others.", "tier", "replica"
        )
        for name, tier in self.tiers.items():
            available.add_metric([name], float(tier.is_available))
            for replica in tier.replicas.replicas:
                labels = [name, replica.name]
                for state in get_args(BreakerState):
                    breakers.add_metric([*labels, state], float(replica.breaker.state == state))
                in_flight.add_metric(labels, replica.in_flight)
                ejected.add_metric(labels, float(replica.ejected_until_s is not None))
        yield from (available, breakers, in_flight, ejected)


def _counter(stem: str, text: str, *labels: str) -> Children[Counter]:
    return Children(Counter(f"outrider_{stem}", text, labels, registry=None))


def _histogram(stem: str, text: str, buckets: tuple[float, ...]) -> Children[Histogram]:
    return Children(Histogram(f"outrider_{stem}", text, ["tier"], buckets=buckets, registry=None))


def _gauge(stem: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outrider_{stem}", text, labels=labels)
