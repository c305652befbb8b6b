"""Gauges and counters of an engine at one moment."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.engine.events import EngineStats, TierStats
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.protocols import StretchCounts
from outrider.engine.queue.preparation import Preparation
from outrider.engine.queue.scheduler import Scheduler
from outrider.engine.sequences.pinned_prompts import PinnedPrompts
from outrider.engine.trees.speculation_counts import SpeculationCounts
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepCounts:
    """Seconds of whole steps, and of the forward passes in them."""

    num_steps: int = 0
    total_s: float = 0.0
    forward_s: float = 0.0
    num_not_finite: int = 0
    """Answers that failed by numbers that are not finite."""
    num_broken_in_a_row: int = 0
    """Those of them since a token was sound."""
    _started_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the present step began."""
        return time.perf_counter() - self._started_s

    def note_not_finite(self, tier: Tier) -> None:
        """Count an answer that failed by numbers that are not finite; say so where it goes on."""
        self.num_not_finite += 1
        self.num_broken_in_a_row += 1
        logger.error(
            "numbers are not finite%s tier=%s in_a_row=%d",
            ": the engine is unfit" if self.num_broken_in_a_row > 1 else "",
            tier,
            self.num_broken_in_a_row,
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to `total_s`."""
        self._started_s = time.perf_counter()
        yield
        self.total_s += self.elapsed_s


def snapshot(
    runners: Mapping[Tier, ModelRunner],
    scheduler: Scheduler,
    preparation: Preparation,
    speculation: SpeculationCounts,
    steps: StepCounts,
    stretch: StretchCounts,
    pins: PinnedPrompts,
) -> EngineStats:
    """Take the gauges and counters of an engine of these parts."""
    return EngineStats(
        tiers={
            tier: _tier_stats(tier, runner, scheduler, preparation)
            for tier, runner in runners.items()
        },
        num_steps=steps.num_steps,
        num_drafts=speculation.num_drafts,
        num_draft_tokens=speculation.num_draft_tokens,
        num_accepted_tokens=speculation.num_accepted_tokens,
        accepted_per_depth=speculation.accepted_per_depth(),
        num_stretched_steps=stretch.num_steps,
        stretch_plain_steps=stretch.plain_steps,
        num_unratified_tokens=speculation.num_unratified_tokens,
        drafted_by_source=speculation.drafted_by_source(),
        accepted_by_source=speculation.accepted_by_source(),
        step_host_s=steps.total_s - steps.forward_s,
        step_forward_s=steps.forward_s,
        num_not_finite=steps.num_not_finite,
        is_unfit=steps.num_broken_in_a_row > 1,
        store=preparation.store_stats(),
        peers=preparation.exchange.stats(),
        pins=pins.infos(),
    )


def _tier_stats(
    tier: Tier, runner: ModelRunner, scheduler: Scheduler, preparation: Preparation
) -> TierStats:
    counters, holds = scheduler.counters[tier], scheduler.newcomer_holds(tier)
    num_adapters, adapter_bytes = preparation.adapters.num_resident(tier)
    return TierStats(
        num_running=len(scheduler.running[tier]),
        num_waiting=preparation.count(tier)
        + sum(sequence.tier == tier for sequence in scheduler.waiting),
        num_blocks=runner.pool.num_blocks,
        num_used_blocks=runner.pool.num_used,
        num_adapters=num_adapters,
        adapter_bytes=adapter_bytes,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        num_preemptions=counters.num_preemptions,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_output_tokens=counters.num_output_tokens,
        num_computed_tokens=counters.num_computed_tokens,
        num_discarded_tokens=counters.num_discarded_tokens,
        num_drafted_tokens=counters.num_drafted_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_draft_rows=counters.num_draft_rows,
        num_held_newcomers=holds.num_now,
        num_newcomer_holds=holds.num_ended,
        newcomer_held_s=holds.seconds,
    )
