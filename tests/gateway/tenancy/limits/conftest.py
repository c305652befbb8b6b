"""Limiters on a clock that a test turns: one in memory, one on Redis."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.gateway.tenancy.limits.rigs import MemoryRig, RedisRig, Rig
from tests.services import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]


@pytest.fixture(params=["memory", "redis"])
def make_rig(request: pytest.FixtureRequest) -> Callable[..., Rig]:
    """Makes empty limiters of one kind; a test runs once with each."""
    if request.param == "memory":
        return MemoryRig
    url: str = request.getfixturevalue("redis_url")
    return partial(RedisRig, url)


@pytest.fixture
def rig(make_rig: Callable[[], Rig]) -> Rig:
    """One of them."""
    return make_rig()
