"""A circuit breaker: a failing server gets no requests until a probe has succeeded."""

import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from outrider.gateway.contract.errors.tree import BLAMELESS_FAILURES, FailureKind

logger = logging.getLogger(__name__)

BreakerState = Literal["closed", "open", "half_open"]

_MAX_IN_A_ROW: Final = 5
_NUM_OUTCOMES: Final = 20
_MIN_OUTCOMES: Final = 10
_MAX_FAILED_SHARE: Final = 0.5
_OPEN_S: Final = 1.0
_MAX_OPEN_S: Final = 30.0
_JITTER: Final = 0.2
"""Open times differ by up to this share, so that gateways do not all probe at the same moment."""
_CALM_S: Final = 60.0
"""Closed for so long, it starts with the shortest open time again."""
_HOLD_S: Final = 1.0
_MAX_HOLD_S: Final = 60.0
"""The longest wait that a server can ask for; after it the server is asked again."""


class Breaker:
    """The health of one server. Not thread-safe; no method waits.

    closed: requests are admitted. It opens on 5 failures in a row, or when half of the last 20
    outcomes, of at least 10, are failures. open: nothing is admitted. After 1 s, doubling up to
    30 s, it wants a probe; one that succeeds makes it half_open. half_open: one request at a time
    is admitted; the first that is answered closes it, a failure opens it for twice the time.

    A busy server (429) is not a broken one: it is only held back until the time that it names.

    `began` returns an era, a number that the outcome gives back: a request sent before the breaker
    changed its state says nothing about the state it has now. A state has one era.
    """

    __slots__ = (
        "_clock",
        "_closed_at_s",
        "_era",
        "_has_trial",
        "_num_doublings",
        "_num_failed",
        "_num_in_a_row",
        "_outcomes",
        "_rng",
        "_state",
        "held_until_s",
        "name",
        "open_until_s",
    )

    def __init__(
        self, *, clock: Callable[[], float], rng: random.Random, name: str = "server"
    ) -> None:
        self._clock = clock
        self._rng = rng
        self.name = name
        self._state: BreakerState = "closed"
        self._era = 0
        self._has_trial = False
        self._outcomes: deque[bool] = deque()  # True: failed; oldest first
        self._num_failed = 0
        self._num_in_a_row = 0
        self._num_doublings = 0
        self._closed_at_s = clock()
        self.open_until_s = 0.0
        self.held_until_s = 0.0

    @property
    def state(self) -> BreakerState:
        """Return closed, open or half_open."""
        return self._state

    def admits(self, now_s: float | None = None) -> bool:
        """Return whether a request may be sent now; `now_s` saves a look at the clock."""
        if self._state != "closed" and (self._state == "open" or self._has_trial):
            return False
        return self.held_until_s <= (self._clock() if now_s is None else now_s)

    @property
    def wait_s(self) -> float:
        """Return the seconds before which it will not admit; 0 where no time can be named."""
        until_s = self.held_until_s
        if self._state == "open":
            until_s = max(until_s, self.open_until_s)
        return max(until_s - self._clock(), 0.0)

    def began(self) -> int:
        """Record a request as sent. Returns the era; in half_open it is the trial.

        Must be ended once by `succeeded`, `failed` or `cancelled` with that era.
        """
        if self._state == "half_open":
            assert not self._has_trial, "two trials at the same time"
            self._has_trial = True
        return self._era

    def answered(self, era: int) -> int:
        """Record the first token: a trial has succeeded. Returns the era to continue with.

        The request still has to be ended; it may yet break off.
        """
        if era == self._era and self._state == "half_open":
            self._close()
            return self._era
        return era

    def succeeded(self, era: int) -> None:
        """Record a request that was answered to its end, or refused for its own fault."""
        era = self.answered(era)
        if era == self._era and self._state == "closed":
            self._num_in_a_row = 0
            self._book(failed=False)

    def failed(self, era: int, failure: FailureKind, retry_after_s: float | None = None) -> None:
        """Record a failure. `retry_after_s`: the server's requested pause."""
        if retry_after_s is not None or failure == "throttled":
            self._hold(retry_after_s)
        if failure in BLAMELESS_FAILURES:
            self.cancelled(era)
        elif era != self._era:
            return
        elif self._state == "half_open":
            self._open(f"trial_{failure}")
        elif self._state == "closed":
            self._num_in_a_row += 1
            self._book(failed=True)
            if self._num_in_a_row >= _MAX_IN_A_ROW or self._fails_often():
                self._open(failure)

    def cancelled(self, era: int) -> None:
        """Record a request given up on our side: it says nothing about the server."""
        if era == self._era:
            self._has_trial = False

    @property
    def wants_probe(self) -> bool:
        """Return whether a probe of the server is due."""
        return self._state == "open" and self._clock() >= self.open_until_s

    def probe_succeeded(self) -> None:
        """Record that the server is up: one request may try it. Ignored unless open."""
        if self._state == "open":
            self._enter("half_open")

    def probe_failed(self) -> None:
        """Record that it is down; the next probe is due after twice the time, if open."""
        if self._state == "open":
            self._extend()

    def _fails_often(self) -> bool:
        count = len(self._outcomes)
        return count >= _MIN_OUTCOMES and self._num_failed >= _MAX_FAILED_SHARE * count

    def _book(self, *, failed: bool) -> None:
        self._outcomes.append(failed)
        self._num_failed += failed
        if len(self._outcomes) > _NUM_OUTCOMES:
            self._num_failed -= self._outcomes.popleft()

    def _hold(self, retry_after_s: float | None) -> None:
        # `not >=` also takes in a NaN
        if retry_after_s is None or not retry_after_s >= 0:
            retry_after_s = _HOLD_S
        until_s = self._clock() + min(retry_after_s, _MAX_HOLD_S)
        self.held_until_s = max(self.held_until_s, until_s)

    def _open(self, reason: str) -> None:
        if self._state == "closed" and self._clock() - self._closed_at_s >= _CALM_S:
            self._num_doublings = 0
        self._enter("open")
        self._extend()
        logger.warning(
            "breaker opened replica=%s reason=%s open_s=%.1f",
            self.name,
            reason,
            self.open_until_s - self._clock(),
        )

    def _extend(self) -> None:
        open_s = min(_OPEN_S * 2**self._num_doublings, _MAX_OPEN_S)
        if open_s < _MAX_OPEN_S:
            self._num_doublings += 1
        self.open_until_s = self._clock() + open_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)

    def _close(self) -> None:
        self._enter("closed")
        self._closed_at_s = self._clock()
        logger.warning("breaker closed replica=%s", self.name)

    def _enter(self, state: BreakerState) -> None:
        self._state = state
        self._era += 1
        self._has_trial = False
        self._outcomes.clear()
        self._num_failed = 0
        self._num_in_a_row = 0
