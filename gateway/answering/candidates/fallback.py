"""One API request while it is answered: its candidates are tried in turn until one has begun."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

import msgspec

from outrider.engine.errors import (
    CrashSuspectError,
    EngineError,
    InfeasibleObjectiveError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from outrider.gateway.answering.candidates.basis import AnswerBasis
from outrider.gateway.answering.candidates.cut_short import CutShortError
from outrider.gateway.contract.answers.responder import (
    DIRECT,
    AnswerFacts,
    HandOffError,
    HandOffKind,
    Place,
    Responder,
    RouteReason,
)
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BudgetError,
    EngineLostTwiceError,
    GatewayError,
    GenerationError,
    LoopError,
    NotReadyError,
    RateLimitError,
    ThrottledError,
    UnavailableError,
    UpstreamError,
    UpstreamRefusalError,
)

log = logging.getLogger(__name__)

# The model's name or the path is wrong: an error in the settings, not in the request.
_NOT_FOUND: Final = frozenset({404, 405})
_MAX_NAMES: Final = 16
_MAX_NAME_CHARS: Final = 64

_NAMES: Final[Mapping[Place, str]] = {
    "server": "small model's server",
    "local": "local models",
    "cloud": "upstream tier",
}

_Begun = tuple[AsyncGenerator[bytes], bytes]
"""The body of a responder, without its first part, and that part."""


class AnswerCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """Local or upstream models that may answer. `open` makes the responder from the route reason.

    `patience_s` returns the seconds that the responder may take to begin, where the next candidate
    must still have time to answer; None: no bound. `ignored_fields`: of the request, which these
    models do not get.
    """

    name: Place
    open: Callable[[RouteReason], Awaitable[Responder]]
    patience_s: Callable[[], float | None] = msgspec.field(default=lambda: None)
    ignored_fields: Sequence[str] = ()


class Lineup(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates that may answer a request, in order.

    `candidates` are tried as long as nothing was sent. One that is listed twice is tried again only
    if it handed over before, and the one that took over failed. `origin`: why the first is tried.
    continues_on_failure: another candidate may continue a broken answer. `on_begin` gets
    the reason of a responder that begins in place of the first choice, and its tier. `arm`: the
    request's arms of experiments.
    """

    candidates: Sequence[AnswerCandidate]
    origin: RouteReason = DIRECT
    continues_on_failure: bool = False
    on_begin: Callable[[RouteReason, str], None] = msgspec.field(default=lambda origin, tier: None)
    arm: str = ""


Instead = Callable[[Exception], Awaitable[Lineup | None]]
"""The lineup that follows one that has led to this error: without experiments, or the next model's.

None where there is none. May raise its own error, in place of this one.
"""


