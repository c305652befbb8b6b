"""The replicas of one tier: the choice of the next one, and their health."""

import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from outrider.gateway.contract.errors.tree import FailureKind, UpstreamError, UpstreamRefusalError
from outrider.gateway.upstream.breaker import Breaker
from outrider.gateway.upstream.latency import LatencyEstimate
from outrider.gateway.upstream.outliers import RecentTimes, low_median, outliers

logger = logging.getLogger(__name__)

_MAX_LOAD: Final = 1.25
"""A request's home may have this multiple of the mean load, and one request more."""
_EJECTION_S: Final = 10.0
_MAX_EJECTIONS: Final = 30
_REVIEW_EVERY_S: Final = 0.25
_SOON_S: Final = 0.1
_STALL: Final = 10.0
_MIN_STALL_S: Final = 1.0
"""A stream without a first token for longer than this, and for this multiple of the usual time, is
a failure even when given up on our side: deadlines and hedges must not hide a server that hangs."""
_MASK: Final = 2**64 - 1


class Lease:
    """One request to one replica, made by `Replica.begin`.

    It is ended exactly once, by `succeeded`, `failed` or `cancelled`; later calls do nothing, so a
    `finally` may always call `cancelled`. As a context manager it ends by how the block is left.
    """

    __slots__ = (
        "_clock",
        "_era",
        "_is_streamed",
        "_load",
        "first_token_s",
        "is_ended",
        "replica",
        "started_s",
    )

    def __init__(
        self, replica: "Replica", clock: Callable[[], float], *, is_streamed: bool
    ) -> None:
        self._clock = clock
        self._is_streamed = is_streamed
        self.replica = replica
        self.started_s = clock()
        self.first_token_s: float | None = None
        """The time of the first token, on the clock; None before that."""
        self.is_ended = False
        self._era = replica.breaker.began()
        replica.in_flight += 1
        self._load = replica.in_flight

    def got_first_token(self) -> None:
        """Record the first token of a stream. Only the first call counts.

        Not for answers that are not streamed: their time is another thing.
        """
        assert self._is_streamed, "an answer that is not streamed has no first token"
        if self.first_token_s is None and not self.is_ended:
            self.first_token_s = self._clock()
            seconds = self.first_token_s - self.started_s
            self.replica.latency.add(seconds)
            self.replica.recent.add(seconds, self._load)
            self._era = self.replica.breaker.answered(self._era)

    def succeeded(self) -> None:
        """Record a whole answer, or a refusal for the request's own fault."""
        if self._end():
            self.replica.breaker.succeeded(self._era)

    def failed(self, failure: FailureKind, retry_after_s: float | None = None) -> None:
        """Record a failure, before or after the first token."""
        if self._end():
            if failure == "first_token_timeout":
                self._learn_wait()
            self.replica.breaker.failed(self._era, failure, retry_after_s)

    def cancelled(self) -> None:
        """Record that the request was given up: client gone, deadline passed, another was faster.

        Says nothing against the server, except when it has let a stream wait for far too long.
        """
        if self._end():
            if self._has_stalled():
                self.replica.breaker.failed(self._era, "first_token_timeout")
            else:
                self.replica.breaker.cancelled(self._era)
            self._learn_wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, UpstreamRefusalError):
            self.succeeded()
        elif isinstance(error, UpstreamError):
            self.failed(error.failure, error.asked_wait_s)
        else:
            self.cancelled()

    def _end(self) -> bool:
        if self.is_ended:
            return False
        self.is_ended = True
        self.replica.in_flight -= 1
        return True

    def _vain_wait_s(self) -> float | None:
        """Return its wait for a first token that has not come; None if it has come."""
        if self._is_streamed and self.first_token_s is None:
            return self._clock() - self.started_s
        return None

    def _has_stalled(self) -> bool:
        waited_s = self._vain_wait_s()
        usual_s = self.replica.latency.quantile(0.5)
        if waited_s is None or usual_s is None:
            return False
        return waited_s > max(_MIN_STALL_S, _STALL * usual_s)

    def _learn_wait(self) -> None:
        waited_s = self._vain_wait_s()
        if waited_s is not None and self.replica.latency.add_at_least(waited_s):
            self.replica.recent.add(waited_s, self._load)


