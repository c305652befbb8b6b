"""Time in tests: a clock that goes on when it is told to, and waiting for what others do."""

import asyncio
import time
from collections.abc import Callable


class HandClock:
    """Seconds; call it to read it, add to `now_s` to move it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def wait_for(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    """Wait for what happens in another thread or process."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.005)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens in another task, or comes from the kernel at its own time."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing sets an event
            await asyncio.sleep(0.002)
