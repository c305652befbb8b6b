"""Bounds on connections, and the open files that they need."""

import logging
from dataclasses import dataclass
from typing import Final

from outrider.gateway.settings.http_bounds import HttpSettings

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_OTHER_FILES: Final = 256
"""Open files other than clients' connections: engine, database, connections to upstream tiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Bounds of one connection, and of the number of connections. See HttpSettings."""

    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    max_header_bytes: int = 32 * 1024
    max_connections: int = 10_000

    @classmethod
    def of(cls, http: HttpSettings) -> "ConnectionBounds":
        """Return the settings' bounds, with at most as many connections as files may be open.

        Raises the process's soft limit of open files as far as is needed.
        """
        return cls(
            header_timeout_s=http.header_timeout_s,
            body_timeout_s=http.body_timeout_s,
            write_timeout_s=http.write_timeout_s,
            keep_alive_s=http.keep_alive_s,
            max_header_bytes=http.max_header_bytes,
            max_connections=usable_connections(http.max_connections),
        )


def usable_connections(wanted: int) -> int:
    """Return how many connections are possible, at most `wanted`: each is an open file.

    Raises the soft limit of open files towards the hard one, and warns where that is too low:
    without room new connections would wait unanswered, and the database could not be opened.
    """
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed >= needed:
        return wanted
    usable = max(allowed - _OTHER_FILES, allowed // 2)
    logger.warning(
        "fewer connections than http.max_connections wanted=%d possible=%d open_files=%d; raise "
        "the limit of open files (ulimit -n, LimitNOFILE=) or lower http.max_connections",
        wanted,
        usable,
        allowed,
    )
    return usable
