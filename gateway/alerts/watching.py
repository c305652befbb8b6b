"""Looks at what is watched, every second, and tells of changes."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from outrider.gateway.alerts.conditions import Alert, Condition, Source
from outrider.gateway.alerts.delivery import Webhook
from outrider.gateway.alerts.states import Claim, claim
from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.storage.database import Database

logger = logging.getLogger(__name__)

_EVERY_S: Final = 1.0
_IDLE_TIMES: Final = 50.0
"""So many times as long as a look took, nobody looks: it takes 2 % of the time."""


class SourceWatch:
    """Compares one source's conditions with what was told of them."""

    def __init__(
        self,
        source: Source,
        database: Database,
        webhook: Webhook,
        *,
        window_s: float,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`window_s` is between two alerts about one subject."""
        self._source = source
        self._database = database
        self._webhook = webhook
        self._window_s = window_s
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        is_failing = False
        while True:
            begun_s = time.monotonic()
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                if not is_failing:
                    reason = getattr(error, "detail", type(error).__name__)
                    logger.error("alerts cannot be looked for reason=%s", reason)
                is_failing = True
            else:
                is_failing = False
            await self._sleep(max(_EVERY_S, _IDLE_TIMES * (time.monotonic() - begun_s)))

    async def look(self) -> None:
        """Look once. Raises the errors of the source."""
        found = await self._source()
        seen = {condition.subject for condition in found}
        self._told = {name: event for name, event in self._told.items() if name in seen}
        for condition in found:
            await self._consider(condition)

    async def _consider(self, condition: Condition) -> None:
        told = self._told.get(condition.subject)
        if told == condition.event:
            return
        if told is not None or condition.is_trouble:
            now_s = self._wall_clock()
            claim = await self._claim(condition, now_s)
            if claim == "later":
                return
            if claim == "ours":
                data = {"subject": condition.subject, **condition.data}
                self._webhook.offer(Alert(event=condition.event, at_s=now_s, data=data))
        self._told[condition.subject] = condition.event

    async def _claim(self, condition: Condition, now_s: float) -> Claim:
        """While the database is away, each gateway tells by itself: twice is better than never."""
        try:
            arguments = self._database, condition, now_s, self._window_s
            return await asyncio.to_thread(claim, *arguments)
        except StorageError:
            return "ours"


class AlertWatch:
    """Watches all sources, each by itself: no request, and no other source, waits for one."""

    def __init__(self, watches: Sequence[SourceWatch], webhook: Webhook) -> None:
        self._watches = watches
        self._webhook = webhook

    async def run(self) -> None:
        """Look until cancelled; what waits then is delivered, for a moment."""
        delivering = asyncio.create_task(self._webhook.run())
        watching = [asyncio.create_task(watch.run()) for watch in self._watches]
        try:
            await asyncio.gather(*watching)
        finally:
            for task in watching:
                task.cancel()
            await self._webhook.close()
            delivering.cancel()
