"""What the work on batches needs of the gateway: answers to single requests, and idle capacity."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.errors import EngineError
from outrider.engine.events import EngineStats
from outrider.gateway.tenancy.ledger.row import LedgerRow


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


@dataclass(slots=True, kw_only=True)
class IdleGate:
    """Opens while few other requests are under way than those of batches here."""

    read_stats: Callable[[], Awaitable[EngineStats | None]]
    upstream_load: Callable[[], int]
    """Requests under way at upstream servers."""
    max_others: int
    tell_held: Callable[[bool], None]
    num_own: int = 0

    async def is_open(self) -> bool:
        """Return whether a request of a batch may begin."""
        others = self.upstream_load() - self.num_own
        try:
            stats = await self.read_stats()
        except EngineError:
            stats = None
        if stats is not None:
            others += sum(each.num_running + each.num_waiting for each in stats.tiers.values())
        self.tell_held(others > self.max_others)
        return others <= self.max_others
