"""Work of a request that the gateway saw: all that is known if the engine died."""

from engine.events import (
    EngineEvent,
    PrefillDone,
    RequestStats,
    TierSwitched,
    TokensEmitted,
)
from engine.request import EngineRequest, Tier
from engine.sequences.work_counts import WorkCounts, note_start


class SeenWork:
    """Counts one request's events. At most what the engine itself would have counted.

    Rows of a prompt that was not complete yet, and those of drafts, are in no event.
    """

    __slots__ = ("_by_tier", "_is_cascade", "_num_prompt_tokens", "_tier")

    def __init__(self, request: EngineRequest) -> None:
        """Nothing was done yet."""
        self._num_prompt_tokens = len(request.prompt_token_ids)
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
            num_output_tokens=standing.num_output_tokens - standing.num_discarded_tokens,
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