class FallbackChain:
    """One API request while it is answered. Use `parts` once."""

    def __init__(
        self,
        lineup: Lineup,
        *,
        is_streamed: bool,
        is_private: bool = False,
        deadline_s: float | None = None,
        instead: Instead | None = None,
        basis: AnswerBasis | None = None,
    ) -> None:
        """`is_private`: only the local models may see the request. `deadline_s`: on the clock.

        `instead` is called with the error that would be raised, to get another lineup in place of
        the current one: before the first part, and where an answer broke off that can continue.
        `basis`: what the answer follows from.
        """
        self.is_streamed = is_streamed
        self.is_private = is_private
        self.deadline_s = deadline_s
        self.basis = basis
        self.responder: Responder | None = None
        self.headers: dict[str, str] = {}
        """Headers of the response; complete once an answer has begun."""
        self._lineup = lineup
        self._instead = instead
        self._failures: dict[Place, Exception] = {}
        self._current: AnswerCandidate | None = None
        self._cut_short: tuple[CutShortError, Responder] | None = None

    @property
    def arm(self) -> str:
        """The request's arms of experiments; final once an answer has begun."""
        return self._lineup.arm

    async def parts(self) -> AsyncGenerator[bytes]:
        """The body of the response. Closing this ends all work on the request.

        Raises GatewayError or EngineError; before the first part, that of the most telling failure.
        """
        begun: _Begun | None = await self._begin()
        if self._current is not None and self._current.ignored_fields:
            self.headers["x-outrider-ignored-fields"] = _listed(self._current.ignored_fields)
        while begun is not None:
            parts, part = begun
            begun = None
            async with aclosing(parts):
                yield part
                try:
                    async for part in parts:
                        yield part
                except (GatewayError, EngineError) as error:
                    begun = await self._continued(error)
                    if begun is not None:
                        continue
                    if not isinstance(error, CutShortError):
                        raise
                    yield error.ending

    @property
    def facts(self) -> AnswerFacts | None:
        """The facts known of the answer; None where no responder began to work on one."""
        return None if self.responder is None else self.responder.facts

    async def _begin(self) -> _Begun:
        """Begin with the lineup; if it fails, with the lineups that follow it."""
        while True:
            try:
                return await self._begin_with(self._lineup)
            except (GatewayError, EngineError) as error:
                try:
                    is_followed = await self._follow(error)
                except (GatewayError, EngineError):
                    if self._cut_short is None:
                        raise
                    is_followed = False
                if not is_followed and self._cut_short is not None:
                    # It was withheld for an answer that no other model gives.
                    short, self.responder = self._cut_short
                    return _nothing(), short.ending
                if not is_followed:
                    raise

    async def _follow(self, error: GatewayError | EngineError) -> bool:
        """Take the lineup that follows after this error; False where there is none."""
        if isinstance(error, CutShortError) and self.responder is not None:
            self._cut_short = error, self.responder
        other = None if self._instead is None else await self._instead(error)
        if other is None:
            return False
        self._lineup, self.responder = other, None
        self._failures, self._current = {}, None
        return True

    async def _begin_with(self, lineup: Lineup) -> _Begun:
        """Return the body of the first responder that begins, and its first part."""
        origin = lineup.origin
        failures = self._failures
        for place in lineup.candidates:
            if place.name in failures:
                continue
            self._current = place
            try:
                begun = await self._first_part(place, origin)
                if self.responder is not None and origin is not DIRECT:
                    lineup.on_begin(origin, self.responder.facts.tier)
                return begun
            except HandOffError as handed:
                origin = handed.origin
            except (GatewayError, EngineError) as error:
                if isinstance(error, CutShortError) or not may_go_on(error, place.name):
                    raise
                failures[place.name] = error
                log.warning("place failed place=%s error=%s", place.name, _name_of(error))
                origin = _after_failure(origin, place.name, error)
        raise _summary(failures)

    async def _continued(self, error: GatewayError | EngineError) -> _Begun | None:
        """Continue an answer that this error broke off, with a candidate that is left."""
        before, current = self.responder, self._current
        unfinished = None if before is None else before.unfinished
        if before is None or unfinished is None or not self._lineup.continues_on_failure:
            return None
        assert current is not None
        is_cut_short = isinstance(error, CutShortError)
        name = before.taken_over_by or current.name
        if not is_cut_short and not may_go_on(error, name):
            return None
        self._failures[name] = error
        origin = _after_failure(self._lineup.origin, name, error)
        failed: GatewayError | EngineError = error
        while True:
            place = None if is_cut_short else self._next_place()
            if place is None:
                # An answer that its server ended early is continued by the next model only.
                is_cut_short = False
                place, origin = await self._place_behind(failed, origin)
            if place is None:
                self.responder, self._current = before, current
                return None
            log.warning("trying to go on place=%s error=%s", place.name, _name_of(failed))
            self._current = place
            try:
                return await self._first_part(place, replace(origin, continues=unfinished))
            except (GatewayError, EngineError) as another:
                log.warning("could not go on place=%s error=%s", place.name, _name_of(another))
                self._failures[place.name] = failed = another

    def _next_place(self) -> AnswerCandidate | None:
        """Return the first candidate of the lineup that has not failed."""
        left = (place for place in self._lineup.candidates if place.name not in self._failures)
        return next(left, None)

    async def _place_behind(
        self, error: GatewayError | EngineError, origin: RouteReason
    ) -> tuple[AnswerCandidate | None, RouteReason]:
        """Return the first candidate of the lineup that follows, and why it is tried."""
        try:
            is_followed = await self._follow(error)
        except (GatewayError, EngineError):
            return None, origin
        return (self._next_place(), self._lineup.origin) if is_followed else (None, origin)

    async def _first_part(self, place: AnswerCandidate, origin: RouteReason) -> _Begun:
        patience_s = place.patience_s()
        try:
            if patience_s is None:  # by far the most requests
                return await self._opened(place, origin)
            async with asyncio.timeout(patience_s):
                return await self._opened(place, origin)
        except TimeoutError:
            raise UnavailableError(
                f"The {_NAMES[place.name]} did not begin to answer in time for a fallback to "
                "another tier."
            ) from None

    async def _opened(self, place: AnswerCandidate, origin: RouteReason) -> _Begun:
        self.responder = responder = await place.open(origin)
        parts = responder.parts()
        try:
            return parts, await anext(parts)
        except BaseException:
            await parts.aclose()
            raise


