"""The load that the local models are under, learnt from the times of the requests before.

Of all of them together, and of each tier: how long the large one lets requests wait.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.verifier.params import TIERS, Tier

_SHARE_OF_NEW: Final = 0.2
# Several requests begin in one step of the engine and then none for a while.
_SHARE_OF_NEW_INTERVAL: Final = 0.05
# Handed-over requests are not measured. So that a short jam does not divert all traffic for ever,
# measurements lose half their weight in this time without news. Queues change faster than speeds.
_QUEUE_HALF_LIFE_S: Final = 5.0
_SPEED_HALF_LIFE_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The expected times of a request that arrived now, in seconds from its arrival.

    A time that was never measured counts as 0.
    """

    queue_s: float
    """Until a model begins with it."""
    first_token_s: float
    """Until its first token."""
    total_s: float
    """Until its last token."""


class LoadTicket:
    """One request that the local models are to answer. `ended` must be called, whatever happens.

    The first call of each method counts; calls after the end do not. `whole` is a ticket of a wider
    load, which hears everything as well.
    """

    def __init__(
        self, load: "LocalLoad", admitted_s: float, whole: "LoadTicket | None" = None
    ) -> None:
        self._load = load
        self._whole = whole
        self._admitted_s = admitted_s
        self._queue_over_s: float | None = None
        self._first_text_s: float | None = None
        self._has_ended = False

    def began(self, queue_s: float | None = None) -> None:
        """Note that a model has begun with it after `queue_s`; None: it waited until now."""
        if self._whole is not None:
            self._whole.began(queue_s)
        if self._has_ended or self._queue_over_s is not None:
            return
        now_s = self._load.clock()
        waited_s = now_s - self._admitted_s
        if queue_s is not None:
            waited_s = min(max(queue_s, 0.0), waited_s)
        self._queue_over_s = self._admitted_s + waited_s
        self._load.note_began(self, waited_s)

    def first_text(self) -> None:
        """Note its first text; for an answer that is not streamed, its first token."""
        if self._whole is not None:
            self._whole.first_text()
        self.began()
        if self._has_ended or self._first_text_s is not None or self._queue_over_s is None:
            return
        self._first_text_s = self._load.clock()
        self._load.note_prefill(self._first_text_s - self._queue_over_s)

    def ended(self, num_tokens: int) -> None:
        """Note its end, whether answered, given up or refused, with this many tokens.

        Of several choices, those of the longest one.
        """
        if self._whole is not None:
            self._whole.ended(num_tokens)
        if self._has_ended:
            return
        self._has_ended = True
        now_s = self._load.clock()
        if self._first_text_s is not None and num_tokens > 1:
            self._load.note_token_time((now_s - self._first_text_s) / (num_tokens - 1))
        self._load.note_ended(self, has_begun=self._queue_over_s is not None)


