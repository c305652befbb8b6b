"""How an answer came to its tier, where that is not the one that was asked first."""

from dataclasses import dataclass
from typing import Literal

HandOffKind = Literal["policy", "quality", "confidence", "load", "capability", "failure"]
"""policy: it was wanted so. quality: the router found it too hard for the local model. confidence:
the local answer was too weak. load: the local models are too busy. capability: they cannot do it.
failure: whoever should have answered could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAnswer:
    """A streamed answer that broke off: what the client has of it.

    `text` is its content, of `num_tokens` tokens as far as anybody knows; `answer_id` its id.
    """

    text: str
    num_tokens: int
    answer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteReason:
    """Why a leg answers.

    `reason` is one ASCII line that says it; empty where the leg's own reason is all there is.
    `route_tier`: who was asked first. `is_degraded`: a tier elsewhere should have answered and
    could not. `quality` and `confidence` are what the local answer was believed to be worth;
    `num_held_tokens` of it were held back, `num_discarded_tokens` given up. `continues`: it goes on
    behind what another tier's answer had sent before it broke off.
    """

    hand_off: HandOffKind | None = None
    reason: str = ""
    route_tier: str | None = None
    is_degraded: bool = False
    quality: float | None = None
    confidence: float | None = None
    num_held_tokens: int = 0
    num_discarded_tokens: int = 0
    continues: PartialAnswer | None = None

    def explain(self, reason: str) -> str:
        """Why it came here, then a leg's own reason; what both say is said once."""
        parts = [part for text in (self.reason, reason) for part in text.split("; ") if part]
        return "; ".join(dict.fromkeys(parts))


DIRECT = RouteReason()
"""Nothing came before it."""