def _listed(names: Sequence[str]) -> str:
    """List the first names, each cut to a bounded length."""
    return ", ".join(name[:_MAX_NAME_CHARS] for name in names[:_MAX_NAMES])


async def _nothing() -> AsyncGenerator[bytes]:
    """Yield no further part."""
    return
    yield b""


def may_go_on(error: GatewayError | EngineError, place: Place) -> bool:
    """Return whether another place may still answer: the request itself is not at fault."""
    if isinstance(error, EngineLostTwiceError):
        return False  # the request may be what crashes engines
    if isinstance(error, EngineError):
        return not isinstance(error, InvalidRequestError | CrashSuspectError)
    if isinstance(error, UpstreamRefusalError):
        # A small model's server may have too short a context; a larger tier has its own word.
        return place == "server" or error.status in _NOT_FOUND
    if isinstance(error, RateLimitError | BudgetError):
        return place != "local" and error.tier is not None  # a limit of that tier alone
    if isinstance(error, BadRequestError):
        return place != "local"  # not expressible in that server's API, but perhaps in ours
    return isinstance(
        error,
        UpstreamError
        | UnavailableError
        | ThrottledError
        | NotReadyError
        | GenerationError
        | LoopError,
    )


def _after_failure(origin: RouteReason, place: Place, error: Exception) -> RouteReason:
    """Return why the next place is tried."""
    kind: HandOffKind = "failure"
    match error:
        case PromptTooLongError():
            kind, why = "capability", "too long for the local models"
        case QueueFullError():
            kind, why = "load", "the queue of the local models is full"
        case InfeasibleObjectiveError():
            kind, why = "load", "the local models are too busy for its first token"
        case BadRequestError():
            kind, why = "capability", "the upstream tier does not support this request"
        case RateLimitError() | BudgetError():
            kind, why = "load", "the key's limit for the upstream tier is used up"
        case UpstreamRefusalError() if place == "server":
            kind, why = "capability", "the small model's server refuses it"
        case _:
            why = f"the {_NAMES[place]} failed: {_name_of(error)}"
    return replace(
        origin,
        hand_off=kind,
        reason=f"{origin.reason}; {why}" if origin.reason else why,
        is_degraded=place == "cloud",
    )


def _name_of(error: Exception) -> str:
    """A short stable word for an error."""
    return str(getattr(error, "code", None) or type(error).__name__)


def _summary(failures: Mapping[Place, Exception]) -> Exception:
    """One error for all failures: the original one if there was a single place."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    waits = [getattr(error, "retry_after_s", None) or 1.0 for error in failures.values()]
    said = " ".join(f"[{place}] {error}" for place, error in failures.items())
    return UnavailableError(
        f"No tier can answer at the moment; try again soon. {said}", retry_after_s=min(waits)
    )
