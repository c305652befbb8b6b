"""New requests that come while an engine restarts wait for the next one, within bounds."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import cast

import pytest

from outrider.engine.errors import EngineDiedError, EngineError, QueueFullError
from outrider.engine.events import Ending, EngineEvent, Finished, TokensEmitted
from outrider.engine.request import EngineRequest
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.engines.backends.client import PausedRequests
from outrider.gateway.engines.backends.crash_suspects import CrashSuspects
from outrider.gateway.engines.backends.streams import EventStreams
from outrider.gateway.engines.backends.wire import Command, Submit
from tests.gateway.engines.backends.clients import becomes, collect
from tests.gateway.engines.fleet.replicas import all_up, mortal, pool_of
from tests.gateway.scripted_engine import make_request


class Line:
    """Streams whose engine, played by hand, has died and may come back."""

    def __init__(self, max_waiting: int = 8) -> None:
        self.sent: list[Command] = []
        self.endings: list[Ending | None] = []
        self.suspects = CrashSuspects()
        self.streams = EventStreams(self.sent.append, self.suspects, max_waiting=max_waiting)
        self.streams.is_open = True

    def die(self) -> None:
        self.streams.died(resumes=True)
        self.streams.hold()

    async def submit(self, request: EngineRequest) -> "asyncio.Task[list[EngineEvent]]":
        task = asyncio.create_task(self._read(request))
        await asyncio.sleep(0)
        if task.done():
            await task
        return task

    async def _read(self, request: EngineRequest) -> list[EngineEvent]:
        stream = self.streams.follow(request, self.endings.append)
        async with asyncio.timeout(10):
            return [event async for event in stream]

    def finish(self, request_id: str) -> None:
        stats = self.streams._streams[request_id].answer._seen.stats()
        events: list[EngineEvent] = [
            TokensEmitted(request_id=request_id, token_ids=(7,)),
            Finished(request_id=request_id, tier="large", finish_reason="stop", stats=stats),
        ]
        self.streams.publish(events)


async def test_what_comes_during_a_restart_is_sent_to_the_next_engine_as_it_is() -> None:
    line = Line()
    line.die()
    request = make_request("a")
    task = await line.submit(request)
    assert line.sent == []
    assert line.streams.paused == PausedRequests(num_now=1, num_ever=1)
    line.streams.resume()
    assert line.sent == [Submit(request)]
    assert line.streams.paused == PausedRequests(num_now=0, num_ever=1)
    line.finish("a")
    (_, last) = await task
    assert isinstance(last, Finished)
    assert line.endings == [last]


async def test_the_next_engines_refusal_is_the_requests_own() -> None:
    line = Line()
    line.die()
    task = await line.submit(make_request("a"))
    line.streams.resume()
    line.streams.refuse("a", QueueFullError(num_waiting=7, retry_after_s=3.0))
    with pytest.raises(QueueFullError):
        await task
    assert line.endings == [None]


async def test_no_more_wait_than_the_next_engines_queue_takes() -> None:
    """What was in flight waits too, and takes room; another tenant still gets its share."""

    line = Line(max_waiting=2)
    await line.submit(make_request("flies"))
    line.die()
    await line.submit(make_request("a"))
    with pytest.raises(EngineDiedError, match="2 requests wait for it already") as refused:
        await line.submit(make_request("b"))
    problem = problem_of(refused.value)
    assert (problem.status, problem.headers["retry-after"]) == (503, "1")
    await line.submit(replace(make_request("c"), tenant="other"))
    assert line.streams.paused.num_now == 2
    line.streams.close("over")


@pytest.mark.parametrize("max_waiting", [0, 8])
async def test_without_an_engine_in_time_they_are_refused(max_waiting: int) -> None:
    line = Line(max_waiting)
    line.die()
    if max_waiting:
        task = await line.submit(make_request("a"))
        line.streams.give_up()
        with pytest.raises(EngineDiedError, match="not back in time"):
            await task
    with pytest.raises(EngineDiedError, match="not running"):
        await line.submit(make_request("b"))
    assert set(line.endings) == {None}
    assert not len(line.streams)


async def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    line = Line()
    line.die()
    stream = line.streams.follow(make_request("a"), line.endings.append)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert line.streams.paused.num_now == 1
    reading.cancel()
    await asyncio.wait([reading])
    await cast("AsyncGenerator[EngineEvent, None]", stream).aclose()
    line.streams.resume()
    assert line.sent == []
    (ending,) = line.endings
    assert isinstance(ending, Finished)
    assert ending.stats.num_output_tokens == 0


async def test_what_came_after_a_death_has_met_none() -> None:
    """A gateway hears of a remote engine's death only when it is connected to the next one."""

    line = Line()
    request = make_request("a")
    for number in range(3):
        line.streams.lost(resumes=True)
        line.streams.hold()
        task = await line.submit(replace(request, request_id=f"{number}"))
        line.streams.count_death()
        line.streams.resume()
        line.finish(f"{number}")
        await task
    line.suspects.check(request)


@pytest.mark.parametrize("waits_for_tiers", [True, False])
async def test_a_pool_waits_for_a_tier_that_it_lost_unless_others_may_answer(
    waits_for_tiers: bool,
) -> None:
    async with pool_of("small", tiers=("small",)) as (pool, _):
        pool.demand.waits_for_tiers = waits_for_tiers
        replica, _ = mortal("large", tiers=("large",))
        pool.add(replica)
        await all_up(pool)
        await replica.client.close()
        assert pool.is_ready
        if not waits_for_tiers:
            with pytest.raises(EngineDiedError):
                await collect(pool, "a")
            return
        waiting = asyncio.create_task(collect(pool, "a", max_tokens=2))
        await becomes(lambda: pool.paused.num_now == 1)
        pool.add(mortal("another", tiers=("large",))[0])
        assert isinstance((await waiting)[-1], Finished)
        assert pool.paused == PausedRequests(num_now=0, num_ever=1)


async def test_a_pool_without_replicas_is_paused_for_a_while() -> None:
    async with pool_of("x", resume_within_s=0.4) as (pool, _):
        assert not pool.is_paused
        await pool._roster.replicas["x"].client.close()
        assert pool.is_paused
        with pytest.raises(EngineError, match="None of 1 engine replicas"):
            await collect(pool, "a")
        assert pool.paused.num_ever == 1  # it has waited
        assert not pool.is_paused
