"""Work on requests that are over: at once where it never waits, else in a task."""

import asyncio
import logging

import pytest

from outrider.gateway.tenancy.metering.tenancy import Settlements


def test_work_that_never_waits_is_done_at_once() -> None:
    done: list[int] = []

    async def book() -> None:
        done.append(1)

    settlements = Settlements()
    settlements.do(book())
    assert done == [1]
    assert not settlements.is_busy


def test_work_that_waits_after_all_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="never to wait"):
        Settlements().do(wait())


def test_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("more than is reserved")

    async def settle_twice() -> None:
        settlements = Settlements()
        settlements.do(fail())
        settlements.add(fail())
        await settlements.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(settle_twice())
    assert [record.getMessage() for record in caplog.records] == [
        "settlement failed error=ValueError"
    ] * 2
