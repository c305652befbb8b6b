"""One API request while it is answered: its candidates are tried in turn until one has begun."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Protocol, Self

import msgspec

from outrider.engine.errors import EngineError
from outrider.gateway.answering.candidates.failures import CutShortError, name_of, summary
from outrider.gateway.answering.candidates.walk import RequestWalk
from outrider.gateway.answering.reading.parsed_request import ParsedRequest
from outrider.gateway.contract.answers.responder import (
    DIRECT,
    AnswerFacts,
    Place,
    Responder,
    RouteReason,
    TryNextPlace,
)
from outrider.gateway.contract.errors.tree import GatewayError, UnavailableError
from outrider.gateway.contract.schema.routing import RouteReport

logger = logging.getLogger(__name__)

_MAX_NAMES: Final = 16
_MAX_NAME_CHARS: Final = 128

_Begun = tuple[AsyncGenerator[bytes], bytes]
"""The body of a responder, without its first part, and that part."""


StartTimeout = Callable[[], float | None]
"""Returns the seconds in which a candidate must begin to answer; None: no bound."""


def unbounded() -> None:
    """Return no bound, for the last candidate."""


class Candidate(Protocol):
    """Models of one kind that may answer one request: this gateway's engine's, or a server's."""

    @property
    def place(self) -> Place:
        """The kind of what answers."""

    @property
    def label(self) -> str:
        """The name of the place, for messages."""

    @property
    def ignored_fields(self) -> Sequence[str]:
        """The client's fields that these models do not get."""

    @property
    def start_timeout(self) -> StartTimeout:
        """Returns the seconds in which the models must begin: others need time after them."""

    def expected_s(self) -> float | None:
        """Return the seconds of an answer; 0 or None while nothing was measured."""

    async def open(self, origin: RouteReason) -> Responder:
        """Make a responder, not yet begun. Raises TryNextPlace where others are to answer."""

    async def route_report(self, origin: RouteReason) -> RouteReport:
        """Report where a request would go that begins here. Raises as `open` does."""

    def may_try_next(self, error: GatewayError | EngineError) -> bool:
        """Return whether another candidate may answer after this error of these models."""

    def after(self, origin: RouteReason, error: Exception) -> RouteReason:
        """Return why the next candidate is tried after this error."""

    def by_itself(self) -> Self:
        """Return the candidate without its strong tier, for when that tier has failed."""


