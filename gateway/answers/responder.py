"""Ways to answer a request, and how one gives it over to another."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.answers.route_reason import HandOffKind, PartialAnswer, RouteReason
from gateway.errors.tree import GatewayError

PlaceName = Literal["local", "cloud"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """What headers and logs say of an answer. Seconds since the request's arrival.

    `inter_token_s`: the mean between two tokens, where the leg knows when there was one.
    """

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
    num_prompt_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


class Responder(Protocol):
    """One way to answer a request. Use once."""

    def parts(self) -> AsyncGenerator[bytes]:
        """The body of the response: events of a stream, or all at once.

        What it raises before the first part, nobody has seen anything of. Closing it ends all work.
        """

    @property
    def facts(self) -> AnswerFacts:
        """As far as they are known; the tier that answers is, with the first part."""

    @property
    def unfinished(self) -> PartialAnswer | None:
        """What was sent of an answer behind which others can go on; None where they cannot."""


class HandOffError(GatewayError):
    """A leg that must not answer: the next place is to. `origin` says why.

    `is_own`: the server's own setting decided, not one that the request brought.
    """

    def __init__(self, origin: RouteReason, *, is_own: bool = False) -> None:
        super().__init__(origin.reason)
        self.origin = origin
        self.is_own = is_own


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAnswer:
    """A local answer that its watch does not trust. `num_tokens` of it were held back.

    `quality`: how safe the router had judged it to be.
    """

    text: str
    num_tokens: int
    confidence: float
    reason: str
    quality: float | None = None


class TakenOver:
    """A leg that has begun to answer in another one's place."""

    def __init__(self, leg: Responder, rest: AsyncGenerator[bytes], first: bytes) -> None:
        """`first` is the first part of the body, `rest` what comes behind it."""
        self.leg = leg
        self._rest = rest
        self._first = first

    async def parts(self) -> AsyncGenerator[bytes]:
        """The whole body. Closing it ends the leg."""
        async with aclosing(self._rest) as rest:
            yield self._first
            async for part in rest:
                yield part

    async def aclose(self) -> None:
        """Nobody wants it after all."""
        await self._rest.aclose()


class HandedOverError(Exception):
    """Not a failure: ends a local answer whose place another leg has taken."""

    def __init__(self, taken: TakenOver) -> None:
        super().__init__("another tier has taken the answer over")
        self.taken = taken


EscalateFn = Callable[[DraftAnswer], Awaitable[TakenOver | None]]
"""Lets another tier answer; None where it cannot, within the time that there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A tier elsewhere that plays the large model's part for a request: what is too hard for the
    small model goes there."""

    name: str
    take_over: EscalateFn
