"""Kept answers that the large model judges as well, behind the client's back and its answer."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from outrider.engine.errors import EngineError
from outrider.gateway.contract.errors.tree import GatewayError

logger = logging.getLogger(__name__)

_MAX_IN_FLIGHT: Final = 2
_TIMEOUT_S: Final = 60.0


class SecondLooks:
    """Runs second looks in the background, a few at a time; further ones are dropped.

    For one event loop. What they cost is the operator's: no tenant asked for them.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin one, if not too many are under way. Its failure is logged, and ends it alone."""
        if len(self._tasks) < _MAX_IN_FLIGHT:
            task = asyncio.create_task(self._run(look), name="second look")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End those that run."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await look()
        except (GatewayError, EngineError, TimeoutError) as error:
            logger.info("no second look error=%s", type(error).__name__)
