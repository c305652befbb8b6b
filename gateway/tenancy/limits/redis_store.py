"""Runs scripts on Redis, in bounded time; its failures become StorageError."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Final, cast
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from outrider.gateway.contract.errors.tree import StorageError
from outrider.gateway.settings.tree import SettingsError
from outrider.gateway.tenancy.limits.limit_metrics import LimitMetrics

logger = logging.getLogger(__name__)

_SCHEMES: Final = ("redis", "rediss", "unix")
_CLUSTER: Final = "+cluster"
_MAX_CONNECTIONS: Final = 64
_LOG_EVERY_S: Final = 10.0


def redis_client(url: str, timeout_s: float) -> "Redis | RedisCluster":
    """Make a client that connects at the first call. Raises SettingsError for a bad URL."""
    scheme = urlsplit(url).scheme
    if scheme.removesuffix(_CLUSTER) not in _SCHEMES:
        raise SettingsError(
            "redis_url: write redis://HOST:PORT/NUMBER, rediss:// for TLS, unix:///SOCKET, or "
            "redis+cluster://HOST:PORT for a cluster"
        )
    # A connection that broke while idle costs one try, not a request.
    retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
    try:
        if scheme.endswith(_CLUSTER):
            client = RedisCluster.from_url(
                url.replace(_CLUSTER, "", 1),
                retry=retry,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
            )
            return client
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            retry=retry,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )
    except ValueError as error:
        raise SettingsError(f"redis_url cannot be used: {error}") from None
    return Redis.from_pool(pool)


class RedisStore:
    """A Redis server or cluster. Every call ends within `timeout_s`, one way or the other."""

    def __init__(
        self,
        client: "Redis | RedisCluster",
        *,
        timeout_s: float = 1.0,
        metrics: LimitMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "limits",
        refusal: str = "Limits cannot be checked now. Try again in a moment.",
    ) -> None:
        """`name`: what it holds, for the log. `refusal`: what clients are told of a failure."""
        self._client = client
        self._name = name
        self._refusal = refusal
        self._timeout_s = timeout_s
        self._metrics = metrics or LimitMetrics()
        self._clock = clock
        self._logged_s: float | None = None

    @classmethod
    def from_url(
        cls, url: str, *, timeout_s: float = 1.0, metrics: LimitMetrics | None = None
    ) -> "RedisStore":
        """Make a store that connects at the first call. Raises SettingsError for a bad URL."""
        return cls(redis_client(url, timeout_s), timeout_s=timeout_s, metrics=metrics)

    async def run(self, script: str, key: str, args: Sequence[str | float]) -> list[int]:
        """Return the reply of a script. `key` is its KEYS[1]. Raises StorageError."""
        return cast(list[int], await self.reply(script, key, args))

    async def reply(self, script: str, key: str, args: Sequence[str | float | bytes]) -> object:
        """Return whatever a script replies. Raises StorageError, as `run`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    reply = self._client.evalsha(_sha(script), 1, key, *args)
                    return await cast(Awaitable[object], reply)
                except NoScriptError:  # Redis was started again, or forgot its scripts
                    reply = self._client.eval(script, 1, key, *args)
                    return await cast(Awaitable[object], reply)
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            self._report(error)
            if isinstance(error, ReadOnlyError):
                await self._leave_replica()
            raise StorageError(self._refusal) from error

    async def close(self) -> None:
        """Disconnect."""
        await self._client.aclose()

    async def _leave_replica(self) -> None:
        """Connect anew: the primary became a replica, and its name may lead to the new one."""
        if isinstance(self._client, Redis):  # a cluster's client finds the new primary itself
            await self._client.connection_pool.disconnect(inuse_connections=False)

    def _report(self, error: Exception) -> None:
        """Log a failure, once in a while: every request of a busy minute fails alike."""
        self._metrics.store_failed()
        now = self._clock()
        if self._logged_s is None or now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            kind = type(error).__name__
            logger.warning("%s store failed error=%s reason=%s", self._name, kind, error)


@lru_cache(maxsize=16)
def _sha(script: str) -> str:
    """Return Redis' name of a script."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
