"""Throttle of failed authentications."""

import ipaddress
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

Counted = Literal["new", "again", "throttled"]
"""new: a failure within the allowance; again: the same credential as a moment ago; throttled: more
failures than the address, or all addresses together, are allowed."""

_IPV6_NETWORK_BITS: Final = 64
_REMEMBERED: Final = 8


@dataclass(slots=True)
class _Bucket:
    """Attempts that are left. They come back with time."""

    left: float
    at_s: float
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def refill(self, now_s: float, per_s: float, most: float) -> None:
        """Add the allowance that has come back by now."""
        self.left = min(most, self.left + (now_s - self.at_s) * per_s)
        self.at_s = now_s

    def take(self, now_s: float, per_s: float, most: float) -> bool:
        """Use one attempt up; False where none is left."""
        self.refill(now_s, per_s, most)
        if self.left < 1:
            return False
        self.left -= 1
        return True


class AuthThrottle:
    """Counts wrong credentials of each address, and of all together, in bounded memory.

    It never sees a valid credential, so it cannot keep one out. The same wrong credential again is
    no new guess: a client with an old key keeps its answer, and uses no allowance. An IPv6 address
    represents its network of 64 bits.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        burst: int = 20,
        per_minute: float = 20.0,
        overall_burst: int = 1000,
        overall_per_minute: float = 1000.0,
        max_addresses: int = 4096,
        num_processes: int = 1,
    ) -> None:
        """Allow `burst` failures at once, then `per_minute`; `clock` in seconds, monotonic.

        `num_processes`: that share the allowance, each an equal part.
        """
        self._clock = clock
        self._burst = max(1, burst // num_processes)
        self._per_s = per_minute / 60 / num_processes
        self._overall_burst = max(1, overall_burst // num_processes)
        self._overall_per_s = overall_per_minute / 60 / num_processes
        self._max_addresses = max_addresses
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._overall = _Bucket(left=self._overall_burst, at_s=clock())

    def __len__(self) -> int:
        """Return the number of addresses remembered."""
        return len(self._buckets)

    def wait_s(self, peer: str | None) -> float:
        """Return the seconds until another failure of this address is within its allowance."""
        bucket = self._buckets.get(_network(peer))
        if bucket is None:
            return 0.0
        bucket.refill(self._clock(), self._per_s, self._burst)
        return 0.0 if bucket.left >= 1 else (1 - bucket.left) / self._per_s

    def count(self, peer: str | None, digest: bytes) -> Counted:
        """Count a wrong credential, given by its digest, unless it was counted a moment ago."""
        now_s = self._clock()
        network = _network(peer)
        bucket = self._buckets.setdefault(network, _Bucket(left=self._burst, at_s=now_s))
        self._buckets.move_to_end(network)
        if len(self._buckets) > self._max_addresses:
            self._buckets.popitem(last=False)
        if digest in bucket.recent:
            return "again"
        bucket.recent.append(digest)
        # A throttled address takes none of the common allowance.
        is_within = bucket.take(now_s, self._per_s, self._burst) and self._overall.take(
            now_s, self._overall_per_s, self._overall_burst
        )
        return "new" if is_within else "throttled"

    @property
    def overall_wait_s(self) -> float:
        """Return the seconds until a failure is within the common allowance of all addresses."""
        return max(0.0, (1 - self._overall.left) / self._overall_per_s)


@lru_cache(maxsize=4096)
def _network(peer: str | None) -> str:
    """Return the address, or the IPv6 network, that attempts are counted under."""
    if peer is None or ":" not in peer:
        return peer or ""
    try:
        address = ipaddress.IPv6Address(peer)
    except ValueError:
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _IPV6_NETWORK_BITS), strict=False))
