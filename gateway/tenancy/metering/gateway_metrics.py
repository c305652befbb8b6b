"""Metrics of requests, named as dashboards expect (vLLM's stems) under `outrider_`.

Latencies are observed here, as a client sees them. The engine's own counters are read from it at
each scrape, so they are never counted twice.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.engine.events import EngineStats, PeerStats, StoreStats, TierStats
from outrider.gateway.telemetry.children import Children
from outrider.gateway.telemetry.histograms import ThreadHistogram
from outrider.gateway.telemetry.loop_lag import ProcessTime, StageTimes
from outrider.gateway.workers.merging import exposition
from outrider.verifier.params import TIERS, Tier

_FIRST_TOKEN_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
    20.0, 60.0,
)  # fmt: skip
_INTER_TOKEN_S: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0,
    2.5,
)  # fmt: skip
_REQUEST_S: Final = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
    600.0,
)  # fmt: skip
_MAX_REASONS: Final = 64


class TierMetrics:
    """One tier's instruments, with the label already bound: a lookup per token costs too much."""

    def __init__(self, metrics: "GatewayMetrics", tier: Tier) -> None:
        self.time_to_first_token = metrics.time_to_first_token.labels(tier)
        self.inter_token_latency = metrics.inter_token_latency.labels(tier)
        self.e2e_request_latency = metrics.e2e_request_latency.labels(tier)
        self.request_queue_time = metrics.request_queue_time.labels(tier)
        self.prompt_tokens = metrics.prompt_tokens.labels(tier)
        self.generation_tokens = metrics.generation_tokens.labels(tier)
        self._request_success = metrics.request_success
        self._tier = tier
        self._ends: dict[str, Counter] = {}

    def finished(self, reason: str) -> None:
        """Count a choice's end: stop, length, abort or error."""
        counter = self._ends.get(reason)
        if counter is None:
            counter = self._ends[reason] = self._request_success.labels(self._tier, reason)
        counter.inc()


class GatewayMetrics:
    """The gateway's registry. Not the global one, so several apps can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ProcessTime())
        self.stages = StageTimes(self.registry)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "A step's gap divided by its tokens.", _INTER_TOKEN_S
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_S
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first scheduled token.", _REQUEST_S
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests.", "tier")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers.", "tier")
        self.request_success = self._counter(
            "request_success", "Choices that ended.", "tier", "finished_reason"
        )
        self._decisions = Children(
            self._counter("router_decisions", "Which tier requests went to.", "tier", "reason")
        )
        self._busy_decisions = self._counter(
            "router_busy_decisions", "Decisions that the large model's queue weighed on.", "tier"
        )
        self._cascade_decisions = self._counter(
            "cascade_decisions", "Watched answers of the small model, by outcome.", "action", "tier"
        )
        self._cascade_hold_back = self._histogram(
            "cascade_hold_back_seconds", "From a held answer's first token on.", _FIRST_TOKEN_S
        )
        self._cascade_held = self._counter("cascade_held_tokens", "Tokens held back.")
        self._cascade_reused = self._counter(
            "cascade_reused_tokens", "Tokens of retracted answers that the large model wrote too."
        )
        self._cascade_discarded = self._counter(
            "cascade_discarded_tokens", "Tokens of retracted answers that it did not write."
        )
        self.structured_answers = self._counter(
            "structured_answers", "Whole answers by the check of their schema.", "verdict"
        )
        self._adapter_requests = self._counter(
            "adapter_requests", "Requests that named a LoRA adapter.", "adapter"
        )
        self._reasons: set[str] = set()
        self._tiers = {tier: TierMetrics(self, tier) for tier in TIERS}

    def of_tier(self, tier: Tier) -> TierMetrics:
        """Return the instruments of one tier."""
        return self._tiers[tier]

    def routed(self, tier: str, reason: str) -> None:
        """Count a decision, without the figures that a reason has in parentheses.

        A policy that makes up reasons endlessly is counted as `other`.
        """
        reason = reason.partition(" (")[0]
        if reason not in self._reasons:
            if len(self._reasons) >= _MAX_REASONS:
                reason = "other"
            self._reasons.add(reason)
        self._decisions.of(tier, reason).inc()

    def routed_busy(self, tier: str) -> None:
        """Count a decision for which the large model's queue raised the bar."""
        self._busy_decisions.labels(tier).inc()

    def adapted(self, name: str) -> None:
        """Count a request that named an adapter."""
        self._adapter_requests.labels(name).inc()

    def cascade_decided(self, action: str, tier: str, held_s: float, num_held_tokens: int) -> None:
        """Count the end of a hold-back: commit, escalate, or refuse (by the large tier)."""
        self._cascade_decisions.labels(action, tier).inc()
        self._cascade_hold_back.labels(tier).observe(held_s)
        self._cascade_held.inc(num_held_tokens)

    def cascade_continued(self, tier: Tier) -> None:
        """Count an answer that another tier continues in mid-stream."""
        self._cascade_decisions.labels("continue", tier).inc()

    def cascade_ended(self, num_reused_tokens: int, num_discarded_tokens: int) -> None:
        """Count how many tokens of the small model's answers were reused and discarded."""
        self._cascade_reused.inc(num_reused_tokens)
        self._cascade_discarded.inc(num_discarded_tokens)

    def exposition(self, stats: EngineStats | None) -> bytes:
        """Return the text that Prometheus scrapes; without the engine's part while it is down."""
        return exposition([*engine_families(stats), *self.registry.collect()])

    def _histogram(self, stem: str, text: str, buckets: tuple[float, ...]) -> ThreadHistogram:
        return ThreadHistogram(
            f"outrider_{stem}", text, "tier", buckets=buckets, registry=self.registry
        )

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        return Counter(f"outrider_{stem}", text, labels, registry=self.registry)