class Replica:
    """One server of a tier. `in_flight` is changed by leases alone.

    name: host:port, or the tier's for a process that the gateway starts itself.
    """

    __slots__ = (
        "_clock",
        "_seed",
        "breaker",
        "ejected_until_s",
        "in_flight",
        "latency",
        "name",
        "num_ejections",
        "recent",
        "url",
    )

    def __init__(
        self, url: str, *, clock: Callable[[], float], rng: random.Random, name: str = ""
    ) -> None:
        self._clock = clock
        self._seed = _hash(url)
        self.url = url
        self.name = name or _host_and_port(url)
        self.breaker = Breaker(clock=clock, rng=rng, name=self.name)
        self.latency = LatencyEstimate(clock=clock)
        self.recent = RecentTimes()
        self.in_flight = 0
        self.num_ejections = 0
        """Number of ejections in a row, as an outlier."""
        self.ejected_until_s: float | None = None

    def __repr__(self) -> str:
        return f"Replica({self.name}, {self.breaker.state}, in_flight={self.in_flight})"

    def begin(self, *, is_streamed: bool = True) -> Lease:
        """Count a request as sent. Call it right after `pick`, without an await between."""
        return Lease(self, self._clock, is_streamed=is_streamed)

    def rank(self, affinity: int) -> int:
        """Return its rank for requests of this hash: the highest is home (rendezvous hashing)."""
        # splitmix64's finalizer: every bit of both numbers reaches every bit of the rank
        mixed = affinity ^ self._seed
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
        return mixed ^ (mixed >> 31)

    def eject(self, now_s: float) -> None:
        """Leave it out for 10 s times the number of ejections in a row."""
        self.num_ejections = min(self.num_ejections + 1, _MAX_EJECTIONS)
        self.ejected_until_s = now_s + _EJECTION_S * self.num_ejections

    def readmit(self) -> None:
        """Take it back. It is judged anew, by answers from now on."""
        self.ejected_until_s = None
        self.recent.clear()


