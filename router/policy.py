"""From a prompt to a tier. A policy explains every decision in one short line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from router.scorer import RouterScorer

# The engine's word, said again: router/ may not import engine/.
Tier = Literal["small", "large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes, and why.

    `reason` is one ASCII line, fit for a header. `quality`: how safe the small model's answer was
    judged, in [0, 1]; None if nobody judged.
    """

    tier: Tier
    reason: str
    quality: float | None = None


class RoutePolicy(Protocol):
    """Chooses a tier from the text of a request. Must not block: the gateway calls it inline."""

    def route(self, text: str) -> Route:
        """Decide for one prompt; never raises for any string."""


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Every request goes to one tier; `why` says what leaves no choice."""

    tier: Tier
    why: str = "fixed"

    def route(self, text: str) -> Route:
        """The same route for every text."""
        del text
        return Route(tier=self.tier, reason=f"router: {self.why}, {self.tier} answers all")


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    """The small model answers from a quality of `threshold` on, else the large one."""

    scorer: RouterScorer
    threshold: float

    def __post_init__(self) -> None:
        """Raise ValueError if the threshold is not in [0, 1]."""
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold={self.threshold} must be in [0, 1]")

    def route(self, text: str) -> Route:
        """Estimate, compare, explain."""
        quality = self.scorer.estimate(text).quality
        if quality >= self.threshold:
            tier: Tier = "small"
            verdict, relation = "likely right", ">="
        else:
            tier, verdict, relation = "large", "likely too weak", "<"
        reason = f"router: small model {verdict} ({quality:.2f} {relation} {self.threshold:.2f})"
        return Route(tier=tier, reason=reason, quality=quality)


def load_policy(
    path: Path | None,
    *,
    tiers: Sequence[Tier] = ("small", "large"),
    threshold: float | None = None,
) -> RoutePolicy:
    """The policy for the loaded tiers and a router's folder (None: none is configured).

    `threshold` overrides the one that was chosen in training. Without a router the large tier
    answers: quality before cost. Raises ValueError if no tier is loaded or the threshold is out of
    range, and RouterFileError if the folder is not a router.
    """
    if not tiers:
        raise ValueError("no tier is loaded: nothing to route to")
    if len(set(tiers)) == 1:
        return FixedPolicy(tiers[0], "one tier loaded")
    if path is None:
        return FixedPolicy("large", "none configured")
    scorer = RouterScorer.load(path)
    return ThresholdPolicy(scorer, scorer.threshold if threshold is None else threshold)
