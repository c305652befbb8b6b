"""Settings of stored responses (`[responses]`)."""

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field

from outrider.gateway.settings.sections import Count, Section, ServerSettings
from outrider.gateway.settings.tiers import Complaint

_MAX_TTL_S: Final = 30 * 86_400.0


class ResponseSettings(Section):
    """Stored responses of /v1/responses: in the Redis at redis_url, else in this process."""

    store: bool = False
    """Store responses unless a request says `store: false` or is private, so that
    previous_response_id continues them."""
    ttl_s: Annotated[float, Field(gt=0, le=_MAX_TTL_S)] = _MAX_TTL_S
    """Time that a response is kept; at most 30 days."""
    max_bytes: Count = 256 * 2**20
    """Memory for responses; where it is full, the tenant with most of it loses those that it used
    least recently. Redis has its own limit."""
    max_bytes_per_tenant: Count = 64 * 2**20
    """Size of one tenant's responses, in memory or in Redis."""


def response_complaints(
    responses: ResponseSettings, server: ServerSettings, *, has_redis: bool
) -> Iterator[Complaint]:
    """Yield settings of stored responses that contradict others."""
    if responses.store and server.workers > 1 and not has_redis:
        yield Complaint(
            ("responses", "store"),
            responses.store,
            f"{server.workers} worker processes share stored responses through Redis: set "
            "redis_url, or server.workers = 1",
        )