def engine_families(stats: EngineStats | None) -> Iterator[Metric]:
    """Yield one family for each number of a snapshot, with one sample for each tier."""
    if stats is not None:
        yield from _tier_metrics(stats)
        yield from _speculation_metrics(stats)
        yield from _store_metrics(stats.store)
        yield from _peer_metrics(stats.peers)


def _tier_metrics(stats: EngineStats) -> Iterator[Metric]:
    gauges = {
        "num_requests_running": ("Sequences that compute.", "num_running"),
        "num_requests_waiting": ("Sequences in the queue.", "num_waiting"),
        "num_requests_held": (
            "Waiting sequences that the queue by deadlines holds back of its own accord: with one "
            "answer more, others would miss their objectives.",
            "num_held_newcomers",
        ),
        "adapters_resident": ("LoRA adapters in memory.", "num_adapters"),
        "adapters_resident_bytes": ("Bytes of them.", "adapter_bytes"),
        "kv_cache_usage_perc": ("Share of blocks in use (1 is full).", "kv_cache_usage"),
    }
    counters = {
        "prefix_cache_queries": ("Tokens looked up.", "prefix_cache_queries"),
        "prefix_cache_hits": ("Tokens found.", "prefix_cache_hits"),
        "num_preemptions": ("Sequences that had to give their blocks back.", "num_preemptions"),
        "request_holds": (
            "Waits of requests that the queue by deadlines held back of its own accord.",
            "num_newcomer_holds",
        ),
        "request_held_seconds": (
            "Time for which the queue by deadlines held requests back, of all together.",
            "newcomer_held_s",
        ),
    }
    for stem, (text, attribute) in gauges.items():
        gauge = GaugeMetricFamily(f"outrider_{stem}", text, labels=["tier"])
        for tier, tier_stats in stats.tiers.items():
            gauge.add_metric([tier], _number(tier_stats, attribute))
        yield gauge
    for stem, (text, attribute) in counters.items():
        counter = CounterMetricFamily(f"outrider_{stem}", text, labels=["tier"])
        for tier, tier_stats in stats.tiers.items():
            counter.add_metric([tier], _number(tier_stats, attribute))
        yield counter
    yield from _step_metrics(stats)


def _step_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "outrider_engine_steps",
        "Steps of the engine: each gives every running answer a token or more.",
        value=stats.num_steps,
    )
    yield CounterMetricFamily(
        "outrider_engine_not_finite",
        "Answers that failed because a model computed NaN or infinity.",
        value=stats.num_not_finite,
    )
    yield GaugeMetricFamily(
        "outrider_engine_unfit",
        "1 where the last two answers or more failed so, with no token between: check the weights.",
        value=stats.is_unfit,
    )
    seconds = CounterMetricFamily(
        "outrider_engine_step_seconds",
        "Time of these steps. passes: in the models' passes. host: beside them, to plan, draft, "
        "read tokens and send them; a device may have nothing to do in that gap.",
        labels=["part"],
    )
    seconds.add_metric(["passes"], stats.step_forward_s)
    seconds.add_metric(["host"], stats.step_host_s)
    yield seconds


