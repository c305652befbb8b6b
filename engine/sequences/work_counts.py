"""Counts of work, kept twice in the same form: for each request, and for all of them together."""

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.engine.events import TierWork, TokensEmitted
from outrider.verifier.params import Tier


@dataclass(slots=True)
class WorkCounts:
    """Cumulative counts of what one tier's model did; see `TierWork` for their meaning."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Those left to compute at each start."""
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_discarded_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unratified_tokens: int = 0
    num_draft_rows: int = 0
    num_steps: int = 0
    num_cached_at_first: int | None = None
    """What a request's first start found in the prefix cache. None before that."""

    def note_emission(self, event: TokensEmitted) -> None:
        """Count one step's tokens, and the tree that they came from."""
        self.num_steps += 1
        self.num_output_tokens += len(event.token_ids)
        self.num_drafted_tokens += event.num_drafted_tokens
        self.num_accepted_tokens += event.num_accepted_tokens
        self.num_unratified_tokens += event.num_unratified_tokens

    def of_tier(self, tier: Tier, *, num_prompt_tokens: int) -> TierWork:
        """A request's counts as it is told them; its prompt has `num_prompt_tokens`."""
        cached = self.num_cached_at_first
        return TierWork(
            tier=tier,
            num_prompt_tokens=0 if cached is None else num_prompt_tokens,
            num_cached_tokens=min(cached or 0, num_prompt_tokens),
            num_computed_tokens=self.num_computed_tokens,
            num_output_tokens=self.num_output_tokens,
            num_discarded_tokens=self.num_discarded_tokens,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_unratified_tokens=self.num_unratified_tokens,
            num_draft_rows=self.num_draft_rows,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_queried_tokens=self.prefix_cache_queries,
            num_hit_tokens=self.prefix_cache_hits,
        )


def note_start(counts: Iterable[WorkCounts], *, num_tokens: int, num_cached: int) -> None:
    """A sequence of `num_tokens` started, `num_cached` of them from the prefix cache."""
    for count in counts:
        count.prefix_cache_queries += num_tokens
        count.prefix_cache_hits += num_cached
        count.num_prompt_tokens += num_tokens - num_cached
        if count.num_cached_at_first is None:
            count.num_cached_at_first = num_cached
