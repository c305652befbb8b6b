"""The response cache as the settings want it."""

import hashlib
import time

from outrider.gateway.answering.caching.answers import AnswerCache, CacheRules
from outrider.gateway.answering.caching.cache_metrics import CacheMetrics
from outrider.gateway.answering.caching.entry import CacheStore
from outrider.gateway.answering.caching.memory_store import MemoryStore
from outrider.gateway.answering.jobs.jobs import JobBuilder
from outrider.gateway.settings.extras import own_version
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.gateway_parts import CacheParts, GatewayParts

_TIMEOUT_S = 0.25
_SHAPING = (
    "models",
    "engine",
    "speculation",
    "routing",
    "handoff",
    "tiers",
    "aliases",
    "limits",
    "checks",
)
"""Sections of the settings that may shape an answer."""


def build_cache(settings: Settings) -> CacheParts:
    """Build the cache's store and rules, without connecting. Raises SettingsError."""
    options = settings.cache
    return CacheParts(
        store=_store(settings),
        rules=CacheRules(
            is_default=options.default == "on",
            keys=frozenset(options.keys) or None,
            tiers=frozenset(options.tiers) or None,
            max_entry_bytes=options.max_entry_bytes,
            is_charged=options.charge == "full",
        ),
        settings_digest=_digest(settings),
    )


def _store(settings: Settings) -> CacheStore | None:
    options = settings.cache
    if options.store == "off":
        return None
    if options.store == "memory":
        return MemoryStore(ttl_s=options.ttl_s, max_bytes=options.max_bytes, clock=time.monotonic)
    from outrider.gateway.answering.caching.redis_store import RedisEntries
    from outrider.gateway.tenancy.limits.redis_store import redis_client

    assert settings.redis_url is not None, "checked with the settings"
    return RedisEntries(
        redis_client(settings.redis_url, _TIMEOUT_S),
        ttl_s=options.ttl_s,
        clock=time.monotonic,
        timeout_s=_TIMEOUT_S,
    )


def _digest(settings: Settings) -> bytes:
    """Return bytes that change with the settings that may shape an answer, and our version."""
    shaping = settings.model_dump_json(include=set(_SHAPING))
    return hashlib.blake2b(f"{own_version()}{shaping}".encode(), digest_size=32).digest()


def answer_cache(parts: GatewayParts, jobs: JobBuilder) -> AnswerCache:
    """Build the cache of an application's answers."""
    cache = parts.cache

    def version() -> bytes | None:
        fingerprints = jobs.models.fingerprints if parts.tokenizers else ""
        if fingerprints is None:
            return None
        shaping = f"{fingerprints}{jobs.models.adapters.stamp}".encode()
        return hashlib.blake2b(shaping, key=cache.settings_digest, digest_size=32).digest()

    return AnswerCache(
        store=cache.store,
        rules=cache.rules,
        version=version,
        wall_clock=parts.wall_clock,
        metrics=CacheMetrics(parts.metrics.registry),
    )
