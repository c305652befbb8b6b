"""Runs something in an event loop until a signal ends it."""

import asyncio
import contextlib
import signal
from typing import Protocol

import uvloop


class LongRun(Protocol):
    """Something that runs for a long time."""

    async def run(self) -> None:
        """Run until `stop`."""

    def stop(self) -> None:
        """Finish what is under way and end; called again, end at once."""


def serve_until_signalled(run: LongRun) -> None:
    """Run in this thread until SIGINT or SIGTERM; a second signal does not wait for answers."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, run.stop)
        with contextlib.suppress(asyncio.CancelledError):  # stopped while it loaded
            await run.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
