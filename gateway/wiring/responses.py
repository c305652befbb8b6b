"""The store of responses as the settings want it."""

import time

from outrider.gateway.answering.caching.memory_store import MemoryStore
from outrider.gateway.http.apis.responses.conversation import Conversations
from outrider.gateway.http.apis.responses.store import ResponseStore
from outrider.gateway.settings.tree import Settings
from outrider.gateway.wiring.gateway_parts import GatewayParts

_TIMEOUT_S = 2.0


def build_response_store(settings: Settings) -> ResponseStore | None:
    """Build the store, without connecting; None where nothing is stored. Raises SettingsError."""
    options = settings.responses
    if not options.store:
        return None
    if settings.redis_url is None:
        return MemoryStore(
            ttl_s=options.ttl_s,
            max_bytes=options.max_bytes,
            max_bytes_per_owner=options.max_bytes_per_tenant,
            clock=time.monotonic,
        )
    from outrider.gateway.http.apis.responses.redis_responses import RedisResponses
    from outrider.gateway.tenancy.limits.redis_store import RedisStore, redis_client

    store = RedisStore(
        redis_client(settings.redis_url, _TIMEOUT_S),
        timeout_s=_TIMEOUT_S,
        name="responses",
        refusal="Stored responses cannot be reached now. Try again in a moment.",
    )
    return RedisResponses(
        store, ttl_s=options.ttl_s, max_bytes_per_tenant=options.max_bytes_per_tenant
    )


def conversations(parts: GatewayParts) -> Conversations | None:
    """Build what continues an application's stored conversations; None where nothing is stored."""
    if parts.responses is None:
        return None
    limits = parts.limits
    return Conversations(
        store=parts.responses, max_body_bytes=limits.max_body_bytes, bounds=limits.json_bounds
    )
