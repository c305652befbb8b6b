"""Counts the work of a request that the gateway saw, for when its engine dies."""

from dataclasses import replace

from outrider.engine.events import (
    EngineEvent,
    PrefillDone,
    RequestStats,
    TierSwitched,
    TierWork,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.engine.sequences.work_counts import WorkCounts, note_start
from outrider.verifier.params import TIERS, Tier


class SeenWork:
    """Counts one request's events of one engine. At most what that engine would have counted.

    Rows of a prompt that was not complete yet, and those of drafts, are in no event.
    """

    __slots__ = ("_by_tier", "_is_cascade", "_num_prompt_tokens", "_num_resumed", "_tier")

    def __init__(self, request: EngineRequest) -> None:
        """Begin with no work."""
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_resumed = len(request.resumed_token_ids or ())
        self._is_cascade = request.cascade is not None
        self._tier: Tier = request.tier
        self._by_tier: dict[Tier, WorkCounts] = {}

    def add(self, event: EngineEvent) -> None:
        """Count one event, in the engine's order."""
        match event:
            case TokensEmitted():
                self._on(self._tier).note_emission(event)
            case PrefillDone():
                self._tier = event.tier
                self._note_prefill(event)
            case TierSwitched():
                self._tier = event.tier
                if not event.keeps_answer:
                    self._num_resumed = 0
                    for counts in self._by_tier.values():
                        counts.num_discarded_tokens = counts.num_output_tokens

    def stats(self) -> RequestStats:
        """The sums, as the engine would have told them; times are not known."""
        work = tuple(
            counts.of_tier(tier, num_prompt_tokens=self._num_prompt_tokens)
            for tier, counts in sorted(self._by_tier.items(), reverse=True)  # small, large
        )
        standing = self._by_tier.get(self._tier, WorkCounts())
        return RequestStats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=standing.num_cached_at_first or 0,
            num_output_tokens=(
                self._num_resumed + standing.num_output_tokens - standing.num_discarded_tokens
            ),
            num_drafted_tokens=standing.num_drafted_tokens,
            num_accepted_tokens=standing.num_accepted_tokens,
            num_unratified_tokens=standing.num_unratified_tokens,
            num_steps=standing.num_steps,
            work=work,
        )

    def _note_prefill(self, event: PrefillDone) -> None:
        counts = self._on(event.tier)
        num_tokens = event.num_prompt_tokens
        # Behind a kept answer the cache may have held more than the prompt.
        num_cached = min(event.num_cached_tokens, num_tokens)
        note_start((counts,), num_tokens=num_tokens, num_cached=num_cached)
        num_decoded = int(self._is_cascade and event.tier == "large")  # a cascade's last token
        counts.num_computed_tokens += max(num_tokens - num_cached - num_decoded, 0)

    def _on(self, tier: Tier) -> WorkCounts:
        return self._by_tier.setdefault(tier, WorkCounts())


def retracted(stats: RequestStats) -> RequestStats:
    """Return the stats of an answer that a change of tier took back: its work stays."""
    work = tuple(replace(own, num_discarded_tokens=own.num_output_tokens) for own in stats.work)
    return RequestStats(num_prompt_tokens=stats.num_prompt_tokens, work=work)


def joined(before: RequestStats, after: RequestStats) -> RequestStats:
    """Return the stats of a request that one engine began and another resumed.

    `after` counts what was resumed among the answer's tokens, but not the work for it.
    """
    # Behind resumed tokens the cache may have held more than the prompt.
    began = before if before.num_output_tokens else after
    return replace(
        after,
        num_cached_tokens=began.num_cached_tokens,
        num_drafted_tokens=before.num_drafted_tokens + after.num_drafted_tokens,
        num_accepted_tokens=before.num_accepted_tokens + after.num_accepted_tokens,
        num_unratified_tokens=before.num_unratified_tokens + after.num_unratified_tokens,
        num_reused_tokens=before.num_reused_tokens + after.num_reused_tokens,
        num_steps=before.num_steps + after.num_steps,
        num_preemptions=before.num_preemptions + after.num_preemptions,
        queue_s=None if before.num_output_tokens else after.queue_s,
        ttft_s=None if before.num_output_tokens else after.ttft_s,
        work=_joined_work(before.work, after.work),
    )


def _joined_work(before: tuple[TierWork, ...], after: tuple[TierWork, ...]) -> tuple[TierWork, ...]:
    """Sums by tier; the prompt's length and what was cached of it at first are no sums."""
    found: dict[Tier, TierWork] = {own.tier: own for own in before}
    for own in after:
        first = found.get(own.tier)
        if first is None:
            found[own.tier] = own
            continue
        sums = {
            name: getattr(first, name) + getattr(own, name)
            for name in TierWork.__slots__
            if name.startswith("num_")
        }
        sums["num_prompt_tokens"] = max(first.num_prompt_tokens, own.num_prompt_tokens)
        began = first if first.num_prompt_tokens else own
        sums["num_cached_tokens"] = began.num_cached_tokens
        found[own.tier] = TierWork(tier=own.tier, **sums)
    return tuple(found[tier] for tier in TIERS if tier in found)
