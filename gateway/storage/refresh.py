"""A background job that is repeated: reading a table again, or storing counts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from outrider.gateway.contract.errors.tree import StorageError

logger = logging.getLogger(__name__)


class PeriodicRefresh:
    """Repeats a job every `every_s`, one run at a time. For one event loop.

    A job that fails is tried again after the same pause. The first of several failures in a row is
    logged, and the next success.
    """

    def __init__(
        self,
        job: Callable[[], Awaitable[None]],
        *,
        name: str,
        meanwhile: str,
        every_s: float,
        slow_s: float | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the job; it may raise StorageError while the database is unavailable.

        `name` and `meanwhile` are for logs: the data, and what the gateway does until the job
        succeeds again. `on_failure` is called after each failed run, and every `slow_s` that a run
        takes.
        """
        self._job = job
        self._name = name
        self._meanwhile = meanwhile
        self._every_s = every_s
        self._slow_s = slow_s
        self._on_failure = on_failure
        self._is_failing = False
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to repeat the job; the first run is `every_s` from now."""
        self._task = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """Stop after the run that is under way."""
        if self._task is not None:
            async with self._one_at_a_time:  # a thread of the job would outlive the task
                self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def run(self) -> None:
        """Run the job now. Raises the errors of the job."""
        async with self._one_at_a_time:
            await self._job()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.attempt()

    async def attempt(self) -> None:
        """Run the job now, and log a failure instead of raising it."""
        try:
            await self._watched()
        except StorageError as error:
            self._failed("error=%s", getattr(error, "detail", error))
        except Exception as error:  # noqa: BLE001 - the next run may succeed
            logger.error(
                "%s could not be refreshed error=%s message=%s",
                self._name,
                type(error).__name__,
                error,
            )
            self._on_failure()
        else:
            if self._is_failing:
                logger.info("refreshing works again source=%s", self._name)
            self._is_failing = False

    async def _watched(self) -> None:
        """Run the job, and report a failure every `slow_s` for as long as it has not ended."""
        run = asyncio.create_task(self.run())
        try:
            while not (await asyncio.wait({run}, timeout=self._slow_s))[0]:
                self._failed("the database does not answer waited_s=%g", self._slow_s)
        finally:
            run.cancel()
        await run

    def _failed(self, reason: str, detail: object) -> None:
        if not self._is_failing:
            message = f"%s cannot be refreshed, meanwhile %s {reason}"
            logger.warning(message, self._name, self._meanwhile, detail)
        self._is_failing = True
        self._on_failure()
