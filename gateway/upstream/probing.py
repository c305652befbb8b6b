"""Watches servers whose breaker is open, so that they are used again as soon as they are up."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from outrider.gateway.contract.errors.tree import UpstreamError
from outrider.gateway.upstream.replicas import Replica, ReplicaSet

if TYPE_CHECKING:  # at run time it would import aiohttp, also where there are no upstream tiers
    from outrider.gateway.upstream.transport import Transport

logger = logging.getLogger(__name__)

_MAX_PROBE_S: Final = 5.0
_MIN_WAIT_S: Final = 0.005
_DOWN: Final = frozenset({502, 503, 504})
"""A proxy's statuses for a dead server, or for one that is still loading. Any other status, also
for an invalid key or a broken model list, comes from a server that is up."""


class Prober:
    """Requests `path` at the URL of every replica that wants a probe; sleeps otherwise."""

    def __init__(
        self,
        *,
        transport: "Transport",
        replicas: ReplicaSet,
        headers: Mapping[str, str],
        path: str,
    ) -> None:
        self._transport = transport
        self._replicas = replicas
        self._headers = headers
        self._path = path
        self._has_news = asyncio.Event()

    def wake(self) -> None:
        """Wake the prober: a breaker may have opened."""
        self._has_news.set()

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            self._has_news.clear()
            wait_s = self._replicas.probe_wait_s
            if wait_s is None or wait_s > 0:
                timeout_s = None if wait_s is None else max(wait_s, _MIN_WAIT_S)
                # Not wait_for: until Python 3.12 it loses a cancellation that comes with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._has_news.wait()
            else:
                await asyncio.gather(*map(self._probe, self._replicas.to_probe()))

    async def _probe(self, replica: Replica) -> None:
        """Probe one server, and tell its breaker the result."""
        try:
            status, _ = await self._transport.get(
                replica.url + self._path, self._headers, timeout_s=_MAX_PROBE_S
            )
        except UpstreamError as error:
            logger.debug("probe failed replica=%s failure=%s", replica.name, error.failure)
            replica.breaker.probe_failed()
            return
        if status in _DOWN:
            logger.debug("probe failed replica=%s status=%d", replica.name, status)
            replica.breaker.probe_failed()
        else:
            replica.breaker.probe_succeeded()
