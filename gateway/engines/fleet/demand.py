"""Requests that wait for an engine which a fleet has yet to start: it may have scaled to zero."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from outrider.engine.errors import EngineNotStartedError, QueueFullError
from outrider.gateway.engines.backends.client import PausedRequests
from outrider.verifier.params import Tier

logger = logging.getLogger(__name__)

Needs = frozenset[Tier]
"""The tiers that must be in one engine."""

_ASK_EVERY_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.25  # for what tells no one that it has changed
_RETRY_S: Final = 10.0


class Demand:
    """Which engines the fleet can start, and which of them are waited for. For one event loop.

    startable: the tiers of each kind of engine that is started when a request waits for it. Whoever
    looks the fleet's addresses up tells it what is `wanted`.
    """

    def __init__(
        self,
        *,
        start_within_s: float = 120.0,
        max_waiting: int = 512,
        waits_for_tiers: bool = True,
    ) -> None:
        """`start_within_s`: a request waits so long, and `max_waiting` at most do.

        `waits_for_tiers`: also for a tier that was lost while others serve; False: an upstream tier
        may answer instead.
        """
        self.waits_for_tiers = waits_for_tiers
        self.startable: frozenset[Needs] = frozenset()
        self.start_within_s = start_within_s
        self._max_waiting = max_waiting
        self._waiting: Counter[Needs] = Counter()
        self._num_ever_paused = 0
        self._requested: set[Needs] = set()
        self._news = asyncio.Event()
        self._change = asyncio.Event()
        self._asked_s = 0.0

    @property
    def paused(self) -> PausedRequests:
        """Requests that wait, for an engine to be started or to come back."""
        return PausedRequests(num_now=self._waiting.total(), num_ever=self._num_ever_paused)

    def can_start(self, needs: Needs) -> bool:
        """Return whether the fleet would start an engine with these tiers."""
        return any(needs <= each for each in self.startable)

    def request_engine(self, needs: Needs) -> None:
        """Ask for an engine without waiting for it; ignored where none can be started."""
        if self.can_start(needs):
            self._requested.add(needs)
            self._news.set()

    async def wait_for(self, needs: Needs, is_there: Callable[[], bool], since_s: float) -> None:
        """Return when `is_there`, and have an engine with these tiers asked for until then.

        `since_s`: when the request began to wait, by time.monotonic. Raises QueueFullError, and
        EngineNotStartedError once its time is over.
        """
        num_waiting = self._waiting.total()
        if num_waiting >= self._max_waiting:
            raise QueueFullError(num_waiting=num_waiting, retry_after_s=_RETRY_S)
        if not num_waiting:
            logger.warning("new requests wait for an engine needs=%s", " ".join(sorted(needs)))
        self._waiting[needs] += 1
        self._num_ever_paused += 1
        self._news.set()
        try:
            async with asyncio.timeout(since_s + self.start_within_s - time.monotonic()):
                while True:
                    await _within(_LOOK_EVERY_S, self._change)
                    if is_there():
                        return
        except TimeoutError:
            raise EngineNotStartedError(
                f"No engine ran, and none has started within {self.start_within_s:g} s "
                f"(engine.start_within_s). It was asked for; try again in {_RETRY_S:g} s.",
                retry_after_s=_RETRY_S,
            ) from None
        finally:
            self._waiting[needs] -= 1

    def note_change(self) -> None:
        """Have all that wait look whether their engine is there."""
        self._change.set()
        self._change = asyncio.Event()

    def wanted(self) -> list[list[Tier]]:
        """Return the tiers of each engine that is waited for, or was lately requested."""
        waited_for = {
            needs for needs, count in self._waiting.items() if count and self.can_start(needs)
        }
        found = waited_for | self._requested
        self._requested.clear()
        if not waited_for:
            self._news.clear()
        return sorted(sorted(needs) for needs in found)

    async def pause(self, at_most_s: float) -> None:
        """Return after this time, or at once where an engine is waited for: every second then."""
        await _within(at_most_s, self._news)
        await asyncio.sleep(min(self._asked_s + _ASK_EVERY_S - time.monotonic(), at_most_s))
        self._asked_s = time.monotonic()


async def _within(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
