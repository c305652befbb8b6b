"""Looks at what is watched, every second, and tells of changes."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from outrider.gateway.alerts.conditions import Alert, Condition, Source
from outrider.gateway.alerts.delivery import Webhook
from outrider.gateway.alerts.states import AlertStates, Claim
from outrider.gateway.contract.errors.tree import StorageError

logger = logging.getLogger(__name__)

_EVERY_S: Final = 1.0


class SourceWatch:
    """Compares one source's conditions with what was told of them."""

    def __init__(
        self,
        source: Source,
        states: AlertStates,
        webhook: Webhook,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._source = source
        self._states = states
        self._webhook = webhook
        self._wall_clock = wall_clock
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        is_failing = False
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                if not is_failing:
                    reason = getattr(error, "detail", type(error).__name__)
                    logger.error("alerts cannot be looked for reason=%s", reason)
                is_failing = True
            else:
                is_failing = False
            await asyncio.sleep(_EVERY_S)

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
            return await asyncio.to_thread(self._states.claim, condition, now_s)
        except StorageError:
            return "ours"


class AlertWatch:
    """Watches all sources, each by itself: no request, and no other source, waits for one."""

    def __init__(self, sources: Sequence[Source], states: AlertStates, webhook: Webhook) -> None:
        self._watches = [SourceWatch(source, states, webhook) for source in sources]
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
