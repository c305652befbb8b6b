"""Leases: what one request to one replica tells about its server, however it ends."""

import asyncio
from collections.abc import Callable

import pytest

from outrider.gateway.contract.errors.tree import (
    DeadlineExceededError,
    UpstreamError,
    UpstreamRefusalError,
)
from outrider.gateway.upstream.replicas import Lease
from tests.gateway.upstream.replica_sets import answer, half_open, replica_set
from tests.gateway.waiting import HandClock

ENDS: dict[str, Callable[[Lease], None]] = {
    "succeeded": Lease.succeeded,
    "failed": lambda lease: lease.failed("reset"),
    "cancelled": Lease.cancelled,
}


@pytest.mark.parametrize("second", ENDS)
@pytest.mark.parametrize("first", ENDS)
def test_a_lease_ends_once(first: str, second: str) -> None:
    replica = replica_set(1, HandClock()).replicas[0]
    for number in range(1, 6):
        lease = replica.begin()
        assert replica.in_flight == 1
        ENDS[first](lease)
        assert lease.is_ended
        ENDS[second](lease)
        lease.got_first_token()
        assert replica.in_flight == 0
        assert replica.latency.num_samples == 0
        is_open = replica.breaker.state == "open"
        assert is_open == (first == "failed" and number == 5)


def test_the_first_token_is_learned_once() -> None:
    clock = HandClock()
    replica = replica_set(1, clock).replicas[0]
    lease = replica.begin()
    clock.now_s += 0.25
    lease.got_first_token()
    clock.now_s += 9
    lease.got_first_token()
    lease.succeeded()
    assert lease.first_token_s == pytest.approx(lease.started_s + 0.25)
    assert replica.latency.num_samples == 1
    assert replica.latency.ewma_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("end", "is_learned"),
    [
        ("cancelled", True),
        ("first_token_timeout", True),
        ("refused", False),
        ("succeeded", False),
    ],
)
def test_a_vain_wait_for_the_first_token_is_learned(end: str, is_learned: bool) -> None:
    clock = HandClock()
    replica = replica_set(1, clock).replicas[0]
    answer(replica, clock, 0.2)
    lease = replica.begin()
    clock.now_s += 0.5
    match end:
        case "cancelled":
            lease.cancelled()
        case "succeeded":
            lease.succeeded()
        case "refused":
            lease.failed("refused")
        case _:
            lease.failed("first_token_timeout")
    assert replica.latency.ewma_s == pytest.approx(0.5 if is_learned else 0.2)


def test_a_client_that_leaves_behind_the_first_token_tells_nothing_of_waiting() -> None:
    clock = HandClock()
    replica = replica_set(1, clock).replicas[0]
    lease = replica.begin()
    clock.now_s += 0.2
    lease.got_first_token()
    clock.now_s += 30
    lease.cancelled()
    assert replica.latency.num_samples == 1


@pytest.mark.parametrize("end", ["cancelled", "first_token_timeout"])
def test_an_answer_that_is_not_streamed_tells_nothing_of_first_tokens(end: str) -> None:
    clock = HandClock()
    replica = replica_set(1, clock).replicas[0]
    answer(replica, clock, 0.2, 20)
    for _ in range(4):
        lease = replica.begin(is_streamed=False)
        clock.now_s += 50
        if end == "cancelled":
            lease.cancelled()
        else:
            lease.failed("first_token_timeout")
    assert replica.latency.num_samples == 20
    assert replica.breaker.state == "closed"
    replica.begin(is_streamed=False).cancelled()
    assert replica.breaker.state == "closed"


@pytest.mark.parametrize(
    ("usual_s", "num_known", "waited_s", "is_broken"),
    [
        (0.2, 20, 2.1, True),
        (0.2, 20, 1.9, False),  # less than ten times as long
        (0.01, 20, 0.9, False),  # less than a second
        (0.2, 19, 60.0, False),  # who knows what is usual
    ],
)
def test_a_hanging_server_is_found_before_any_timeout(
    usual_s: float, num_known: int, waited_s: float, is_broken: bool
) -> None:
    clock = HandClock()
    replica = replica_set(1, clock).replicas[0]
    answer(replica, clock, usual_s, num_known)
    leases = [replica.begin() for _ in range(5)]
    clock.now_s += waited_s
    for lease in leases:
        lease.cancelled()
    assert (replica.breaker.state == "open") == is_broken


def test_a_stream_that_was_left_in_its_middle_has_not_hung() -> None:
    clock = HandClock()
    replica = replica_set(1, clock).replicas[0]
    answer(replica, clock, 0.2, 20)
    for _ in range(10):
        lease = replica.begin()
        clock.now_s += 0.2
        lease.got_first_token()
        clock.now_s += 60
        lease.cancelled()
    assert replica.breaker.state == "closed"


FAILED = UpstreamError("The cloud tier failed.", failure="status", status=503, retry_after_s=2.5)
REFUSED = UpstreamRefusalError("No such field.", status=400, body=b"{}")


@pytest.mark.parametrize(
    ("error", "state", "wait_s"),
    [
        (None, "closed", 0.0),
        (REFUSED, "closed", 0.0),
        (FAILED, "open", 2.5),
        (asyncio.CancelledError(), "half_open", 0.0),
        (GeneratorExit(), "half_open", 0.0),
        (DeadlineExceededError("Too late."), "half_open", 0.0),
    ],
)
def test_a_block_ends_its_lease_by_what_leaves_it(
    error: BaseException | None, state: str, wait_s: float
) -> None:
    replica = replica_set(1, HandClock()).replicas[0]
    half_open(replica)

    def ask() -> None:
        with replica.begin():
            if error is not None:
                raise error

    if error is None:
        ask()
    else:
        with pytest.raises(type(error)):
            ask()
    assert replica.in_flight == 0
    assert replica.breaker.state == state
    assert replica.breaker.wait_s >= wait_s


def test_a_block_may_end_its_lease_itself() -> None:
    replica = replica_set(1, HandClock()).replicas[0]
    half_open(replica)
    with replica.begin() as lease:
        lease.cancelled()
    assert replica.breaker.state == "half_open"
    assert replica.in_flight == 0


def test_a_stream_that_breaks_off_in_the_middle_counts_as_a_failure() -> None:
    replica = replica_set(1, HandClock()).replicas[0]
    for _ in range(5):
        lease = replica.begin()
        lease.got_first_token()
        lease.failed("ended_early")
    assert replica.breaker.state == "open"
