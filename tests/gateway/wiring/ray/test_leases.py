"""A replica's address is known as long as it says that it is there."""

import inspect
import time

from outrider.gateway.wiring.ray.leases import LEASE_S, Leases


def test_leases_run_out_end_and_are_taken_over() -> None:
    now_s = 0.0
    leases = Leases(clock=lambda: now_s)
    assert not leases.knows_all  # a directory that was restarted must not say that all have gone
    leases.renew("a", "chat", "tcp://x:1")
    leases.renew("b", "code", "tcp://x:2")
    assert leases.endpoints() == ["tcp://x:1", "tcp://x:2"]
    assert leases.endpoints("code") == ["tcp://x:2"]
    leases.end("a")
    leases.end("a")
    assert leases.endpoints() == ["tcp://x:2"]
    now_s = LEASE_S / 2
    assert leases.knows_all
    leases.renew("b", "code", "tcp://x:3")  # restarted on another port
    now_s = 1.2 * LEASE_S
    assert leases.endpoints() == ["tcp://x:3"]
    now_s = 2 * LEASE_S
    assert leases.endpoints() == []


def test_leases_do_not_follow_the_machines_clocks() -> None:
    """A replica sends no time, and the directory measures with a clock that is never set."""
    assert list(inspect.signature(Leases.renew).parameters) == [
        "self",
        "name",
        "engine",
        "endpoint",
    ]
    assert inspect.signature(Leases).parameters["clock"].default is time.monotonic
