"""The interface of a responder, the reason why it answers, and the hand-over to another."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

HandOffKind = Literal["policy", "quality", "confidence", "load", "capability", "failure"]
"""policy: the request or the settings wanted it. quality: the router found it too hard for the
local model. confidence: the local answer was too weak. load: the local models are too busy.
capability: they cannot do it. failure: the tier that should have answered could not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialAnswer:
    """A streamed answer that broke off: the part that the client has."""

    text: str
    """Its content."""
    num_tokens: int
    """As far as that is known."""
    answer_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteReason:
    """The reason why a responder answers."""

    hand_off: HandOffKind | None = None
    reason: str = ""
    """One ASCII line; empty where the responder's own reason is all there is."""
    route_tier: str | None = None
    """The tier that was tried first."""
    is_degraded: bool = False
    """An upstream tier should have answered and could not."""
    quality: float | None = None
    """The estimated worth of the local answer, before it began."""
    confidence: float | None = None
    """The same, by what of it was held back."""
    num_held_tokens: int = 0
    """Tokens of the local answer that were held back."""
    num_discarded_tokens: int = 0
    """Its tokens that were given up."""
    continues: PartialAnswer | None = None
    """The part of another tier's answer, sent before it broke off, that this answer continues."""

    def explain(self, reason: str) -> str:
        """Join this reason and a responder's own; what both say is said once."""
        if not self.reason and "; " not in reason:  # by far the most answers
            return reason
        parts = [part for text in (self.reason, reason) for part in text.split("; ") if part]
        return "; ".join(dict.fromkeys(parts))


DIRECT = RouteReason()
"""No tier was tried before."""


Place = Literal["small_upstream", "local", "upstream"]
"""A server with the small model, this gateway's engine, or an upstream tier."""


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an answer for headers and logs. Seconds since the request's arrival."""

    tier: str
    reason: str
    job_id: str
    outcome: str
    num_tokens: int
    hand_off: HandOffKind | None = None
    confidence: float | None = None
    is_degraded: bool = False
    is_escalated: bool = False
    ttft_s: float | None = None
    inter_token_s: float | None = None
    """The mean between two tokens, where the responder can tell tokens apart."""
    num_prompt_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    is_cut_by_limit: bool = False
    """It ends where a limit of the tenant does."""
    left_out: tuple[str, ...] = ()
    """What its grammar does not enforce of schemas that are not strict, as the request's fields."""


class CheckedParts(Protocol):
    """An answer whose parts are checked."""

    is_streamed: bool

    @property
    def facts(self) -> AnswerFacts | None:
        """The facts as far as they are known."""

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for the chunk that carries `usage`."""


class AnswerCheck(Protocol):
    """Checks the answer of one request."""

    was_skipped: bool
    """Something went on unchecked: the answer is not kept."""

    @property
    def names(self) -> tuple[str, ...]:
        """What checks it."""

    def answer(self, answer: CheckedParts, parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Return the parts as they may be sent. Closing this closes `parts`."""


class Responder(Protocol):
    """One way to answer a request. Use once."""

    escalated_to: Place | None
    """The place whose responder answers in this one's place; None where it answers itself."""

    def parts(self) -> AsyncGenerator[bytes]:
        """Yield the body of the response: events of a stream, or all at once.

        If it raises before the first part, the client has seen nothing. Closing it ends all work.
        """

    @property
    def facts(self) -> AnswerFacts:
        """The facts as far as they are known; the answering tier is, with the first part."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Those of the facts that are known with the first part (`AnswerFacts.left_out`)."""

    @property
    def unfinished(self) -> PartialAnswer | None:
        """The sent part of an answer that another tier can continue; None where none can."""


class TryNextPlace(Exception):
    """Hands the request off to the next place. `origin` says why.

    `is_own`: the server's own setting decided, not one that the request brought.
    """

    def __init__(self, origin: RouteReason, *, is_own: bool = False) -> None:
        super().__init__(origin.reason)
        self.origin = origin
        self.is_own = is_own


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAnswer:
    """A small model's answer that its watch does not trust."""

    text: str
    num_tokens: int
    """The tokens that were held back."""
    confidence: float
    reason: str
    quality: float | None = None
    """How safe the router had judged it to be."""
    tier: str = "small"
    """The small model's."""
    on_agreement: Callable[[float, float], None] | None = None
    """As in the watch's WatchPlan."""

    def agrees(self, share: float) -> None:
        """Tell its watch the share of it that another tier wrote too."""
        if self.on_agreement is not None:
            self.on_agreement(self.confidence, share)

    @property
    def origin(self) -> RouteReason:
        """Return the reason of the responder that answers in its place."""
        return RouteReason(
            hand_off="confidence",
            reason=self.reason,
            route_tier=self.tier,
            quality=self.quality,
            confidence=self.confidence,
            num_held_tokens=self.num_tokens,
            num_discarded_tokens=self.num_tokens,
        )


class StrongAnswer:
    """A strong tier's answer in the place of a weak one; its responder has begun."""

    def __init__(
        self, place: Place, responder: Responder, rest: AsyncGenerator[bytes], first: bytes
    ) -> None:
        """`first` is the first part of the body, `rest` the parts after it."""
        self.place: Place = place
        self.responder = responder
        self._rest = rest
        self._first = first

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yield the whole body. Closing it ends the responder."""
        async with aclosing(self._rest) as rest:
            yield self._first
            async for part in rest:
                yield part

    async def aclose(self) -> None:
        """Close it unused: the answer is not wanted after all."""
        await self._rest.aclose()


class AnswerEscalated(Exception):
    """Ends a small model's answer: the strong tier's takes its place."""

    def __init__(self, answer: StrongAnswer) -> None:
        super().__init__("a strong tier answers instead")
        self.answer = answer


class TierOutlook(NamedTuple):
    """What may be expected of a tier for one request; None: unknown."""

    first_token_s: float | None
    cost_usd: float | None


class StrongTier(Protocol):
    """Models in the large one's part for a request: they get what is too hard for the small one."""

    @property
    def tier(self) -> str:
        """The name of their tier."""

    def outlook(self) -> TierOutlook:
        """Return what may be expected of them for this request."""

    async def escalate(self, weak: DraftAnswer) -> StrongAnswer | None:
        """Answer in the place of a weak answer; None where it cannot, in the time that is left."""

    def second_opinion(self, kept: DraftAnswer) -> None:
        """Write the beginning of an answer that is kept, to see how far it agrees."""
