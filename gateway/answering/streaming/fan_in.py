"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

Item = TypeVar("Item")


async def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """Yield items as they come, in order of arrival.

    Each stream has at most one item waiting here: none starves another, and a slow reader slows the
    streams instead of filling memory. The first stream that raises ends all. Every stream is closed
    before this one ends, however it ends.
    """
    queue: asyncio.Queue[_Pump[Item]] = asyncio.Queue()
    pumps = [_Pump(stream, queue) for stream in streams]
    tasks = [asyncio.create_task(pump.run()) for pump in pumps]
    try:
        num_open = len(pumps)
        while num_open:
            pump = await queue.get()
            if pump.error is not None:
                raise pump.error
            if pump.is_over:
                num_open -= 1
            else:
                yield pump.take()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Pump(Generic[Item]):
    """Moves items of one stream into its slot and announces each in the queue."""

    def __init__(self, stream: AsyncGenerator[Item], queue: "asyncio.Queue[_Pump[Item]]") -> None:
        self.is_over = False
        self.error: Exception | None = None
        self._stream = stream
        self._queue = queue
        self._slot: list[Item] = []
        self._is_free = asyncio.Event()

    async def run(self) -> None:
        """Pump until the stream ends or raises, which is announced too."""
        try:
            async with aclosing(self._stream) as items:
                async for item in items:
                    self._slot.append(item)
                    self._is_free.clear()
                    self._queue.put_nowait(self)
                    await self._is_free.wait()
        except Exception as error:  # noqa: BLE001 - handed over: the reader raises it
            self.error = error
        self.is_over = True
        self._queue.put_nowait(self)

    def take(self) -> Item:
        """Return the announced item; the stream may go on."""
        self._is_free.set()
        return self._slot.pop()
