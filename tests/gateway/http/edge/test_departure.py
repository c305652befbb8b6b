"""The departure of a client: told once, also late, and not at all to work that is over."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from outrider.gateway.http.edge.departure import EXTENSION, Departure, on_departure


class Flow:
    """A connection that is not read."""

    def __init__(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


async def by_connection(flow: Flow) -> tuple[dict[str, Any], Callable[[], None], Any]:
    """Return a scope of our own connection, how the client leaves, and `receive`."""
    departure = Departure(flow.resume_reading)
    return {"extensions": {EXTENSION: departure}}, departure.happen, None


async def by_receive(flow: Flow) -> tuple[dict[str, Any], Callable[[], None], Any]:
    """The same of a server that knows nothing of it."""
    flow.is_read = True
    left = asyncio.Event()

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    return {}, left.set, receive


WAYS = pytest.mark.parametrize("way", [by_connection, by_receive])


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@WAYS
def test_the_departure_is_told_once(way: Any) -> None:
    async def leave() -> list[str]:
        flow, told = Flow(), list[str]()
        scope, happen, receive = await way(flow)
        on_departure(scope, receive, lambda: told.append("left"))
        await some_turns()
        assert flow.is_read
        assert not told
        happen()
        happen()
        await some_turns()
        return told

    assert asyncio.run(leave()) == ["left"]


@WAYS
def test_one_that_has_happened_is_told_once_the_work_waits(way: Any) -> None:
    async def leave() -> list[str]:
        told: list[str] = []
        scope, happen, receive = await way(Flow())
        happen()
        on_departure(scope, receive, lambda: told.append("left"))
        assert not told, "the work would be cancelled by itself"
        await some_turns()
        return told

    assert asyncio.run(leave()) == ["left"]


@WAYS
@pytest.mark.parametrize("is_early", [True, False])
def test_work_that_is_over_is_not_told(way: Any, is_early: bool) -> None:
    async def leave() -> list[str]:
        told: list[str] = []
        scope, happen, receive = await way(Flow())
        if is_early:
            happen()
        stop_waiting = on_departure(scope, receive, lambda: told.append("left"))
        stop_waiting()
        happen()
        await some_turns()
        return told

    assert asyncio.run(leave()) == []
