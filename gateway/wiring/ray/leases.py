"""The addresses of a fleet's replicas, each for as long as its replica says that it is there."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LEASE_S: Final = 10.0
RENEW_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    engine: str
    endpoint: str
    ends_s: float


class Leases:
    """Leases by a replica's name. A replica that is restarted takes its lease over."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._knows_all_s = clock() + 2 * RENEW_S
        self._leases: dict[str, _Lease] = {}

    def renew(self, name: str, engine: str, endpoint: str) -> None:
        """A replica of an engine is there, at this address."""
        self._leases[name] = _Lease(
            engine=engine, endpoint=endpoint, ends_s=self._clock() + LEASE_S
        )

    def end(self, name: str) -> None:
        """A replica goes, or drains: gateways are to send it nothing new."""
        self._leases.pop(name, None)

    @property
    def knows_all(self) -> bool:
        """False until every replica that is there has had time to say so."""
        return self._clock() >= self._knows_all_s

    def endpoints(self, engine: str | None = None) -> list[str]:
        """Return the addresses of replicas that are there, of one engine or of all, in order."""
        now_s = self._clock()
        for name in [name for name, lease in self._leases.items() if lease.ends_s < now_s]:
            del self._leases[name]
        leases = self._leases.values()
        return sorted({each.endpoint for each in leases if engine in (None, each.engine)})