def _store_metrics(stats: StoreStats) -> Iterator[Metric]:
    """Make the figures of the folder for keys and values (engine.kv_folder)."""
    gauges = {
        "extents": ("Files of this engine's models in engine.kv_folder.", stats.num_extents),
        "bytes": ("Bytes of all files there.", stats.num_bytes),
    }
    counters = {
        "restored_tokens": ("Prompt tokens that came from there.", stats.num_restored_tokens),
        "saved_seconds": ("Computing that they saved, less the wait for them.", stats.saved_s),
        "written_bytes": ("Bytes of keys and values written there.", stats.num_written_bytes),
        "read_bytes": ("Bytes of keys and values read from there.", stats.num_read_bytes),
        "dropped": ("Files not written: no room, or evicted before.", stats.num_dropped),
        "failed": ("Files that the disk did not take or give.", stats.num_failed),
        "damaged": ("Files that were not what was written: not used.", stats.num_damaged),
    }
    for stem, (text, value) in gauges.items():
        yield GaugeMetricFamily(f"outrider_kv_folder_{stem}", text, value=value)
    for stem, (text, total) in counters.items():
        yield CounterMetricFamily(f"outrider_kv_folder_{stem}", text, value=total)


def _peer_metrics(stats: PeerStats) -> Iterator[Metric]:
    """Make the counters of keys and values that engines send each other."""
    counters = {
        "pulled_tokens": ("Prompt tokens that came from other engines.", stats.num_pulled_tokens),
        "pulled_bytes": ("Bytes of keys and values that came.", stats.num_pulled_bytes),
        "sent_bytes": ("Bytes of keys and values sent to other engines.", stats.num_sent_bytes),
        "late": ("Requests that waited in vain, as long as computing takes.", stats.num_late),
        "failed": ("Requests whose source was gone, empty, or refused.", stats.num_failed),
        "damaged": ("Requests that got what they had not asked for: not used.", stats.num_damaged),
    }
    for stem, (text, total) in counters.items():
        yield CounterMetricFamily(f"outrider_kv_peers_{stem}", text, value=total)


def _number(stats: TierStats, attribute: str) -> float:
    value: float = getattr(stats, attribute)
    return value


def _speculation_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Make the counters of drafts, which are made for the large tier only."""
    totals = {
        "spec_decode_num_drafts": ("Trees verified.", stats.num_drafts),
        "spec_decode_num_draft_tokens": ("Nodes verified.", stats.num_draft_tokens),
        "spec_decode_num_accepted_tokens": ("Nodes accepted.", stats.num_accepted_tokens),
        "spec_decode_num_unratified_tokens": (
            "Tokens of cascades that the large model alone would not have chosen.",
            stats.num_unratified_tokens,
        ),
        "spec_decode_compared_steps": (
            "Steps with guesses whose time was compared with that of steps without.",
            stats.num_stretched_steps,
        ),
        "spec_decode_compared_plain_steps": (
            "How many steps without guesses they lasted. Divided by the compared steps it is the "
            "stretch: so much slower is a request that is not helped by guesses.",
            stats.stretch_plain_steps,
        ),
    }
    for stem, (text, total) in totals.items():
        counter = CounterMetricFamily(f"outrider_{stem}", text, labels=["tier"])
        counter.add_metric(["large"], total)
        yield counter
    positions = CounterMetricFamily(
        "outrider_spec_decode_num_accepted_tokens_per_pos",
        "Nodes accepted at each depth of the tree, from 0.",
        labels=["tier", "position"],
    )
    for position, total in enumerate(stats.accepted_per_depth):
        positions.add_metric(["large", str(position)], total)
    yield positions
    by_source = {
        "spec_decode_num_draft_tokens_per_source": ("verified", stats.drafted_by_source),
        "spec_decode_num_accepted_tokens_per_source": ("accepted", stats.accepted_by_source),
    }
    for stem, (what, counts) in by_source.items():
        counter = CounterMetricFamily(
            f"outrider_{stem}",
            f"Nodes {what} by draft source and depth, from 0; with several sources a "
            "node counts for each.",
            labels=["source", "position"],
        )
        for source, totals_of_source in counts.items():
            for position, total in enumerate(totals_of_source):
                counter.add_metric([source, str(position)], total)
        yield counter
