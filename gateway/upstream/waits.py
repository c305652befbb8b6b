"""Time limits of one exchange with a server, and the one timer that enforces them."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.gateway.contract.errors.tree import DeadlineExceededError, FailureKind, UpstreamError
from outrider.gateway.settings.tiers import TimeoutSettings

# Event loops round to milliseconds, so a timer may fire a little before its time.
_TICK_S: Final = 0.002

_LATE: Final[dict[FailureKind, str]] = {
    "connect_timeout": "did not take the connection within {} s",
    "first_token_timeout": "sent no token within {} s",
    "between_tokens_timeout": "fell silent for {} s in the middle of its answer",
    "total_timeout": "did not finish its answer within {} s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLimits:
    """One request to one server, and the time limits of its phases.

    Points in time are on the event loop's clock.
    """

    tier: str
    replica: str
    """host:port."""
    timeouts: TimeoutSettings
    started_s: float
    deadline_s: float = math.inf
    """The request's own one, infinite where it has none."""

    @property
    def end_s(self) -> float:
        """Return the time at which all of it must be over."""
        return min(self.started_s + self.timeouts.total_s, self.deadline_s)

    @property
    def first_token_s(self) -> float:
        """Return the time at which the first token must be there."""
        return min(self.started_s + self.timeouts.first_token_s, self.end_s)

    def error(self, failure: FailureKind, what: str, *, status: int | None = None) -> UpstreamError:
        """Return a failure of this exchange; `what` continues the sentence "The cloud tier"."""
        end = "" if what.endswith("?") else "."
        message = f"The {self.tier} tier {what}{end}"
        return UpstreamError(message, failure=failure, replica=self.replica, status=status)

    def late(self, due_s: float, failure: FailureKind) -> UpstreamError | DeadlineExceededError:
        """Return the error for a phase late at `due_s`: the deadline's, the total's or
        `failure`."""
        if due_s >= self.deadline_s:
            return DeadlineExceededError(
                f"The request's deadline passed before the {self.tier} tier had answered it."
            )
        return self.too_slow("total_timeout" if due_s >= self.end_s else failure)

    def given_up(self) -> UpstreamError:
        """Return the error for an exchange ended from here."""
        return self.error("reset", "gets no more requests, because the gateway is shutting down")

    def too_slow(self, failure: FailureKind) -> UpstreamError:
        """Return the error for one of the four time limits."""
        timeouts = self.timeouts
        allowed_s = {
            "connect_timeout": timeouts.connect_s,
            "first_token_timeout": timeouts.first_token_s,
            "between_tokens_timeout": timeouts.between_tokens_s,
            "total_timeout": timeouts.total_s,
        }[failure]
        return self.error(failure, _LATE[failure].format(f"{allowed_s:g}"))


def _nothing() -> None:
    pass


class WaitTimer:
    """One timer for many waits in a row.

    A new wait moves the due time, which costs nothing: the timer stays where it is, and looks at
    the due time only when it fires.
    """

    __slots__ = ("_due_s", "_fires_s", "_handle", "_loop", "_on_late")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_late: Callable[[], None]) -> None:
        self._loop = loop
        self._on_late = on_late
        self._due_s = math.inf
        self._fires_s = math.inf
        self._handle: asyncio.TimerHandle | None = None

    def wait_until(self, due_s: float) -> None:
        """Call `on_late` at `due_s`, unless `rest` comes first."""
        self._due_s = due_s
        if due_s < self._fires_s:
            self._arm(due_s)

    def rest(self) -> None:
        """Stop the clock: no reader waits now."""
        self._due_s = math.inf

    def close(self) -> None:
        """Stop for good, and let go of the callback: its owner often holds this timer."""
        self._due_s = self._fires_s = math.inf
        self._on_late = _nothing
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, due_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._fires_s = due_s
        self._handle = self._loop.call_at(due_s, self._fire)

    def _fire(self) -> None:
        self._handle = None
        self._fires_s = math.inf
        if self._due_s - self._loop.time() <= _TICK_S:
            self._on_late()
        elif self._due_s < math.inf:
            self._arm(self._due_s)
