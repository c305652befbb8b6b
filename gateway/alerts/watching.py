"""Looks at what is watched, every second, and tells of changes."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from outrider.gateway.alerts.conditions import Alert, Condition, Source
from outrider.gateway.alerts.delivery import Webhook
from outrider.gateway.alerts.states import AlertStates
from outrider.gateway.contract.errors.tree import StorageError

logger = logging.getLogger(__name__)

_EVERY_S: Final = 1.0


class AlertWatch:
    """Compares conditions with what was told of them. No request ever waits for it."""

    def __init__(
        self,
        sources: Sequence[Source],
        states: AlertStates,
        webhook: Webhook,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._states = states
        self._webhook = webhook
        self._wall_clock = wall_clock
        self._told: dict[str, str] = {}
        self._is_failing = False

    async def run(self) -> None:
        """Look until cancelled; what waits then is delivered, for a moment."""
        delivering = asyncio.create_task(self._webhook.run())
        try:
            while True:
                await self._attempt()
                await asyncio.sleep(_EVERY_S)
        finally:
            await self._webhook.close()
            delivering.cancel()

    async def _attempt(self) -> None:
        try:
            await self.look()
        except StorageError as error:
            self._note_failure(getattr(error, "detail", error))
        except Exception as error:  # noqa: BLE001 - the next look may succeed
            self._note_failure(type(error).__name__)
        else:
            self._is_failing = False

    def _note_failure(self, reason: object) -> None:
        if not self._is_failing:
            logger.error("alerts cannot be looked for reason=%s", reason)
        self._is_failing = True

    async def look(self) -> None:
        """Look once. Raises DatabaseError."""
        found = [condition for source in self._sources for condition in await source()]
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
            claim = await asyncio.to_thread(self._states.claim, condition, now_s)
            if claim == "later":
                return
            if claim == "ours":
                data = {"subject": condition.subject, **condition.data}
                self._webhook.offer(Alert(event=condition.event, at_s=now_s, data=data))
        self._told[condition.subject] = condition.event
