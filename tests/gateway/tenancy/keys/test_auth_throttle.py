"""Wrong keys are counted by address, in bounded memory."""

import pytest

from outrider.gateway.tenancy.keys.auth_throttle import AuthThrottle
from tests.gateway.waiting import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock(100.0)


def throttle_of(clock: HandClock, **options: float) -> AuthThrottle:
    return AuthThrottle(clock, **({"burst": 3, "per_minute": 6} | options))  # type: ignore[arg-type]


def test_after_the_burst_an_address_waits(clock: HandClock) -> None:
    throttle = throttle_of(clock)
    for n in range(3):
        assert throttle.wait_s("a") == 0
        assert throttle.count("a", b"%d" % n) == "new"
    assert throttle.wait_s("a") == pytest.approx(10)
    assert throttle.wait_s("b") == 0
    clock.now_s += 9.9
    assert throttle.wait_s("a") > 0
    clock.now_s += 0.2
    assert throttle.wait_s("a") == 0
    clock.now_s += 10_000
    assert [throttle.count("a", b"x%d" % n) for n in range(3)] == ["new"] * 3
    assert throttle.wait_s("a") > 0  # what came back is no more than the burst


def test_the_same_wrong_key_is_one_guess(clock: HandClock) -> None:
    throttle = throttle_of(clock)
    assert throttle.count("a", b"old") == "new"
    assert {throttle.count("a", b"old") for _ in range(100)} == {"again"}
    assert throttle.wait_s("a") == 0
    assert throttle.count("b", b"old") == "new"


def test_memory_is_bounded(clock: HandClock) -> None:
    throttle = throttle_of(clock, max_addresses=10, overall_burst=1e9)
    for n in range(3):
        throttle.count("often", b"%d" % n)
    for n in range(1000):
        throttle.count(f"10.0.{n // 250}.{n % 250}", b"x")
        throttle.count("often", b"%d" % n)
    assert len(throttle) == 10
    assert throttle.wait_s("often") > 0  # who goes on guessing is not forgotten


def test_all_addresses_together_are_counted(clock: HandClock) -> None:
    throttle = throttle_of(clock, overall_burst=5, overall_per_minute=60)
    counted = [throttle.count(f"10.0.0.{n}", b"x") for n in range(7)]
    assert counted == ["new"] * 5 + ["throttled"] * 2
    assert throttle.overall_wait_s == pytest.approx(1)
    clock.now_s += 1
    assert throttle.count("10.0.1.1", b"x") == "new"


def test_a_network_of_ipv6_is_one_address(clock: HandClock) -> None:
    throttle = throttle_of(clock)
    for n in range(3):
        throttle.count(f"2001:db8:1:2::{n}", b"%d" % n)
    assert throttle.wait_s("2001:db8:1:2:ffff::1") > 0
    assert throttle.wait_s("2001:db8:1:3::1") == 0
    assert len(throttle) == 1


def test_an_ipv4_address_is_the_same_in_ipv6(clock: HandClock) -> None:
    throttle = throttle_of(clock)
    for n in range(3):
        throttle.count(f"::ffff:10.0.0.{n % 2}", b"%d" % n)
    assert len(throttle) == 2
    throttle.count("10.0.0.1", b"y")
    throttle.count("10.0.0.1", b"z")
    assert throttle.wait_s("::ffff:10.0.0.1") > 0
    assert throttle.wait_s("::ffff:10.0.0.0") == 0


@pytest.mark.parametrize("peer", [None, "", "not:an:address", "/run/socket"])
def test_whatever_stands_for_an_address(clock: HandClock, peer: str | None) -> None:
    throttle = throttle_of(clock)
    for n in range(3):
        throttle.count(peer, b"%d" % n)
    assert throttle.wait_s(peer) > 0


def test_one_address_does_not_use_up_what_all_may_try(clock: HandClock) -> None:
    throttle = throttle_of(clock, overall_burst=5, overall_per_minute=1)
    counted = [throttle.count("a", b"%d" % n) for n in range(100)]
    assert counted == ["new"] * 3 + ["throttled"] * 97
    assert [throttle.count("b", b"%d" % n) for n in range(3)] == ["new", "new", "throttled"]