class LocalLoad:
    """The local models' current load. For one event loop; `clock` is the gateway's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._queue = _Mean(_SHARE_OF_NEW, _QUEUE_HALF_LIFE_S)
        self._prefill = _Mean(_SHARE_OF_NEW, _SPEED_HALF_LIFE_S)
        self._token = _Mean(_SHARE_OF_NEW, _SPEED_HALF_LIFE_S)
        self._interval = _Mean(_SHARE_OF_NEW_INTERVAL, _QUEUE_HALF_LIFE_S)
        self._waiting: dict[LoadTicket, float] = {}  # when admitted, the oldest first
        self._num_running = 0
        self._num_running_then = 0  # when the last one began
        self._last_began_s: float | None = None  # None where no request was left waiting

    @property
    def num_waiting(self) -> int:
        """Requests that no model has begun with, as far as is known."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that a model has begun with."""
        return self._num_running

    def admit(self, whole: LoadTicket | None = None) -> LoadTicket:
        """Add a request that the local models are asked to answer now."""
        now_s = self.clock()
        ticket = LoadTicket(self, now_s, whole)
        self._waiting[ticket] = now_s
        return ticket

    def expected(self, num_tokens: int) -> Expected:
        """Return the expected times of an answer of this many tokens."""
        now_s = self.clock()
        queue_s = self._queue_s(now_s)
        first_token_s = queue_s + self._prefill.value(now_s)
        total_s = first_token_s + max(num_tokens - 1, 0) * self._token.value(now_s)
        return Expected(queue_s=queue_s, first_token_s=first_token_s, total_s=total_s)

    def would_miss(self, deadline_s: float, num_tokens: int) -> str | None:
        """Say why an answer of this many tokens would not be whole by `deadline_s`, on the clock.

        One line of ASCII; None where it would be, or nothing was measured.
        """
        left_s = deadline_s - self.clock()
        expected = self.expected(num_tokens)
        if expected.total_s <= left_s:
            return None
        if expected.queue_s > left_s:
            return f"load: {expected.queue_s:.1f} s of queue against {left_s:.1f} s left"
        return f"load: {expected.total_s:.1f} s for the answer against {left_s:.1f} s left"

    def queues_longer_than(self, max_queue_s: float) -> str | None:
        """Return why a request would wait too long, one line of ASCII; None where it would not."""
        queue_s = self._queue_s(self.clock())
        if queue_s <= max_queue_s:
            return None
        return f"load: {queue_s:.1f} s of queue, more than {max_queue_s:.1f} s"

    def note_began(self, ticket: LoadTicket, waited_s: float) -> None:
        """Learn from a request with which a model has begun after this wait."""
        now_s = self.clock()
        del self._waiting[ticket]
        self._num_running += 1
        self._num_running_then = self._num_running
        self._queue.add(waited_s, now_s)
        if self._last_began_s is not None:
            self._interval.add(now_s - self._last_began_s, now_s)
        self._last_began_s = now_s if self._waiting else None

    def note_prefill(self, prefill_s: float) -> None:
        """Learn from the time between the end of a request's wait and its first text."""
        self._prefill.add(prefill_s, self.clock())

    def note_token_time(self, token_s: float) -> None:
        """Learn from the mean time of an answer's further tokens."""
        self._token.add(token_s, self.clock())

    def note_ended(self, ticket: LoadTicket, *, has_begun: bool) -> None:
        """Note that a request is waited for no longer."""
        if has_begun:
            self._num_running -= 1
        else:
            del self._waiting[ticket]
        if not self._waiting:
            self._last_began_s = None

    def _queue_s(self, now_s: float) -> float:
        """The wait of the last requests; where some wait now, at least as long as they will."""
        waited_s = self._queue.value(now_s)
        if not self._waiting:
            # Where one has ended since the last one began, its seat is free.
            return waited_s if self._num_running >= self._num_running_then else 0.0
        # Before the first event it is unknown whether a request waits or a model reads it already.
        oldest_s = now_s - next(iter(self._waiting.values())) - self._prefill.value(now_s)
        in_turn_s = len(self._waiting) * self._interval.value(now_s)
        return max(waited_s, oldest_s, in_turn_s)


class TierLoads:
    """The loads of the local tiers, each measured by the requests that stay on it."""

    def __init__(self, clock: Callable[[], float], *, max_factor: float = 4.0) -> None:
        """`max_factor`: the most that a queue multiplies the required gain by; 1 turns it off."""
        self._max_factor = max_factor
        self._loads = {tier: LocalLoad(clock) for tier in TIERS}

    def admit(self, tier: Tier, whole: LoadTicket) -> LoadTicket:
        """Add a request that a tier is to answer; its ticket tells `whole` everything as well."""
        return self._loads[tier].admit(whole)

    def busy_factor(self, num_tokens: int) -> float:
        """Return what the large tier's queue multiplies the gain by that is required of it.

        A gain is worth the longer time that an answer of this many tokens takes there. A longer
        wait than the small tier's adds to that time. 1 where a tier's times were not measured, or
        the large one is not the slower one.
        """
        small, large = (self._loads[tier].expected(num_tokens) for tier in ("small", "large"))
        wait_s = large.queue_s - small.queue_s
        small_s, large_s = (each.total_s - each.queue_s for each in (small, large))
        if wait_s <= 0.0 or not 0.0 < small_s < large_s:
            return 1.0
        return max(1.0, min(1.0 + wait_s / (large_s - small_s), self._max_factor))


class _Mean:
    """A mean in which the newest value has a fixed share, and that fades where none come."""

    def __init__(self, share_of_new: float, half_life_s: float) -> None:
        self._share_of_new = share_of_new
        self._half_life_s = half_life_s
        self._mean: float | None = None
        self._last_s = 0.0

    def add(self, value: float, now_s: float) -> None:
        """Add a measured value; the first one counts in full at once."""
        before = value if self._mean is None else self._mean
        self._mean = before + self._share_of_new * (value - before)
        self._last_s = now_s

    def value(self, now_s: float) -> float:
        """The mean as far as it still counts; 0.0 where nothing was measured."""
        if self._mean is None:
            return 0.0
        age_s = max(now_s - self._last_s, 0.0)
        return self._mean * math.exp2(-age_s / self._half_life_s)
