"""The addresses of a fleet's replicas, each for as long as its replica says that it is there."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LEASE_S: Final = 10.0
RENEW_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    endpoint: str
    ends_s: float


class Leases:
    """Leases by a replica's name. A replica that is restarted takes its lease over."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._knows_all_s = clock() + 2 * RENEW_S
        self._leases: dict[str, _Lease] = {}

    def renew(self, name: str, endpoint: str) -> None:
        """A replica is there, at this address."""
        self._leases[name] = _Lease(endpoint=endpoint, ends_s=self._clock() + LEASE_S)

    def end(self, name: str) -> None:
        """A replica goes, or drains: gateways are to send it nothing new."""
        self._leases.pop(name, None)

    @property
    def knows_all(self) -> bool:
        """False until every replica that is there has had time to say so."""
        return self._clock() >= self._knows_all_s

    def endpoints(self) -> list[str]:
        """Return the addresses of replicas that are there, in order."""
        now_s = self._clock()
        for name in [name for name, lease in self._leases.items() if lease.ends_s < now_s]:
            del self._leases[name]
        return sorted({lease.endpoint for lease in self._leases.values()})