class Lineup(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates that may answer a request until the first byte is sent."""

    candidates: Sequence[Candidate]
    """One for each place, in the order in which they are tried."""
    origin: RouteReason = DIRECT
    """Why the first one is tried."""
    continues_on_failure: bool = False
    """Another candidate may continue a broken answer."""
    on_begin: Callable[[RouteReason, str], None] = msgspec.field(default=lambda origin, tier: None)
    """Gets the reason of a responder that begins in place of the first choice, and its tier."""
    arm: str = ""
    """The request's arms of experiments."""


class FallbackChain:
    """One API request while it is answered. Use `parts` once."""

    def __init__(
        self, parsed: ParsedRequest, walk: RequestWalk, line_up: Callable[[ParsedRequest], Lineup]
    ) -> None:
        """`parsed`: the request for its first model; `walk` reads it for the further ones."""
        self.parsed = parsed
        self.is_streamed = parsed.is_streamed
        self.is_private = parsed.constraints.is_private
        self.deadline_s = parsed.constraints.deadline_s
        self.responder: Responder | None = None
        self.headers: dict[str, str] = {}
        """Headers of the response; complete once an answer has begun."""
        self._walk = walk
        self._line_up = line_up
        self._lineup = line_up(parsed)
        self._failures: dict[Place, Exception] = {}
        self._current: Candidate | None = None
        self._cut_short: tuple[CutShortError, Responder] | None = None

    @property
    def arm(self) -> str:
        """The request's arms of experiments; final once an answer has begun."""
        return self._lineup.arm

    @property
    def is_unchecked(self) -> bool:
        """Whether a check gave no verdict, and was to be passed over then."""
        check = self.parsed.context.check
        return check is not None and check.was_skipped

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for the chunk that carries `usage`."""
        options = self.parsed.body.document.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    def parts(self) -> AsyncGenerator[bytes]:
        """The body of the response, checked. Closing this ends all work on the request.

        Raises GatewayError or EngineError; before the first part, that of the most telling failure.
        """
        check = self.parsed.context.check
        parts = self._answered()
        return parts if check is None else check.answer(self, parts)

    async def _answered(self) -> AsyncGenerator[bytes]:
        """Yield the body as the models wrote it."""
        begun: _Begun | None = await self._begin()
        ignored = () if self._current is None else tuple(self._current.ignored_fields)
        if self.responder is not None:
            ignored += self.responder.left_out
        if ignored:
            self.headers["x-outrider-ignored-fields"] = _listed(ignored)
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
                    await self._follow(error)
                except (GatewayError, EngineError):
                    if self._cut_short is None:
                        raise
                    # It was withheld for an answer that no other model gives.
                    short, self.responder = self._cut_short
                    return _nothing(), short.ending

    async def _follow(self, error: GatewayError | EngineError) -> None:
        """Take the lineup that follows after this error. Raises where there is none."""
        if isinstance(error, CutShortError) and self.responder is not None:
            self._cut_short = error, self.responder
        self._lineup, self.responder = self._line_up(await self._walk.after(error)), None
        self._failures, self._current = {}, None

    async def _begin_with(self, lineup: Lineup) -> _Begun:
        """Return the body of the first responder that begins, and its first part."""
        origin = lineup.origin
        failures = self._failures
        left = list(lineup.candidates)
        for candidate in left:
            if candidate.place in failures:
                continue
            self._current = candidate
            try:
                begun = await self._first_part(candidate, origin)
                if self.responder is not None and origin is not DIRECT:
                    lineup.on_begin(origin, self.responder.facts.tier)
                return begun
            except TryNextPlace as signal:
                origin = signal.origin
                left.append(candidate.by_itself())  # tried if all that may answer instead fail
            except (GatewayError, EngineError) as error:
                if isinstance(error, CutShortError) or not candidate.may_try_next(error):
                    raise
                failures[candidate.place] = error
                logger.warning("place failed place=%s error=%s", candidate.place, name_of(error))
                origin = candidate.after(origin, error)
        raise summary(failures)

    async def _continued(self, error: GatewayError | EngineError) -> _Begun | None:
        """Continue an answer that this error broke off, with a candidate that is left."""
        broken, current = self.responder, self._current
        unfinished = None if broken is None else broken.unfinished
        if (
            broken is None
            or current is None
            or unfinished is None
            or not self._lineup.continues_on_failure
        ):
            return None
        by = broken.escalated_to or current.place
        failed_candidate = next(each for each in self._lineup.candidates if each.place == by)
        is_cut_short = isinstance(error, CutShortError)
        if not is_cut_short and not failed_candidate.may_try_next(error):
            return None
        self._failures[failed_candidate.place] = error
        origin = failed_candidate.after(self._lineup.origin, error)
        failed: GatewayError | EngineError = error
        while True:
            following = None if is_cut_short else self._next_candidate()
            if following is None:
                # An answer that its server ended early is continued by the next model only.
                is_cut_short = False
                following, origin = await self._candidate_behind(failed, origin)
            if following is None:
                self.responder, self._current = broken, current
                return None
            place = following.place
            logger.warning("trying to go on place=%s error=%s", place, name_of(failed))
            self._current = following
            try:
                return await self._first_part(following, replace(origin, continues=unfinished))
            except (GatewayError, EngineError) as another:
                logger.warning("could not go on place=%s error=%s", place, name_of(another))
                self._failures[place] = failed = another

    def _next_candidate(self) -> Candidate | None:
        """Return the first candidate of the lineup that has not failed."""
        left = (each for each in self._lineup.candidates if each.place not in self._failures)
        return next(left, None)

    async def _candidate_behind(
        self, error: GatewayError | EngineError, origin: RouteReason
    ) -> tuple[Candidate | None, RouteReason]:
        """Return the first candidate of the lineup that follows, and why it is tried."""
        try:
            await self._follow(error)
        except (GatewayError, EngineError):
            return None, origin
        return self._next_candidate(), self._lineup.origin

    async def _first_part(self, candidate: Candidate, origin: RouteReason) -> _Begun:
        timeout_s = candidate.start_timeout()
        try:
            if timeout_s is None:  # by far the most requests
                return await self._opened(candidate, origin)
            async with asyncio.timeout(timeout_s):
                return await self._opened(candidate, origin)
        except TimeoutError:
            raise UnavailableError(
                f"The {candidate.label} did not begin to answer in time for a fallback to "
                "another tier."
            ) from None

    async def _opened(self, candidate: Candidate, origin: RouteReason) -> _Begun:
        self.responder = responder = await candidate.open(origin)
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
