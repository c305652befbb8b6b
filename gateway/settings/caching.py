"""Settings of the response cache."""

from collections.abc import Collection, Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from outrider.gateway.settings.sections import Count, Seconds, Section, split_list
from outrider.gateway.settings.tiers import Complaint

_Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]
_LOCAL = ("small", "large")


class CacheSettings(Section):
    """Exact response cache: an equal request gets the first one's answer again."""

    store: Literal["off", "memory", "redis"] = "off"
    """Place of the answers: this process's memory, or the Redis at redis_url, which several
    gateways share."""
    default: Literal["on", "off"] = "off"
    """Whether requests that do not set outrider.cache use it."""
    ttl_s: Seconds = 3600.0
    """Time that an answer is kept."""
    max_bytes: Count = 256 * 2**20
    """Memory for answers; the least recently used ones go first. Redis has its own limit."""
    max_entry_bytes: Count = 2**20
    """Largest answer that is kept."""
    keys: _Names = ()
    """Names or ids of keys and teams whose requests may use it; empty: all."""
    tiers: _Names = ()
    """Tiers whose answers are kept; empty: all."""
    charge: Literal["nothing", "full"] = "nothing"
    """Charge for an answer from the cache: nothing, or what its tokens cost otherwise."""


def cache_complaints(
    cache: CacheSettings, tiers: Collection[str], *, has_redis: bool
) -> Iterator[Complaint]:
    """Yield settings of the cache that contradict others."""
    if cache.store == "redis" and not has_redis:
        yield Complaint(("cache", "store"), cache.store, "set redis_url to the server's address")
    for name in cache.tiers:
        if name not in (*_LOCAL, *tiers):
            known = ", ".join((*_LOCAL, *tiers))
            yield Complaint(("cache", "tiers"), name, f"unknown tier; available: {known}")
