"""Simulations: what the choice among replicas does to waits and shares."""

import heapq
import random
from collections import Counter
from collections.abc import Callable

from outrider.gateway.upstream.replicas import Lease, Replica, ReplicaSet
from tests.gateway.upstream.replica_sets import replica_set
from tests.gateway.waiting import HandClock


def _simulate(
    choose: Callable[[ReplicaSet, random.Random], Replica | None],
    service_s: tuple[float, ...],
    num_requests: int = 3000,
) -> tuple[list[float], Counter[Replica]]:
    """Poisson arrivals at servers that answer one after the other. Returns waits and shares."""
    clock = HandClock(0.0)
    replicas = replica_set(len(service_s), clock)
    rng = random.Random(5)
    speeds = dict(zip(replicas.replicas, service_s, strict=True))
    free_s = dict.fromkeys(replicas.replicas, 0.0)
    rate = 0.7 * sum(1 / seconds for seconds in service_s)
    ending: list[tuple[float, int, Lease]] = []
    waits, arrival_s = [], 0.0
    counts: Counter[Replica] = Counter()
    for number in range(num_requests):
        arrival_s += rng.expovariate(rate)
        while ending and ending[0][0] <= arrival_s:
            clock.now_s, _, lease = heapq.heappop(ending)
            lease.got_first_token()
            lease.succeeded()
        clock.now_s = arrival_s
        replica = choose(replicas, rng)
        assert replica is not None
        counts[replica] += 1
        end_s = max(free_s[replica], arrival_s) + rng.expovariate(1 / speeds[replica])
        free_s[replica] = end_s
        heapq.heappush(ending, (end_s, number, replica.begin()))
        waits.append(end_s - arrival_s)
    return sorted(waits), counts


def test_two_choices_wait_far_less_than_one_at_random() -> None:
    service_s = (0.1,) * 4
    chosen, counts = _simulate(lambda replicas, _: replicas.pick(), service_s)
    at_random, _ = _simulate(lambda replicas, rng: rng.choice(replicas.replicas), service_s)
    assert chosen[2970] < 0.6 * at_random[2970]
    assert sum(chosen) < 0.7 * sum(at_random)
    assert min(counts.values()) > 600, "nobody starves"


def test_chance_and_queues_make_no_storm_of_ejections() -> None:
    """One of two, left out at 70 % load, would put 140 % on the other."""
    chosen, _ = _simulate(lambda replicas, _: replicas.pick(), (0.1, 0.1), 10_000)
    at_random, _ = _simulate(
        lambda replicas, rng: rng.choice(replicas.replicas), (0.1, 0.1), 10_000
    )
    assert chosen[9900] < 0.9 * at_random[9900]


def test_a_slower_server_gets_its_smaller_share() -> None:
    waits, counts = _simulate(lambda replicas, _: replicas.pick(), (0.1, 0.1, 0.1, 0.25))
    shares = [count / 3000 for _, count in sorted(counts.items(), key=lambda pair: pair[0].name)]
    assert 0.02 < shares[3] < 0.16, "its part of the capacity is 0.12"
    assert sum(waits) / 3000 < 0.5
