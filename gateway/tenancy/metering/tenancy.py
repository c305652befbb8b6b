"""Tenancy of a gateway: its keys, limits and ledger."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from outrider.gateway.audit.log import AuditLog
from outrider.gateway.storage.database import Database
from outrider.gateway.tenancy.keys.key_parts import KeyParts, open_parts
from outrider.gateway.tenancy.ledger.book import Ledger, NullLedger
from outrider.gateway.tenancy.ledger.prices import PriceBook
from outrider.gateway.tenancy.ledger.row import printable, row_ids
from outrider.gateway.tenancy.limits.answer_lengths import AnswerLengths
from outrider.gateway.tenancy.limits.limiter import Limiter
from outrider.gateway.tenancy.limits.presence import GatewayPresence
from outrider.gateway.tenancy.limits.unlimited import Unlimited

logger = logging.getLogger(__name__)

_CLOSING_S: Final = 15.0


class Settlements:
    """The remaining work for requests whose answers are over."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        """True if some work remains."""
        return bool(self._tasks)

    def add(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it in the background, also if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that never waits, at once: a task would cost as much as the work."""
        try:
            work.send(None)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - logged, as a task's is
            _log_failure(error)
            return
        work.close()
        raise RuntimeError("a settlement waits that was said never to wait")

    async def close(self) -> None:
        """Wait until all of it is done."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSING_S)
            for task in late:
                task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log_failure(error)


def _log_failure(error: BaseException) -> None:
    logger.error("settlement failed error=%s", type(error).__name__, exc_info=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """Keys, limits and ledger. Default: no authentication, no limits, no ledger."""

    keys: KeyParts = field(default_factory=open_parts)
    limiter: Limiter = field(default_factory=Unlimited)
    ledger: Ledger = field(default_factory=NullLedger)
    prices: PriceBook = field(default_factory=PriceBook.free)
    lengths: AnswerLengths = field(default_factory=AnswerLengths)
    end_user_form: Callable[[str], str] = printable
    """Returns the form of an end user's id that is counted and kept."""
    row_ids: Iterator[str] = field(default_factory=lambda: row_ids(random.Random(), time.time))
    settlements: Settlements = field(default_factory=Settlements)
    database: Database | None = None
    audit: AuditLog = field(default_factory=AuditLog)
    presence: GatewayPresence | None = None
    """Set where limits are counted in this process's memory on a database that other gateways may
    use."""

    async def start(self) -> None:
        """Open all parts. Raises StorageError where the database cannot be used."""
        await self.keys.authenticator.start()
        await self.ledger.start()
        await self.limiter.start()
        if self.presence is not None:
            await self.presence.start()

    async def close(self) -> None:
        """Settle and write all that is open."""
        if self.presence is not None:
            await self.presence.close()
        await self.settlements.close()
        await self.limiter.close()
        await self.ledger.close()
        await self.keys.authenticator.close()
        if self.database is not None:
            self.database.close()
