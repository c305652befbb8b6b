"""Replicas: which are picked, which are left out, and a state machine over all of it."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.gateway.upstream.replicas import Lease, Replica, ReplicaSet
from tests.gateway.upstream.replica_sets import answer, break_down, half_open, replica_set
from tests.gateway.waiting import HandClock


def _shares(replicas: ReplicaSet, num_picks: int = 400) -> Counter[Replica | None]:
    return Counter(replicas.pick() for _ in range(num_picks))


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:9000/v1", "127.0.0.1:9000"),
        ("https://models.example.com/v1", "models.example.com:443"),
        ("http://models.example.com", "models.example.com:80"),
        ("http://[::1]:9000/v1", "[::1]:9000"),
    ],
)
def test_a_replica_is_named_by_host_and_port(url: str, name: str) -> None:
    replicas = ReplicaSet([url, url], clock=HandClock(), rng=random.Random(), has_prefix_cache=True)
    assert [replica.name for replica in replicas.replicas] == [name]


def test_no_replica_is_picked_where_none_admits() -> None:
    clock = HandClock()
    replicas = replica_set(2, clock)
    one, other = replicas.replicas
    assert replicas.is_available
    assert replicas.retry_after_s == 0
    assert replicas.pick(exclude=[one]) is other
    assert replicas.pick(exclude=[one, other]) is None
    one.begin().failed("throttled", 8.0)
    assert {replicas.pick() for _ in range(20)} == {other}
    other.begin().failed("throttled", 5.0)
    assert replicas.pick() is None
    assert not replicas.is_available
    assert replicas.retry_after_s == pytest.approx(5.0)
    clock.now_s += 5.0
    assert replicas.pick() is other
    assert replicas.retry_after_s == 0


def test_open_breakers_want_probes_when_their_time_is_over() -> None:
    clock = HandClock()
    replicas = replica_set(2, clock)
    one, other = replicas.replicas
    assert replicas.probe_wait_s is None
    break_down(one)
    assert replicas.to_probe() == []
    assert replicas.probe_wait_s == pytest.approx(one.breaker.open_until_s - clock())
    clock.now_s = one.breaker.open_until_s
    assert replicas.to_probe() == [one]
    assert replicas.probe_wait_s == 0
    one.breaker.probe_succeeded()
    assert replicas.to_probe() == []
    assert replicas.probe_wait_s is None
    assert replicas.pick(exclude=[one]) is other


def test_waiting_for_a_trial_is_not_called_waiting_for_nothing() -> None:
    replicas = replica_set(1, HandClock())
    half_open(replicas.replicas[0])
    lease = replicas.replicas[0].begin()
    assert replicas.pick() is None
    assert replicas.retry_after_s > 0
    lease.succeeded()
    assert replicas.retry_after_s == 0


def test_a_half_open_replica_is_tried_by_the_next_request_but_not_by_a_retry() -> None:
    clock = HandClock()
    replicas = replica_set(3, clock)
    one, other, third = replicas.replicas
    half_open(one)
    assert all(replicas.pick(exclude=[other]) is third for _ in range(20))
    assert replicas.pick(exclude=[other, third]) is one, "better than nobody"
    assert replicas.pick() is one
    with one.begin():
        assert _shares(replicas)[one] == 0
    assert one.breaker.state == "closed"
    assert _shares(replicas)[one] > 0


def test_of_two_the_one_with_less_to_do_is_picked() -> None:
    replicas = replica_set(2, HandClock())
    busy, idle = replicas.replicas
    lease = busy.begin()
    assert _shares(replicas) == {idle: 400}
    lease.succeeded()
    assert min(_shares(replicas).values()) > 120


def test_of_two_the_faster_one_is_picked_until_it_has_more_to_do() -> None:
    clock = HandClock()
    replicas = replica_set(2, clock)
    slow, fast = replicas.replicas
    answer(slow, clock, 0.35)
    answer(fast, clock, 0.1)
    for _ in range(3):
        assert _shares(replicas) == {fast: 400}
        fast.begin()
    assert _shares(replicas) == {slow: 400}, "4 * 0.1 s against 1 * 0.35 s"


def test_an_unmeasured_replica_counts_as_the_median() -> None:
    clock = HandClock()
    replicas = replica_set(4, clock)
    fast, middle, slow, unknown = replicas.replicas
    for replica, seconds in ((fast, 0.1), (middle, 0.4), (slow, 0.9)):
        answer(replica, clock, seconds)
    picked = _shares(replicas, 2000)
    assert picked[slow] == 0
    assert picked[fast] > picked[middle] + 200
    assert abs(picked[middle] - picked[unknown]) < 200


def test_a_slow_replica_is_tried_again_under_load_after_a_while() -> None:
    clock = HandClock()
    replicas = replica_set(2, clock)
    slow, fast = replicas.replicas
    answer(fast, clock, 0.1)
    for _ in range(3):
        answer(slow, clock, 0.9)
    fast.begin()
    assert _shares(replicas) == {fast: 400}
    clock.now_s += 60
    assert _shares(replicas) == {slow: 400}


def _learn_all(replicas: ReplicaSet, clock: HandClock, *seconds: float, count: int = 20) -> None:
    for replica, first_token_s in zip(replicas.replicas, seconds, strict=True):
        answer(replica, clock, first_token_s, count)
    clock.now_s += 0.3  # behind the next review


def test_an_outlier_is_left_out_and_longer_each_time() -> None:
    clock = HandClock()
    replicas = replica_set(3, clock)
    slow, one, other = replicas.replicas
    for times in (1, 2, 3):
        _learn_all(replicas, clock, 1.0, 0.2, 0.3)
        assert _shares(replicas)[slow] == 0
        assert slow.num_ejections == times
        assert slow.ejected_until_s == pytest.approx(clock() + 10 * times)
        leases = [replica.begin() for replica in (one, other) for _ in range(9)]
        assert _shares(replicas)[slow] == 0, "also when the others have more to do"
        for lease in leases:
            lease.succeeded()
        clock.now_s += 10 * times + 0.3
        replicas.pick()
        assert slow.ejected_until_s is None
        assert not slow.recent.is_full, "it is judged by new answers"
    _learn_all(replicas, clock, 0.2, 0.2, 0.3)
    replicas.pick()
    assert slow.num_ejections == 0, "a good time forgives"


def test_a_replica_that_always_loses_against_hedges_is_an_outlier_too() -> None:
    clock = HandClock()
    replicas = replica_set(2, clock)
    slow, fast = replicas.replicas
    answer(slow, clock, 0.2, 5)
    answer(fast, clock, 0.2, 20)
    for _ in range(20):
        lease = slow.begin()
        clock.now_s += 0.9
        lease.cancelled()
        clock.now_s -= 0.9
    clock.now_s += 0.3
    replicas.pick()
    assert slow.ejected_until_s is not None


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        ((0.55, 0.2, 0.2), 20),  # less than three times as slow
        ((0.09, 0.01, 0.01), 20),  # less than a tenth of a second
        ((1.0, 0.2, 0.2), 19),
    ],
)
def test_replicas_with_normal_latencies_stay_in(
    seconds: tuple[float, float, float], count: int
) -> None:
    clock = HandClock()
    replicas = replica_set(3, clock)
    _learn_all(replicas, clock, *seconds, count=count)
    replicas.pick()
    assert all(replica.ejected_until_s is None for replica in replicas.replicas)


def test_one_slow_answer_ejects_no_replica() -> None:
    clock = HandClock()
    replicas = replica_set(3, clock)
    _learn_all(replicas, clock, 0.2, 0.2, 0.2)
    answer(replicas.replicas[0], clock, 60.0)
    clock.now_s += 0.3
    replicas.pick()
    assert replicas.replicas[0].ejected_until_s is None


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_half_of_them_are_left_out_at_most(count: int) -> None:
    clock = HandClock()
    replicas = replica_set(count, clock)
    # each is an outlier against all that are faster
    _learn_all(replicas, clock, *[0.1 * 7**place for place in range(count)])
    for _ in range(3):
        replicas.pick()
        clock.now_s += 0.3
    ejected = [replica.ejected_until_s is not None for replica in replicas.replicas]
    assert sum(ejected) <= count // 2
    if count > 1:
        assert ejected[-1], "the slowest goes first"


def test_an_outlier_comes_back_when_the_others_get_as_slow() -> None:
    clock = HandClock()
    replicas = replica_set(3, clock)
    slow, one, other = replicas.replicas
    _learn_all(replicas, clock, 1.0, 0.2, 0.2)
    replicas.pick()
    assert slow.ejected_until_s is not None
    for replica in (one, other):
        answer(replica, clock, 0.9, 3)
    clock.now_s += 0.3
    replicas.pick()
    assert slow.ejected_until_s is not None
    for replica in (one, other):
        answer(replica, clock, 1.1, 3)
    clock.now_s += 0.3
    assert None not in _shares(replicas)
    assert slow.ejected_until_s is None
    assert slow.num_ejections == 0, "it was not the one to blame"


def test_an_outlier_is_used_where_no_other_replica_is_left() -> None:
    clock = HandClock()
    replicas = replica_set(2, clock)
    slow, fast = replicas.replicas
    _learn_all(replicas, clock, 1.0, 0.2)
    assert replicas.pick() is fast
    assert replicas.pick(exclude=[fast]) is slow
    break_down(fast)
    assert replicas.pick() is slow
    assert replicas.is_available


def _home(replicas: ReplicaSet, affinity: str) -> Replica:
    homes = {replicas.pick(affinity=affinity) for _ in range(5)}
    assert len(homes) == 1
    (home,) = homes
    assert home is not None
    return home


def test_requests_that_begin_alike_have_one_home_and_homes_are_spread() -> None:
    replicas = replica_set(4, HandClock(), has_prefix_cache=True)
    homes = {f"prefix {number}": _home(replicas, f"prefix {number}") for number in range(400)}
    counts = Counter(homes.values())
    assert len(counts) == 4
    assert all(60 < count < 140 for count in counts.values())
    again = replica_set(4, HandClock(), has_prefix_cache=True, seed=99)
    assert all(_home(again, prefix).url == home.url for prefix, home in homes.items())
    _home(replicas, "half a pair \ud83d")


def test_when_a_replica_goes_only_its_own_requests_move() -> None:
    replicas = replica_set(4, HandClock(), has_prefix_cache=True)
    prefixes = [f"prefix {number}" for number in range(100)]
    before = {prefix: _home(replicas, prefix) for prefix in prefixes}
    gone = replicas.replicas[2]
    break_down(gone)
    after = {prefix: _home(replicas, prefix) for prefix in prefixes}
    assert gone not in after.values()
    assert all(after[prefix] is home for prefix, home in before.items() if home is not gone)
    assert len({after[prefix] for prefix, home in before.items() if home is gone}) == 3


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_there_is_no_home_without_a_cache_or_a_beginning(has_prefix_cache: bool) -> None:
    replicas = replica_set(4, HandClock(), has_prefix_cache=has_prefix_cache)
    affinity = "" if has_prefix_cache else "prefix"
    assert len({replicas.pick(affinity=affinity) for _ in range(200)}) == 4


def test_a_home_is_left_when_it_has_too_much_to_do() -> None:
    replicas = replica_set(4, HandClock(), has_prefix_cache=True)
    home = _home(replicas, "hot")
    for _ in range(200):
        picked = replicas.pick(affinity="hot")
        assert picked is not None
        mean = sum(replica.in_flight for replica in replicas.replicas) / 4
        if picked is home and home.in_flight > 1.25 * mean + 1:
            others = [replica.in_flight for replica in replicas.replicas if replica is not home]
            assert max(others) >= home.in_flight, "by two choices only"
        picked.begin()
    loads = [replica.in_flight for replica in replicas.replicas]
    assert home.in_flight == max(loads)
    assert home.in_flight <= 1.25 * 50 + 2
    assert min(loads) >= 30


ENDS: dict[str, Callable[[Lease], None]] = {
    "succeeded": Lease.succeeded,
    "cancelled": Lease.cancelled,
    "broken off": lambda lease: lease.failed("reset"),
    "busy": lambda lease: lease.failed("throttled", 4.0),
}


class ReplicasMachine(RuleBasedStateMachine):
    """Requests, failures, probes and time over three replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.set = replica_set(3, self.clock, has_prefix_cache=True)
        self.leases: list[Lease] = []

    @rule(affinity=st.sampled_from(["", "a", "b"]), excluded=st.sets(st.integers(0, 2)))
    def ask(self, affinity: str, excluded: set[int]) -> None:
        exclude = [self.set.replicas[index] for index in excluded]
        able = [
            replica
            for replica in self.set.replicas
            if replica.breaker.admits() and replica not in exclude
        ]
        picked = self.set.pick(affinity=affinity, exclude=exclude)
        assert (picked is None) == (not able)
        if picked is not None:
            assert picked in able
            good = [replica for replica in able if replica.breaker.state == "closed"]
            kept = [replica for replica in good if replica.ejected_until_s is None]
            assert not kept or picked in kept or (not exclude and picked not in good)
            self.leases.append(picked.begin())

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 50), seconds=st.sampled_from([0.0, 0.1, 2.0]))
    def first_token(self, index: int, seconds: float) -> None:
        self.clock.now_s += seconds
        lease = self.leases[index % len(self.leases)]
        lease.got_first_token()

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 50), end=st.sampled_from(sorted(ENDS)), times=st.integers(1, 2))
    def end(self, index: int, end: str, times: int) -> None:
        lease = self.leases.pop(index % len(self.leases))
        for _ in range(times):
            ENDS[end](lease)

    @rule(index=st.integers(0, 2))
    def break_one(self, index: int) -> None:
        """So that the rarer states are met often."""
        replica = self.set.replicas[index]
        if replica.breaker.admits() and replica.breaker.state == "closed":
            break_down(replica)

    @rule(index=st.integers(0, 2), count=st.integers(20, 25), seconds=st.sampled_from([0.1, 3.0]))
    def answer_many(self, index: int, count: int, seconds: float) -> None:
        replica = self.set.replicas[index]
        if replica.breaker.admits() and replica.breaker.state == "closed":
            answer(replica, self.clock, seconds, count)

    @rule(is_alive=st.booleans())
    def probe(self, is_alive: bool) -> None:
        for replica in self.set.to_probe():
            if is_alive:
                replica.breaker.probe_succeeded()
            else:
                replica.breaker.probe_failed()
        assert self.set.to_probe() == []

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def the_books_are_right(self) -> None:
        for replica in self.set.replicas:
            on_their_way = [lease for lease in self.leases if lease.replica is replica]
            assert replica.in_flight == len(on_their_way)
        ejected = [replica.ejected_until_s is not None for replica in self.set.replicas]
        assert sum(ejected) <= 1
        assert (self.set.retry_after_s == 0) == self.set.is_available
        assert self.set.retry_after_s <= 60


TestReplicasMachine = ReplicasMachine.TestCase
TestReplicasMachine.settings = settings(stateful_step_count=60)
