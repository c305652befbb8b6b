"""Leases of reservations in Redis, and settlements that Redis could not be told of yet."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.tenancy.limits.redis_scripts import Scripts

logger = logging.getLogger(__name__)

_MAX_UNSETTLED: Final = 100_000
_RENEW_AT_ONCE: Final = 500
_KEYS_AT_ONCE: Final = 16
_CLOSE_TIMEOUT_S: Final = 5.0

ScriptArgs = list[str | float]


class Store(Protocol):
    """Runs scripts."""

    async def run(self, script: str, key: str, args: Sequence[str | float]) -> list[int]:
        """Return the script's reply. Raises StorageError, in bounded time."""

    async def close(self) -> None:
        """Disconnect."""


class RedisLeases:
    """Keeps the leases of open reservations, and settles each one as soon as Redis answers.

    `key`: the prefix of a tenant's counters.
    """

    def __init__(self, store: Store, scripts: Scripts, *, lease_s: float) -> None:
        self._store = store
        self._scripts = scripts
        self._lease_s = lease_s
        self._open: dict[str, str] = {}  # reservation → key
        self._unsettled: dict[str, tuple[str, ScriptArgs]] = {}  # reservation → key, arguments
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of open reservations."""
        return len(self._open)

    def start(self) -> None:
        """Begin to renew leases."""
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Give back all open reservations, as far as Redis is available."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self._is_closed = True
        for reservation_id, key in self._open.items():
            self._unsettled[reservation_id] = (key, [reservation_id])
        self._open.clear()
        with suppress(StorageError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self.catch_up()
        if self._unsettled:
            logger.warning("limits left unsettled reservations=%d", len(self._unsettled))

    def add(self, reservation_id: str, key: str) -> None:
        """Keep the lease of a reservation until it is settled."""
        self._open[reservation_id] = key

    async def settle(self, reservation_id: str, key: str, args: ScriptArgs) -> None:
        """Settle now, or later where Redis is away or the caller is cancelled."""
        if self._is_closed:  # it has been given back
            return
        self._unsettled[reservation_id] = (key, args)
        self._open.pop(reservation_id, None)
        try:
            await self._settle_one(reservation_id)
        except BaseException as error:
            self.settle_later(reservation_id, key, args)
            if not isinstance(error, StorageError):
                raise

    def settle_later(self, reservation_id: str, key: str, args: ScriptArgs) -> None:
        """Leave the settlement to the background task."""
        if len(self._unsettled) >= _MAX_UNSETTLED:
            oldest = next(iter(self._unsettled))
            del self._unsettled[oldest]
            logger.error("limits too many unsettled; one is forgotten reservation=%s", oldest)
        self._unsettled[reservation_id] = (key, args)
        self._wake.set()

    async def renew(self) -> None:
        """Renew the leases of each tenant separately.

        A tenant whose counters fail (an unavailable node of a cluster, a key of another type) must
        not cost the others their leases. Raises StorageError where any failed.
        """
        by_key: dict[str, list[str]] = {}
        for reservation_id, key in self._open.items():
            by_key.setdefault(key, []).append(reservation_id)
        for reservation_id, (key, _) in self._unsettled.items():
            by_key.setdefault(key, []).append(reservation_id)
        await _for_each_key(self._renew_key, by_key)

    async def _renew_key(self, key: str, ids: list[str]) -> None:
        for start in range(0, len(ids), _RENEW_AT_ONCE):
            args: ScriptArgs = [self._lease_s, *ids[start : start + _RENEW_AT_ONCE]]
            num_lost = (await self._store.run(self._scripts.renew, key, args))[0]
            if num_lost:
                logger.debug("limits leases gone reservations=%d", num_lost)

    async def catch_up(self) -> None:
        """Settle the reservations that could not be settled, each tenant while its counters answer.

        Raises StorageError where any failed.
        """
        by_key: dict[str, list[str]] = {}
        for reservation_id, (key, _) in self._unsettled.items():
            by_key.setdefault(key, []).append(reservation_id)
        await _for_each_key(self._settle_key, by_key)

    async def _settle_key(self, _: str, ids: list[str]) -> None:
        for reservation_id in ids:
            await self._settle_one(reservation_id)

    async def _keep(self) -> None:
        """Renew and catch up until cancelled."""
        interval_s = self._lease_s / 3
        while True:
            # Not wait_for: until Python 3.12 it loses a cancellation that comes with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
                await asyncio.sleep(interval_s / 10)  # an unavailable server is not back at once
            self._wake.clear()
            for work in (self.renew, self.catch_up):
                try:
                    await work()
                except StorageError:
                    if self._unsettled:
                        self._wake.set()

    async def _settle_one(self, reservation_id: str) -> None:
        entry = self._unsettled.get(reservation_id)
        if entry is None:
            return
        key, args = entry
        reply = await self._store.run(self._scripts.settle, key, args)
        self._unsettled.pop(reservation_id, None)
        if reply[0] == -1:
            logger.warning("limits lease was lost; use entered late reservation=%s", reservation_id)


async def _for_each_key(
    work: Callable[[str, list[str]], Awaitable[None]], by_key: Mapping[str, list[str]]
) -> None:
    """Do this for every key, a few at a time; raise the first failure when all were tried."""
    turns = asyncio.Semaphore(_KEYS_AT_ONCE)

    async def one(key: str, ids: list[str]) -> None:
        async with turns:
            await work(key, ids)

    results = await asyncio.gather(
        *(one(key, ids) for key, ids in by_key.items()), return_exceptions=True
    )
    for failure in results:
        if failure is not None:
            raise failure
