"""Keeps stored responses in a Redis that several gateways and workers share."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from outrider.gateway.http.apis.responses.store import StoredResponse, owner_of
from outrider.gateway.tenancy.limits.redis_store import RedisStore

logger = logging.getLogger(__name__)

_PREFIX: Final = "outrider:response:"
_ENTRY_BYTES: Final = 1024
"""The approximate memory of an entry beside its texts."""
_NUM_READ_AT_ONCE: Final = 4
"""What is read is not yet counted in the budget of bodies."""

_SHARED: Final = """
local base = string.sub(KEYS[1], 1, string.find(KEYS[1], '}', 1, true))
local USED, SIZES = base .. ':used', base .. ':sizes'
local function drop(key)
  local size = redis.call('HGET', SIZES, key)
  if size then
    redis.call('HDEL', SIZES, key)
    redis.call('HINCRBY', SIZES, 'total', -tonumber(size))
  end
  redis.call('ZREM', USED, key)
  return redis.call('DEL', key)
end
"""
"""A tenant's keys begin alike and live on one node of a cluster: `used` is a sorted set of its
responses by their last use, `sizes` a hash of their bytes and of all bytes together."""
_GET: Final = (
    _SHARED
    + """
local found = redis.call('GET', KEYS[1])
if found then redis.call('ZADD', USED, 'XX', ARGV[1], KEYS[1]) end
return found
"""
)
_PUT: Final = (
    _SHARED
    + """
local now, ttl_ms, size, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
drop(KEYS[1])
if size > most then return 0 end
while tonumber(redis.call('HGET', SIZES, 'total') or 0) + size > most do
  local oldest = redis.call('ZRANGE', USED, 0, 0)[1]
  if oldest then drop(oldest) else redis.call('DEL', SIZES) end
end
redis.call('SET', KEYS[1], ARGV[5], 'PX', ttl_ms)
redis.call('ZADD', USED, now, KEYS[1])
redis.call('HSET', SIZES, KEYS[1], size)
redis.call('HINCRBY', SIZES, 'total', size)
redis.call('PEXPIRE', USED, ttl_ms)
redis.call('PEXPIRE', SIZES, ttl_ms)
return 1
"""
)
_DELETE: Final = f"{_SHARED}return drop(KEYS[1])"


class RedisResponses:
    """Each response has an expiry. A tenant's bound drops those that it used least recently."""

    def __init__(
        self,
        store: RedisStore,
        *,
        ttl_s: float,
        max_bytes_per_tenant: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock`: seconds since 1970."""
        self._store = store
        self._ttl_ms = max(int(ttl_s * 1000), 1)
        self._max_bytes = max_bytes_per_tenant
        self._wall_clock = wall_clock
        self._reading = asyncio.Semaphore(_NUM_READ_AT_ONCE)
        self._decode = msgspec.msgpack.Decoder(StoredResponse).decode
        self._encode = msgspec.msgpack.Encoder().encode

    async def get(self, key: bytes) -> StoredResponse | None:
        """Return the response; what cannot be read counts as missing. Raises StorageError."""
        async with self._reading:
            found = await self._store.reply(_GET, _name(key), [self._now_ms()])
        try:
            return self._decode(found) if isinstance(found, bytes) else None
        except msgspec.MsgspecError:
            logger.warning("stored response cannot be read key=%s", _name(key)[-16:])
        return None

    async def put(self, key: bytes, entry: StoredResponse) -> bool:
        """Keep a response in place of older ones. Raises StorageError."""
        size = entry.num_bytes + _ENTRY_BYTES
        bounds = [self._now_ms(), self._ttl_ms, size, self._max_bytes]
        return bool(await self._store.reply(_PUT, _name(key), [*bounds, self._encode(entry)]))

    async def delete(self, key: bytes) -> bool:
        """Forget a response. Return whether it was there. Raises StorageError."""
        return bool(await self._store.reply(_DELETE, _name(key), []))

    async def close(self) -> None:
        """Disconnect."""
        await self._store.close()

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1000)


async def erase_responses(
    client: Any, store: RedisStore, tenant: str | None, end_user: str | None
) -> int:
    """Remove the responses of a tenant, and of its end user only; None: of all tenants.

    Returns their number. Raises StorageError, and the client's errors.
    """
    owner = "*" if tenant is None else owner_of(tenant)
    decode = msgspec.msgpack.Decoder(StoredResponse).decode
    num_removed = 0
    async for name in client.scan_iter(match=f"{_PREFIX}{{{owner}}}:*", count=1000):
        text = name.decode()
        if text.endswith((":used", ":sizes")):
            continue
        found = None if end_user is None else await client.get(name)
        if end_user is not None and (found is None or decode(found).end_user != end_user):
            continue
        num_removed += bool(await store.reply(_DELETE, text, []))
    return num_removed


def _name(key: bytes) -> str:
    return _PREFIX + key.decode()
