"""Gateways on one database that count limits each in its own memory: they find each other."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import delete, insert, select, update

from outrider.gateway.storage.database import Database, DatabaseError
from outrider.gateway.storage.tables import gateways
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics

logger = logging.getLogger(__name__)

BEAT_S: Final = 5.0
_SILENT_BEATS: Final = 3
"""A gateway without a beat for this many looks is dead or unreachable."""
_FORGOTTEN_BEATS: Final = 720
"""The row of a gateway without a beat for this many looks, an hour, is removed."""


class GatewayPresence:
    """Raises a number in the database every few seconds, and reads those of other gateways.

    A killed gateway stops beating, so it no longer counts after three looks; one that is replaced
    counts until it has ended. Clocks of different machines are never compared. `look` blocks; the
    rest is for one event loop.
    """

    def __init__(
        self,
        database: Database,
        metrics: LimitMetrics,
        *,
        wall_clock: Callable[[], float] = time.time,
        interval_s: float = BEAT_S,
    ) -> None:
        self.num_others = 0
        """Other gateways that count limits by themselves."""
        self._id = secrets.token_hex(8)
        self._database = database
        self._wall_clock = wall_clock
        self._interval_s = interval_s
        self._beat = 0
        self._seen: dict[str, tuple[int, int]] = {}  # id → last beat, looks since it rose
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        metrics.report_gateways(lambda: self.num_others)

    async def start(self) -> None:
        """Begin to beat."""
        self._task = asyncio.create_task(self._keep_beating())

    async def close(self) -> None:
        """Stop beating, and delete the gateway's row."""
        if self._task is None:
            return
        async with self._one_at_a_time:  # a thread that looks would outlive its task
            self._task.cancel()
        await asyncio.wait({self._task})
        try:
            await asyncio.to_thread(self._leave)
        except DatabaseError as error:
            logger.warning("presence was not removed error=%s", error.detail)

    def look(self) -> int:
        """Beat, and return how many other gateways beat. Raises DatabaseError."""
        self._beat += 1
        row = {"beat": self._beat, "seen_at": self._wall_clock()}
        with self._database.write() as connection:
            own = gateways.c.id == self._id
            if not connection.execute(update(gateways).where(own).values(row)).rowcount:
                place = {"id": self._id, "host": socket.gethostname(), "pid": os.getpid()}
                connection.execute(insert(gateways).values(place | row))
            query = select(gateways.c.id, gateways.c.beat).where(gateways.c.id != self._id)
            found = connection.execute(query).all()
            self._seen = {one: self._looked(one, beat) for one, beat in found}
            dead = [one for one, (_, silent) in self._seen.items() if silent >= _FORGOTTEN_BEATS]
            if dead:
                connection.execute(delete(gateways).where(gateways.c.id.in_(dead)))
        return sum(silent < _SILENT_BEATS for _, silent in self._seen.values())

    def _looked(self, gateway_id: str, beat: int) -> tuple[int, int]:
        """Return a gateway's beat, and for how many looks it has not risen.

        Rows found by the first look may be of dead gateways; later ones are new gateways.
        """
        unknown = (beat, _SILENT_BEATS) if self._beat == 1 else (None, 0)
        before, silent = self._seen.get(gateway_id, unknown)
        return beat, (0 if beat != before else silent + 1)

    async def _keep_beating(self) -> None:
        while True:
            try:
                async with self._one_at_a_time:
                    self._report(await asyncio.to_thread(self.look))
            except DatabaseError as error:  # the key registry warns of it
                logger.debug("presence was not told error=%s", error.detail)
            await asyncio.sleep(self._interval_s)

    def _report(self, num_others: int) -> None:
        if num_others > self.num_others:
            logger.warning(
                "other gateways on this database count limits by themselves, so every limit holds "
                "once per gateway; set redis_url for all of them others=%d",
                num_others,
            )
        elif self.num_others and not num_others:
            logger.info("no other gateway on this database counts limits any more")
        self.num_others = num_others

    def _leave(self) -> None:
        with self._database.write() as connection:
            connection.execute(delete(gateways).where(gateways.c.id == self._id))
