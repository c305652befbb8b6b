"""Keeps answers in a Redis that several gateways share."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
from redis.exceptions import RedisClusterException, RedisError

from outrider.gateway.answering.caching.entry import CachedEntry

logger = logging.getLogger(__name__)

_PREFIX: Final = b"outrider:answer:"
_PAUSE_S: Final = 5.0
"""Seconds without a look-up after Redis has failed: a request must not wait for it each time."""


class RedisEntries:
    """Entries under a prefix of their own, each with an expiry. Redis bounds the memory.

    What fails is a miss, and is logged once a pause.
    """

    def __init__(
        self, client: Any, *, ttl_s: float, clock: Callable[[], float], timeout_s: float = 0.25
    ) -> None:
        """`client`: of redis.asyncio, one server or a cluster. `clock`: monotonic seconds."""
        self._client = client
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._clock = clock
        self._timeout_s = timeout_s
        self._paused_until_s: float | None = None
        self._decode = msgspec.msgpack.Decoder(CachedEntry).decode
        self._encode = msgspec.msgpack.Encoder().encode

    async def get(self, key: bytes) -> CachedEntry | None:
        """Return the entry; what Redis holds under the key and is none counts as missing."""
        if self._is_paused:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._client.get(_PREFIX + key)
            return None if found is None else self._decode(found)
        except msgspec.MsgspecError:
            logger.warning("cache entry cannot be read key=%s", key.hex()[:16])
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            self._pause(error)
        return None

    async def put(self, key: bytes, entry: CachedEntry) -> None:
        """Keep an entry until it expires."""
        if self._is_paused:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.set(_PREFIX + key, self._encode(entry), px=self._ttl_ms)
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            self._pause(error)

    async def close(self) -> None:
        """Disconnect."""
        await self._client.aclose()

    @property
    def _is_paused(self) -> bool:
        return self._paused_until_s is not None and self._clock() < self._paused_until_s

    def _pause(self, error: Exception) -> None:
        self._paused_until_s = self._clock() + _PAUSE_S
        logger.warning("cache store failed error=%s reason=%s", type(error).__name__, error)


async def erase_answers(client: Any) -> int:
    """Remove all entries; return their number. Raises the client's errors."""
    num_removed = 0
    async for name in client.scan_iter(match=_PREFIX + b"*", count=1000):
        num_removed += await client.delete(name)
    return num_removed
