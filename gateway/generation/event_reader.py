"""An engine's stream of events, read with time limits that do not disturb it."""

import asyncio
from collections.abc import AsyncGenerator

from engine.events import EngineEvent
from gateway.errors.tree import EngineLostError


class EventReader:
    """Reads one request's events. Closing it closes the stream, which aborts what still runs.

    Cancelling `anext` of a generator ends the generator; so a read that runs out of time goes on
    in a task, and the next read waits for it.
    """

    def __init__(self, stream: AsyncGenerator[EngineEvent]) -> None:
        self._stream = stream
        self._pending: asyncio.Task[EngineEvent | None] | None = None

    async def next(self) -> EngineEvent:
        """Return the next event.

        Raises the engine's refusal, and EngineLostError where the stream ends: its reader should
        have stopped at the last event.
        """
        if self._pending is not None:
            await asyncio.wait((self._pending,))
            return self._take(self._pending)
        return _checked(await anext(self._stream, None))  # for each token: no detour

    async def next_within(self, timeout_s: float | None) -> EngineEvent | None:
        """Return the next event; None if it did not come in time (a limit of None is none)."""
        if timeout_s is None:
            return await self.next()
        if self._pending is None:
            self._pending = asyncio.create_task(self._pull())
        await asyncio.wait((self._pending,), timeout=timeout_s)
        return self._take(self._pending) if self._pending.done() else None

    async def aclose(self) -> None:
        """Close the stream; a second time does nothing."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.cancel()
            await asyncio.wait((pending,))
            if not pending.cancelled():
                pending.exception()  # retrieved: nothing reads any more
        await self._stream.aclose()

    async def _pull(self) -> EngineEvent | None:
        return await anext(self._stream, None)

    def _take(self, pending: "asyncio.Task[EngineEvent | None]") -> EngineEvent:
        self._pending = None
        return _checked(pending.result())


def _checked(event: EngineEvent | None) -> EngineEvent:
    if event is None:
        raise EngineLostError("The engine's answer broke off.", code="engine_died")
    return event
