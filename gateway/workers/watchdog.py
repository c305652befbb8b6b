"""Watches an event loop from outside: of a worker by its parent, of a lone process by a thread."""

import asyncio
import faulthandler
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

logger = logging.getLogger(__name__)

_ASK_EVERY_S: Final = 5.0
_MOST_SILENT: Final = 2
"""Questions in a row without an answer."""
_FAILED: Final = 1


async def until_silent(ask: Callable[[float], Awaitable[None]], stall_timeout_s: float) -> None:
    """Return once an event loop has answered nothing for so long.

    `ask` gets the seconds that it may wait, and raises TimeoutError. The loop is asked twice: a
    watcher that stood still itself must not take that for the loop's silence.
    """
    num_silent = 0
    while num_silent < _MOST_SILENT:
        try:
            await ask(stall_timeout_s / _MOST_SILENT)
            num_silent = 0
            await asyncio.sleep(min(stall_timeout_s, _ASK_EVERY_S))
        except TimeoutError:
            num_silent += 1


class LoopWatchdog:
    """Ends this process, with all threads' stacks on stderr, once its event loop stands still.

    A context manager; `start` is called in the loop when it serves. A thread does the watching. A
    regular expression, for example, may hold the interpreter so that no thread runs. Then the
    interpreter's own timer ends the process after twice the time.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._own: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "LoopWatchdog":
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more."""
        if self._thread is None:
            return
        assert self._own is not None
        assert self._watching is not None
        self._own.call_soon_threadsafe(self._watching.cancel)
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def start(self) -> None:
        """Watch the running event loop from now on."""
        self._arm()
        self._own = asyncio.new_event_loop()
        self._watching = self._own.create_task(self._watch(asyncio.get_running_loop()))
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def _arm(self) -> None:
        """Have the interpreter's timer end the process, unless this is called again in time."""
        faulthandler.dump_traceback_later(2 * self._stall_timeout_s, exit=True)

    def _run(self) -> None:
        assert self._own is not None
        assert self._watching is not None
        # RuntimeError: the watched loop is closed, so it serves no more.
        with suppress(asyncio.CancelledError, RuntimeError):
            self._own.run_until_complete(self._watching)

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        own = asyncio.get_running_loop()

        async def ask(timeout_s: float) -> None:
            self._arm()
            answered = asyncio.Event()
            loop.call_soon_threadsafe(own.call_soon_threadsafe, answered.set)
            async with asyncio.timeout(timeout_s):
                await answered.wait()

        await until_silent(ask, self._stall_timeout_s)
        logger.critical(
            "event loop stands still and the process ends silent_s=%g", self._stall_timeout_s
        )
        faulthandler.dump_traceback()
        os._exit(_FAILED)
