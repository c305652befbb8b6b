"""The parts that choosing a tier needs beside the policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.gateway.answering.jobs.second_looks import SecondLooks
from outrider.router.assurance import LiveAssurance
from outrider.router.conversations import ConversationMemory
from outrider.router.costs import TokenPrices, TypicalRequest
from outrider.router.guard import RouteGuard
from outrider.router.policy import WatchOptions
from outrider.router.words import Prefer
from outrider.verifier.params import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingParts:
    """The parts that choosing a tier needs beside the policy."""

    prices: Mapping[Tier, TokenPrices] | None = None
    """None where the settings name none."""
    prefer: Prefer | None = None
    """What counts first for requests and keys that do not say it."""
    is_sticky: bool = True
    """A conversation's prefix cache is weighed in."""
    max_busy_factor: float = 4.0
    """The most that a queue of the large model multiplies the gain by that is required of it."""
    watch: WatchOptions = field(default_factory=WatchOptions)
    """For reports; the policy has its own."""
    guard: RouteGuard | None = None
    pair: str | None = None
    """Fingerprints of the models that the router was trained for, to be compared with the engine's.
    None: nothing is compared."""
    summary: str = ""
    """The way in which the tier is chosen, in a few words."""
    assured: LiveAssurance | None = None
    """Wants to know the small model's width."""
    typical: TypicalRequest = field(default_factory=TypicalRequest)
    memory: ConversationMemory = field(default_factory=ConversationMemory)
    second_looks: SecondLooks = field(default_factory=SecondLooks)
    """Has the large model judge answers that are kept."""
