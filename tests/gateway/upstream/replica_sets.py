"""Sets of replicas in the states that tests begin with."""

import random

from outrider.gateway.upstream.replicas import Replica, ReplicaSet
from tests.gateway.waiting import HandClock


def replica_set(
    count: int, clock: HandClock, *, has_prefix_cache: bool = False, seed: int = 0
) -> ReplicaSet:
    return ReplicaSet(
        [f"http://10.0.0.{number}:8000/v1" for number in range(1, count + 1)],
        clock=clock,
        rng=random.Random(seed),
        has_prefix_cache=has_prefix_cache,
    )


def break_down(replica: Replica) -> None:
    for _ in range(5):
        replica.begin().failed("reset")
    assert replica.breaker.state == "open"


def half_open(replica: Replica) -> None:
    break_down(replica)
    replica.breaker.probe_succeeded()
    assert replica.breaker.state == "half_open"


def answer(replica: Replica, clock: HandClock, seconds: float, count: int = 1) -> None:
    """Answers whose first tokens take so long; the clock stands still between them."""
    for _ in range(count):
        lease = replica.begin()
        clock.now_s += seconds
        lease.got_first_token()
        lease.succeeded()
        clock.now_s -= seconds
