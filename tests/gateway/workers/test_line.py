"""Calls between two processes of a gateway, here in one."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.gateway.workers.line import CallFailedError, Handler, Line, LineClosedError


@asynccontextmanager
async def lines(there: Mapping[str, Handler]) -> AsyncIterator[tuple[Line, Line]]:
    ends = socket.socketpair()
    here, other = Line(ends[0], {}), Line(ends[1], there)
    tasks = [asyncio.create_task(each.run()) for each in (here, other)]
    try:
        yield here, other
    finally:
        for line in (here, other):
            line.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)


async def test_calls_are_answered_whatever_their_order_and_size() -> None:
    may_end = asyncio.Event()

    async def slow(value: str) -> str:
        await may_end.wait()
        return value

    async def size(value: bytes) -> int:
        return len(value)

    async with lines({"slow": slow, "size": size}) as (here, _):
        waiting = asyncio.create_task(here.call("slow", "late"))
        assert await here.call("size", b"x" * 3_000_000) == 3_000_000
        may_end.set()
        assert await waiting == "late"


def test_a_failure_is_told_without_its_words_and_the_line_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(_: object) -> None:
        raise ValueError("secret")

    async def echo(value: Any) -> Any:
        return value

    async def main() -> None:
        async with lines({"fails": fails, "echo": echo}) as (here, _):
            with pytest.raises(CallFailedError, match="fails: ValueError") as caught:
                await here.call("fails")
            assert "secret" not in str(caught.value)
            with pytest.raises(CallFailedError, match="unknown: KeyError"):
                await here.call("unknown")
            assert await here.call("echo", [1]) == [1]

    asyncio.run(main())
    assert "call between the gateway's processes failed name=fails" in caplog.text


async def test_calls_end_with_the_other_process() -> None:
    async def never(_: object) -> None:
        await asyncio.Event().wait()

    async with lines({"never": never}) as (here, other):
        with pytest.raises(TimeoutError):
            await here.call("never", timeout_s=0.01)
        waiting = asyncio.create_task(here.call("never"))
        await asyncio.sleep(0)
        other.close()
        with pytest.raises(LineClosedError):
            await waiting
        with pytest.raises(LineClosedError):
            await here.call("never")
        here.notify("never")  # nothing happens


async def test_what_is_told_is_heard_in_order() -> None:
    heard: list[int] = []
    is_all = asyncio.Event()

    async def number(value: int) -> None:
        heard.append(value)
        if value == 99:
            is_all.set()

    async with lines({"number": number}) as (here, _):
        for value in range(100):  # the first ones before the line is open
            here.notify("number", value)
        await asyncio.wait_for(is_all.wait(), 60)
        assert heard == list(range(100))
