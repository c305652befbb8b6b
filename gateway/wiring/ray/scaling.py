"""How many replicas a deployment has: `ScaleToLatency` as a policy of Ray Serve."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.engine.events import EngineStats
from outrider.gateway.engines.fleet.autoscaling import FleetFigures, ScaleToLatency, ScalingLimits

WORK: Final = "work"
WAIT: Final = "wait_s"
OPEN: Final = "num_open"

_DECIDES_EVERY_S: Final = 2.0
_PEAK_KEPT: Final = 0.999  # of the fastest rate, with every figure
_ROUNDING: Final = 1e-9


@dataclass(slots=True)
class _Rate:
    """Tokens a second of one kind, and the fastest there was: what a replica can do."""

    peak: float = 0.0

    def note(self, tokens_per_s: float) -> float:
        """Return what share of the fastest rate this one is."""
        self.peak = max(self.peak * _PEAK_KEPT, tokens_per_s)
        return tokens_per_s / self.peak if self.peak > _ROUNDING else 0.0


class LoadMeter:
    """Makes figures of an engine's counters: what they were at the last call is remembered."""

    def __init__(self) -> None:
        self._last: tuple[int, int, float] | None = None
        self._prompts, self._outputs = _Rate(), _Rate()

    def figures(self, stats: EngineStats, now_s: float) -> dict[str, float]:
        """Return the load and the wait of a replica.

        WORK: the share of what it can do, by the fastest rates of prompts and of answers it was
        seen with. WAIT: seconds until the prompts that wait are computed. OPEN: unanswered
        requests.
        """
        tiers = stats.tiers.values()
        computed = sum(tier.num_computed_tokens for tier in tiers)
        written = sum(tier.num_output_tokens for tier in tiers)
        missing = max(sum(tier.num_prompt_tokens for tier in tiers) - computed, 0)
        work = 0.0
        if self._last is not None and now_s > self._last[2]:
            seconds = now_s - self._last[2]
            work = max(
                self._prompts.note(max(computed - self._last[0], 0) / seconds),
                self._outputs.note(max(written - self._last[1], 0) / seconds),
            )
        self._last = computed, written, now_s
        peak = self._prompts.peak
        return {
            WORK: work,
            WAIT: missing / peak if peak > _ROUNDING else 0.0,
            OPEN: float(sum(tier.num_running + tier.num_waiting for tier in tiers)),
        }


class ObjectivePolicy:
    """Made once for a deployment, by Ray Serve's controller, which heeds the delays itself."""

    def __init__(self, first_token_s: float, start_s: float) -> None:
        """The objective, and the seconds until a replica serves."""
        self._first_token_s = first_token_s
        self._start_s = start_s
        self._policy: ScaleToLatency | None = None
        self._decided_s: float | None = None
        self._number = 0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas; the state that Ray keeps is not needed."""
        if self._policy is None:
            limits = ScalingLimits(
                least=context.capacity_adjusted_min_replicas,
                most=context.capacity_adjusted_max_replicas,
                ttft_s=self._first_token_s,
                start_s=self._start_s,
                down_after_s=0.0,
            )
            self._policy, self._number = ScaleToLatency(limits), context.target_num_replicas
        now_s = context.current_time
        if self._decided_s is None:
            self._decided_s = now_s
        interval_s = now_s - self._decided_s
        if interval_s < _DECIDES_EVERY_S:
            return self._number, {}
        self._decided_s = now_s
        found: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        self._number = self._policy.decide(
            FleetFigures(
                interval_s=interval_s,
                work_s=sum(found.get(WORK, {}).values()) * interval_s,
                wait_s=max(found.get(WAIT, {}).values(), default=0.0),
                num_open=round(sum(found.get(OPEN, {}).values())),
                num_ready=context.current_num_replicas,
            )
        )
        return self._number, {}
