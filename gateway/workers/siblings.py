"""A worker's view of the others: what it asks them, and what it does for them."""

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from outrider.gateway.contract.errors.tree import UnavailableError
from outrider.gateway.workers.connections import Receiver
from outrider.gateway.workers.line import CallFailedError, Handler, Line, LineClosedError
from outrider.gateway.workers.merging import Families

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0
_REPORT_S: Final = 0.05

Apply = Callable[[Any], Awaitable[None]]
"""Makes a change in this worker. Raises where it cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of what workers keep in memory."""

    number: int
    """Its place among its maker's changes; 0 for a repeat."""
    subject: str
    """A later change with the same subject replaces it for workers that start later."""
    value: Any


class Siblings:
    """The other workers, over the parent. For one event loop; `run` is a task from the start on."""

    def __init__(self, number: int, num_workers: int, end: socket.socket) -> None:
        """`number`: this worker's, from 1. `end`: of the line to the parent."""
        self.number = number
        self.num_workers = num_workers
        self.num_up = 0
        """Workers that take requests, as the parent said last."""
        self._numbers = itertools.count(1)
        self._failures: dict[int, Exception] = {}
        self._apply: Apply | None = None
        self._can_change = asyncio.Event()
        self._turn = asyncio.Lock()
        self._handlers: dict[str, Handler] = {
            "alive": self._note_alive,
            "change": self._change,
            "crew": self._note_crew,
        }
        self._line = Line(end, self._handlers)
        self.run = self._line.run
        """Read what the parent says, until it ends."""

    def on(self, name: str, handler: Handler) -> None:
        """Have calls of this name answered."""
        self._handlers[name] = handler

    def notify_parent(self, name: str, value: Any = None) -> None:
        """Tell the parent something, without waiting."""
        self._line.notify(name, value)

    async def report_failure(self, value: Any) -> None:
        """Tell the parent why this worker ends, and wait until it knows."""
        with suppress(LineClosedError, CallFailedError, TimeoutError):
            await self._line.call("failed", value, timeout_s=_TIMEOUT_S)

    async def metrics(self) -> Families:
        """Return the sums of all workers' metrics, this one's included.

        Raises UnavailableError: a scrape that fails is better than counters that go backwards.
        """
        try:
            families: Families = await self._line.call("metrics", timeout_s=_TIMEOUT_S)
        except (LineClosedError, CallFailedError, TimeoutError):
            raise UnavailableError("The other workers' metrics cannot be read now.") from None
        return families

    async def others(self, name: str, value: Any = None) -> list[Any]:
        """Ask the other workers, and return the answers of those that gave one."""
        with suppress(LineClosedError, CallFailedError, TimeoutError):
            answers: list[Any] = await self._line.call(
                "others", (name, value), timeout_s=_TIMEOUT_S
            )
            return answers
        return []

    async def change(self, subject: str, value: Any) -> None:
        """Make a change in all workers, in this one first; raises what it raises here.

        Changes of several workers are made one after the other, in the same order everywhere.
        """
        if not self._can_change.is_set():
            raise UnavailableError("This gateway is still starting.", retry_after_s=1.0)
        change = Change(number=next(self._numbers), subject=subject, value=value)
        try:
            is_made = await self._line.call("in_turn", change)
        except (LineClosedError, CallFailedError):
            is_made = False
        failure = self._failures.pop(change.number, None)
        if failure is not None:
            raise failure
        if not is_made:
            raise UnavailableError("A process of this gateway did not answer; try again.")

    async def claim(self, name: bytes, body_hash: bytes) -> Any:
        """Return another worker's answer to an idempotency key; None: this one is to answer."""
        with suppress(LineClosedError, CallFailedError):
            return await self._line.call("claim", (name, body_hash))
        return None

    def unclaim(self, name: bytes) -> None:
        """Leave an idempotency key to whichever worker gets it next."""
        self._line.notify("unclaim", name)

    def on_change(self, apply: Apply) -> None:
        """Have changes made by this function, from `may_change` on."""
        self._apply = apply

    async def may_change(self) -> None:
        """Make changes from now on; return when those that came before have been made."""
        self._can_change.set()
        async with self._turn:  # whoever waits for it has come earlier
            return

    async def report_connections(self, receiver: Receiver, num_open: Callable[[], int]) -> None:
        """Tell the parent how many connections came and are open; never returns."""
        told = (0, 0)
        while True:
            now = (receiver.num_received, num_open())
            if now != told:
                self._line.notify("connections", now)
                told = now
            await asyncio.sleep(_REPORT_S)

    async def _change(self, change: Change) -> bool:
        """Make a change; False where it cannot be made."""
        async with self._turn:
            await self._can_change.wait()
            assert self._apply is not None
            try:
                await self._apply(change.value)
            except Exception as error:  # noqa: BLE001 - raised in `change`, or of another worker's
                if change.number:
                    self._failures[change.number] = error
                else:
                    logger.warning("another worker's change failed error=%s", error)
                return False
        return True

    async def _note_alive(self, _: object) -> None:
        """Answer the parent's question whether this event loop still turns."""

    async def _note_crew(self, num_up: int) -> None:
        self.num_up = num_up
