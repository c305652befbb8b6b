"""The engine's work for one local answer, delivered or not."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Final

import msgspec

from outrider.engine.events import Failed, Finished, RequestStats, TierWork
from outrider.verifier.params import Tier

# An abort takes effect after the step that runs; a long prefill on a CPU takes a second.
_LAST_WORD_S: Final = 10.0


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one engine request. Times are on the gateway's clock."""

    has_failed: bool
    stats: RequestStats | None
    """None where the engine reported none."""
    tier: Tier | None
    """The tier that it ended on, if known."""
    arrival_s: float
    ended_s: float
    switched_s: float | None
    """Its change of tier."""
    reason: str
    """stop, length or abort; of failures their code."""


@dataclass(slots=True)
class _Open:
    """A request that has not ended in the engine."""

    arrival_s: float
    over: asyncio.Event = field(default_factory=asyncio.Event)
    switched_s: float | None = None


class LocalWork:
    """Collects the engine's final statistics of the requests of one answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self.ended: list[Ended] = []

    def follow(
        self, request_id: str, arrival_s: float | None = None
    ) -> Callable[[Finished | Failed | None], None]:
        """Follow a request until it ends; pass the result to `EngineClient.submit`."""
        awaited = _Open(self._clock() if arrival_s is None else arrival_s)
        self._open[request_id] = awaited

        def on_end(event: Finished | Failed | None) -> None:
            if self._open.pop(request_id, None) is None:
                return
            awaited.over.set()
            if event is None:  # refused by the engine before any work
                return
            self.ended.append(
                Ended(
                    has_failed=isinstance(event, Failed),
                    stats=event.stats,
                    tier=None if isinstance(event, Failed) else event.tier,
                    arrival_s=awaited.arrival_s,
                    ended_s=self._clock(),
                    switched_s=awaited.switched_s,
                    reason=event.code if isinstance(event, Failed) else event.finish_reason,
                )
            )

        return on_end

    def switched(self, request_id: str) -> None:
        """Record that another tier continues the request from here."""
        if (awaited := self._open.get(request_id)) is not None:
            awaited.switched_s = self._clock()

    def forget(self, request_id: str) -> None:
        """Drop a request that was never sent."""
        if (awaited := self._open.pop(request_id, None)) is not None:
            awaited.over.set()

    @property
    def is_complete(self) -> bool:
        """Return True once every request has ended in the engine too."""
        return not self._open

    async def wait(self) -> None:
        """Wait until it is complete; for a bounded time, should the engine not respond."""
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                for awaited in list(self._open.values()):
                    await awaited.over.wait()
        except TimeoutError:
            self._open.clear()

    def by_tier(self) -> dict[Tier, TierWork]:
        """Return the sum of all requests' work, by tier."""
        done: dict[Tier, TierWork] = {}
        for ended in self.ended:
            for work in () if ended.stats is None else ended.stats.work:
                before = done.get(work.tier)
                done[work.tier] = work if before is None else total((before, work))
        return done


_COUNTS: Final = tuple(count.name for count in fields(TierWork) if count.name != "tier")


def total(works: Iterable[TierWork]) -> TierWork:
    """Return the sum of one tier's works."""
    works = tuple(works)
    counts = {name: sum(getattr(work, name) for work in works) for name in _COUNTS}
    return TierWork(tier=works[0].tier, **counts)
