"""The reason why an answer comes from its tier, where that is not the first one tried."""

from dataclasses import dataclass
from typing import Literal

HandOffKind = Literal["policy", "quality", "confidence", "load", "capability", "failure"]
"""policy: the request or the settings wanted it. quality: the router found it too hard for the
local model. confidence: the local answer was too weak. load: the local models are too busy.
capability: they cannot do it. failure: the tier that should have answered could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAnswer:
    """A streamed answer that broke off: the part that the client has.

    `text` is its content, of `num_tokens` tokens as far as that is known; `answer_id` its id.
    """

    text: str
    num_tokens: int
    answer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteReason:
    """The reason why a responder answers.

    `reason` says it in one ASCII line; empty where the responder's own reason is all there is.
    `route_tier`: the tier that was tried first. `is_degraded`: an upstream tier should have
    answered and could not. `quality` and `confidence` are the estimated worth of the local answer;
    `num_held_tokens` of it were held back, `num_discarded_tokens` given up. `continues`: the part
    of another tier's answer, sent before it broke off, that this answer continues.
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
        """Join this reason and a responder's own; what both say is said once."""
        parts = [part for text in (self.reason, reason) for part in text.split("; ") if part]
        return "; ".join(dict.fromkeys(parts))


DIRECT = RouteReason()
"""No tier was tried before."""
