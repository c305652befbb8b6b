"""How often somebody may be wrong about a key."""

import ipaddress
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

Counted = Literal["new", "again", "too_many"]

_IPV6_NETWORK_BITS: Final = 64
_REMEMBERED: Final = 8


@dataclass(slots=True)
class _Bucket:
    """Attempts that are left. They come back with time."""

    left: float
    at_s: float
    recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def refill(self, now_s: float, per_s: float, most: float) -> None:
        """Add what has come back until now."""
        self.left = min(most, self.left + (now_s - self.at_s) * per_s)
        self.at_s = now_s


class GuessGuard:
    """Counts wrong credentials of each address, and of all together, in bounded memory.

    The same wrong credential again is no new guess: a client with an old key goes on being told
    so, and uses nothing up. An IPv6 address stands for its network of 64 bits.
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
    ) -> None:
        """`burst` wrong ones at once, then `per_minute`; `clock` in seconds, monotonic."""
        self._clock = clock
        self._burst = burst
        self._per_s = per_minute / 60
        self._overall_burst = overall_burst
        self._overall_per_s = overall_per_minute / 60
        self._max_addresses = max_addresses
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._overall = _Bucket(left=overall_burst, at_s=clock())

    def __len__(self) -> int:
        """How many addresses are remembered."""
        return len(self._buckets)

    def wait_s(self, peer: str | None) -> float:
        """How long this address has to wait before it may try a credential; 0: not at all."""
        if not self._buckets:
            return 0.0
        bucket = self._buckets.get(_network(peer))
        if bucket is None:
            return 0.0
        bucket.refill(self._clock(), self._per_s, self._burst)
        return 0.0 if bucket.left >= 1 else (1 - bucket.left) / self._per_s

    def has_seen(self, peer: str | None, digest: bytes) -> bool:
        """Whether this very credential was wrong lately, from this address."""
        bucket = self._buckets.get(_network(peer))
        return bucket is not None and digest in bucket.recent

    def count(self, peer: str | None, digest: bytes) -> Counted:
        """Count a wrong credential, unless it has been seen.

        too_many: all addresses together were wrong too often.
        """
        now_s = self._clock()
        network = _network(peer)
        bucket = self._buckets.setdefault(network, _Bucket(left=self._burst, at_s=now_s))
        self._buckets.move_to_end(network)
        if len(self._buckets) > self._max_addresses:
            self._buckets.popitem(last=False)
        if digest in bucket.recent:
            return "again"
        bucket.refill(now_s, self._per_s, self._burst)
        is_held_back = bucket.left < 1
        bucket.left = max(0.0, bucket.left - 1)
        bucket.recent.append(digest)
        if is_held_back:
            return "new"  # what all together may try is not used up by one address
        self._overall.refill(now_s, self._overall_per_s, self._overall_burst)
        if self._overall.left < 1:
            return "too_many"
        self._overall.left -= 1
        return "new"

    @property
    def overall_wait_s(self) -> float:
        """How long all addresses together have to wait for a wrong credential's turn."""
        return max(0.0, (1 - self._overall.left) / self._overall_per_s)


def _network(peer: str | None) -> str:
    """What counts as one address."""
    if peer is None or ":" not in peer:
        return peer or ""
    try:
        address = ipaddress.IPv6Address(peer)
    except ValueError:
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _IPV6_NETWORK_BITS), strict=False))
