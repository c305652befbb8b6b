"""What the work on batches needs of the gateway: answers to single requests, and idle capacity."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineStats
from outrider.gateway.http.apis.batches.metrics import BatchMetrics
from outrider.gateway.tenancy.ledger.row import LedgerRow

_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a request, and what the ledger will have of it."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    rows: tuple[LedgerRow, ...]


class Ask(Protocol):
    """Answers requests as those that come by HTTP are answered."""

    async def ask(self, key_id: str, path: str, body: bytes, request_id: str) -> Answered:
        """Answer a request of a key as it is now. Errors are answers, too."""

    def forgive(self, rows: Sequence[LedgerRow]) -> None:
        """Enter rows that nobody is charged for: their answer is not kept."""


class IdleGate:
    """Opens while few other requests are under way than those of batches here."""

    def __init__(
        self,
        read_stats: Callable[[], Awaitable[EngineStats | None]],
        upstream_load: Callable[[], int],
        max_others: int,
        metrics: BatchMetrics,
    ) -> None:
        """`upstream_load`: requests under way at upstream servers."""
        self._read_stats = read_stats
        self._upstream_load = upstream_load
        self._max_others = max_others
        self._metrics = metrics
        self.num_own = 0

    async def is_open(self) -> bool:
        """Return whether a request of a batch may begin."""
        others = self._upstream_load() - self.num_own
        try:
            stats = await self._read_stats()
        except EngineError:
            stats = None
        if stats is not None:
            others += sum(each.num_running + each.num_waiting for each in stats.tiers.values())
        is_open = others <= self._max_others
        self._metrics.is_held.set(not is_open)
        return is_open

    async def wait(self, until_s: float, clock: Callable[[], float]) -> bool:
        """Wait until it is open; False where it is not before `until_s` on the clock."""
        while not await self.is_open():
            if clock() >= until_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True
