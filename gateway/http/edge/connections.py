"""State that a server's connections share: bounds, counters, and the idle connections."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from outrider.gateway.http.edge.bounds import ConnectionBounds
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics

logger = logging.getLogger(__name__)

_WARN_EACH_S: Final = 60.0


class Closeable(Protocol):
    """A connection between two requests."""

    def make_room(self) -> None:
        """Close this idle connection to make room for one with a request."""


@dataclass(eq=False, slots=True, kw_only=True)
class Connections:
    """`idle` has the one that waited longest first."""

    bounds: ConnectionBounds
    metrics: EdgeMetrics | None = None
    clock: Callable[[], float] = time.monotonic
    idle: dict[Closeable, None] = field(default_factory=dict)
    _warned_s: float = float("-inf")

    def count(self, num_connections: int) -> None:
        """Set the number of open connections."""
        if self.metrics is not None:
            self.metrics.connections.set(num_connections)

    def refused(self, code: str, peer: tuple[str, int] | None) -> None:
        """Count and log a refusal. Peers choose how often it happens, so it is no warning."""
        if self.metrics is not None:
            self.metrics.refused(code)
        logger.info("request refused code=%s peer=%s", code, "-" if peer is None else peer[0])

    def has_room(self, num_connections: int) -> bool:
        """Return whether a new, counted connection may stay; closes an idle one to make room."""
        if num_connections <= self.bounds.max_connections:
            return True
        if self.clock() - self._warned_s >= _WARN_EACH_S:
            self._warned_s = self.clock()
            logger.warning(
                "connections are full max_connections=%d idle=%d; idle ones are closed for new "
                "ones, and without an idle one new ones are refused",
                self.bounds.max_connections,
                len(self.idle),
            )
        if not self.idle:
            return False
        next(iter(self.idle)).make_room()
        return True
