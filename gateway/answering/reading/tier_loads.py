"""How long each local tier lets requests wait, and what that makes the large one worth."""

from collections.abc import Callable

from outrider.gateway.answering.reading.local_load import LoadTicket, LocalLoad
from outrider.verifier.params import TIERS, Tier


class TierLoads:
    """The loads of the local tiers, each measured by the requests that stay on it."""

    def __init__(self, clock: Callable[[], float], *, max_factor: float = 4.0) -> None:
        """`max_factor`: the most that a queue multiplies the required gain by; 1 turns it off."""
        self._max_factor = max_factor
        self._loads = {tier: LocalLoad(clock) for tier in TIERS}

    def admit(self, tier: Tier, whole: LoadTicket) -> LoadTicket:
        """Add a request that a tier is to answer; its ticket tells `whole` everything as well."""
        return self._loads[tier].admit(whole)

    def busy_factor(self, num_tokens: int) -> float:
        """Return what the large tier's queue multiplies the gain by that is required of it.

        A gain is worth the longer time that an answer of this many tokens takes there. A longer
        wait than the small tier's adds to that time. 1 where a tier's times were not measured, or
        the large one is not the slower one.
        """
        small, large = (self._loads[tier].expected(num_tokens) for tier in ("small", "large"))
        wait_s = large.queue_s - small.queue_s
        small_s, large_s = (each.total_s - each.queue_s for each in (small, large))
        if wait_s <= 0.0 or not 0.0 < small_s < large_s:
            return 1.0
        return max(1.0, min(1.0 + wait_s / (large_s - small_s), self._max_factor))