class ReplicaSet:
    """Chooses among the replicas of one tier. Not thread-safe; no method waits."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        clock: Callable[[], float],
        rng: random.Random,
        has_prefix_cache: bool,
    ) -> None:
        """No `urls`: servers that are started when they are needed; see `replace`."""
        self._clock = clock
        self._rng = rng
        self._has_prefix_cache = has_prefix_cache
        self.replicas: tuple[Replica, ...] = ()
        self.replace(urls)
        self._typical_s = 1.0  # an unknown time counts the same for all
        self._next_review_s = clock()

    def replace(self, urls: Iterable[str], *, name: str = "") -> None:
        """Have other servers from now on. Requests to those before go on."""
        self.replicas = tuple(
            Replica(url, clock=self._clock, rng=self._rng, name=name) for url in dict.fromkeys(urls)
        )

    def pick(self, *, affinity: str = "", exclude: Collection[Replica] = ()) -> Replica | None:
        """Return the replica to ask next; None when none but `exclude` admits requests.

        A half-open replica gets its trial from the first request that excludes no replica: one that
        has failed once already is not to pay for it. Otherwise the home of `affinity` while its
        load is bounded, where replicas have prefix caches; else the better of two random ones by
        (requests in flight + 1) * expected time to the first token. Outliers are taken only when
        there is no other.
        """
        now = self._clock()
        if now >= self._next_review_s:
            self._review(now)
        healthy: list[Replica] = []
        ejected: list[Replica] = []
        half_open: Replica | None = None
        for replica in self.replicas:
            breaker = replica.breaker
            if not breaker.admits(now) or replica in exclude:
                continue
            if breaker.state == "half_open":
                half_open = half_open or replica
            elif replica.ejected_until_s is not None:
                ejected.append(replica)
            else:
                healthy.append(replica)
        if half_open is not None and not exclude:
            return half_open
        pool = healthy or ejected
        if len(pool) > 1:
            return self._choose(pool, affinity, now)
        return pool[0] if pool else half_open

    @property
    def is_available(self) -> bool:
        """Return whether any replica admits requests, or is started for them."""
        now = self._clock()
        return not self.replicas or any(replica.breaker.admits(now) for replica in self.replicas)

    @property
    def retry_after_s(self) -> float:
        """Return the least seconds until a replica may admit requests; 0 when one does now."""
        if self.is_available:
            return 0.0
        return max(_SOON_S, min(replica.breaker.wait_s for replica in self.replicas))

    def to_probe(self) -> list[Replica]:
        """Return replicas whose breaker wants a probe. Tell each `breaker` before calling again."""
        return [replica for replica in self.replicas if replica.breaker.wants_probe]

    @property
    def probe_wait_s(self) -> float | None:
        """Return the seconds until the next probe is due; None while no breaker is open."""
        due = [
            replica.breaker.open_until_s
            for replica in self.replicas
            if replica.breaker.state == "open"
        ]
        return max(0.0, min(due) - self._clock()) if due else None

    def _choose(self, pool: Sequence[Replica], affinity: str, now: float) -> Replica:
        if affinity and self._has_prefix_cache:
            key = _hash(affinity)
            home = max(pool, key=lambda replica: replica.rank(key))
            num_in_flight = sum(replica.in_flight for replica in pool)
            if home.in_flight <= _MAX_LOAD * num_in_flight / len(pool) + 1:
                return home
        first = int(self._rng.random() * len(pool))
        second = int(self._rng.random() * (len(pool) - 1))
        one, other = pool[first], pool[second + (second >= first)]
        return one if self._cost(one, now) <= self._cost(other, now) else other

    def _cost(self, replica: Replica, now: float) -> float:
        return (replica.in_flight + 1) * replica.latency.expected_s(self._typical_s, now)

    def _review(self, now: float) -> None:
        """Renew the typical first-token time and the outliers."""
        self._next_review_s = now + _REVIEW_EVERY_S
        known = [
            replica.latency.ewma_s
            for replica in self.replicas
            if replica.latency.ewma_s is not None
        ]
        if known:
            self._typical_s = low_median(known)
        self._readmit(now)
        self._eject_outliers(now)

    def _readmit(self, now: float) -> None:
        """Take back outliers whose time is over, or that are no slower than the others are now.

        Without the latter the others, if overloaded, would only get slower.
        """
        staying = [
            replica.latency.ewma_s
            for replica in self.replicas
            if replica.ejected_until_s is None
            and replica.breaker.state == "closed"
            and replica.latency.ewma_s is not None
        ]
        for replica in self.replicas:
            if replica.ejected_until_s is None:
                continue
            is_no_slower = bool(staying) and (replica.recent.seconds or 0.0) <= low_median(staying)
            if is_no_slower:
                replica.num_ejections -= 1
            if is_no_slower or replica.ejected_until_s <= now:
                replica.readmit()
                logger.info("replica readmitted replica=%s", replica.name)

    def _eject_outliers(self, now: float) -> None:
        """Leave outliers out, the slowest first, and never more than half of all."""
        slow = [self.replicas[i] for i in outliers([replica.recent for replica in self.replicas])]
        for replica in self.replicas:
            if replica.ejected_until_s is None and replica.recent.is_full and replica not in slow:
                replica.num_ejections = 0
        num_out = sum(replica.ejected_until_s is not None for replica in self.replicas)
        for replica in slow:
            if replica.ejected_until_s is None and num_out < len(self.replicas) // 2:
                num_out += 1
                replica.eject(now)
                logger.warning(
                    "replica ejected replica=%s recent_s=%.3f ejections=%d",
                    replica.name,
                    replica.recent.seconds,
                    replica.num_ejections,
                )


def _hash(text: str) -> int:
    """Return 64 bits that are the same in every process."""
    return int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def _host_and_port(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
