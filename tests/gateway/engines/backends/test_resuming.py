"""Requests whose engine is killed go on with the next: no token is lost, repeated or unpaid."""

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import psutil
import pytest

from outrider.engine.errors import EngineDiedError
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.client import PausedRequests
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe, end, spawn_waiting
from tests.gateway.engines.backends.clients import (
    BUILDER,
    becomes,
    collect,
    process,
    started,
    tokens,
)
from tests.gateway.scripted_engine import SMALL_SHIFT, make_request

STEP_MS = '{"step_s": 0.002}'
MOST = 40
Stream = AsyncGenerator[EngineEvent, None]


class Reader:
    """Reads one request to its end; `ending` is what `on_end` was told."""

    def __init__(self, client: ProcessEngineClient, request: EngineRequest) -> None:
        self.events: list[EngineEvent] = []
        self.endings: list[Finished | Failed | None] = []
        self._stream = cast(Stream, client.submit(request, self.endings.append))

    async def read(self, num_tokens: int) -> None:
        """Read until it has so many tokens."""
        while len(tokens(self.events)) < num_tokens:
            self.events.append(await anext(self._stream))

    async def until(self, kind: type[EngineEvent]) -> None:
        """Read until there is such an event."""
        while not any(isinstance(event, kind) for event in self.events):
            self.events.append(await anext(self._stream))

    async def rest(self) -> Finished | Failed:
        """Read to the end."""
        self.events += [event async for event in self._stream]
        (ending,) = self.endings
        assert ending == self.events[-1]
        assert ending is not None
        return ending

    async def leave(self) -> None:
        await self._stream.aclose()

    def count(self, kind: type[EngineEvent]) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def kill(client: ProcessEngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


async def is_down(client: ProcessEngineClient) -> None:
    await becomes(lambda: not client.is_ready)


@pytest.mark.slow_cases
@pytest.mark.parametrize("at", [0, 1, 7, MOST - 1])
async def test_an_answer_goes_on_behind_what_was_received(at: int) -> None:
    async with started(process(STEP_MS)) as client:
        reader = Reader(client, make_request("a", max_tokens=MOST))
        if at:
            await reader.read(at)
        kill(client)
        ending = await reader.rest()
        assert isinstance(ending, Finished)
        assert tokens(reader.events) == [30 + k for k in range(MOST)]
        assert reader.count(PrefillDone) == 1
        assert ending.stats.num_output_tokens == MOST
        (work,) = ending.work
        assert work.num_output_tokens == MOST
        assert work.num_prompt_tokens == 2


@pytest.mark.slow
async def test_many_answers_go_on_and_a_new_request_waits_for_the_next_engine() -> None:
    async with started(process(STEP_MS)) as client:
        readers = [
            Reader(client, make_request(f"{n}", (100 * n,), max_tokens=MOST)) for n in range(1, 9)
        ]
        for number, reader in enumerate(readers):
            await reader.read(number + 1)
        kill(client)
        await is_down(client)
        assert client.is_paused
        assert tokens(await collect(client, "meanwhile")) == [30 + k for k in range(5)]
        assert client.paused == PausedRequests(num_now=0, num_ever=1)
        assert not client.is_paused
        for number, reader in enumerate(readers, start=1):
            await reader.rest()
            assert tokens(reader.events) == [100 * number + k for k in range(MOST)]


@pytest.mark.slow
async def test_a_second_death_ends_the_request() -> None:
    async with started(process(STEP_MS)) as client:
        reader = Reader(client, make_request("a", max_tokens=10**6))
        for num_tokens in (3, 200):
            await reader.read(num_tokens)
            kill(client)
        ending = await reader.rest()
        assert isinstance(ending, Failed)
        assert ending.code == "engine_died_twice"
        seen = tokens(reader.events)
        assert seen == [30 + k for k in range(len(seen))]
        assert ending.stats is not None
        assert ending.stats.num_output_tokens == len(seen)
        assert ending.work[0].num_output_tokens == len(seen)


async def test_without_another_engine_in_time_requests_end(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    arguments = f'{{"fail_without": "{tmp_path / "there"}", "step_s": 0.002}}'
    async with started(process(arguments, resume_within_s=0.3)) as client:
        reader = Reader(client, make_request("a", max_tokens=10**6))
        await reader.read(2)
        (tmp_path / "there").unlink()
        kill(client)
        ending = await reader.rest()
        assert isinstance(ending, Failed)
        assert ending.code == "engine_died"
        assert ending.stats is not None
        assert ending.stats.num_output_tokens == len(tokens(reader.events))
        assert not client.is_paused
        with pytest.raises(EngineDiedError, match="not running"):
            await collect(client, "late")


async def test_leaving_while_no_engine_is_there_ends_the_request() -> None:
    async with started(process(STEP_MS)) as client:
        reader, other = (Reader(client, make_request(n, max_tokens=10**6)) for n in "ab")
        for one in (reader, other):
            await one.read(3)
        kill(client)
        await is_down(client)
        await reader.leave()
        (ending,) = reader.endings
        assert isinstance(ending, Finished)
        assert ending.finish_reason == "abort"
        assert ending.stats.num_output_tokens >= 3
        await client.abort("b")
        assert isinstance(await other.rest(), Finished)


async def test_what_left_before_the_death_is_not_resumed() -> None:
    async with started(process('{"step_s": 0.2}')) as client:
        reader = Reader(client, make_request("a", max_tokens=10**6))
        await reader.read(1)
        await reader.leave()  # the engine hears of it behind its step
        kill(client)
        await is_down(client)
        (ending,) = reader.endings
        assert isinstance(ending, Failed)


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_told_meanwhile", [True, False])
@pytest.mark.parametrize("action", ["keep_on_tier", "switch", "keep"])
async def test_a_watched_answer_meets_its_decision(action: str, is_told_meanwhile: bool) -> None:
    """Whether the decision comes before the death, lost with the engine, or while none is there."""

    async def decide(client: ProcessEngineClient) -> None:
        if action == "keep_on_tier":
            await client.keep_on_tier("a")
        else:
            await client.switch_tier("a", "large", keeps_answer=action == "keep")

    async with started(process('{"step_s": 0.02}')) as client:
        reader = Reader(client, make_request("a", max_tokens=8, may_escalate=True))
        await reader.read(4)
        if is_told_meanwhile:
            kill(client)
            await is_down(client)
            await decide(client)
        else:
            await decide(client)
            kill(client)
        ending = await reader.rest()
        assert isinstance(ending, Finished)
        assert reader.count(AnswerHeld) == 0
        small = [30 + SMALL_SHIFT + k for k in range(8)]
        large = [30 + k for k in range(8)]
        switches = [event for event in reader.events if isinstance(event, TierSwitched)]
        assert len(switches) == (action != "keep_on_tier")
        standing = tokens(reader.events)
        if action == "switch":
            standing = tokens(reader.events[reader.events.index(switches[0]) :])
            assert standing == large
        elif action == "keep_on_tier":
            assert standing == small
        else:
            num_small = sum(token >= 30 + SMALL_SHIFT for token in standing)
            assert num_small >= 4
            assert standing == small[:num_small] + large[num_small:]
        assert ending.stats.num_output_tokens == 8
        num_written = sum(work.num_output_tokens for work in ending.work)
        num_discarded = sum(work.num_discarded_tokens for work in ending.work)
        assert num_written - num_discarded == 8
        assert num_written == len(tokens(reader.events))


@pytest.mark.parametrize("action", ["keep_on_tier", "switch"])
async def test_an_answer_that_is_held_at_the_death_is_held_again(action: str) -> None:
    async with started(process()) as client:
        reader = Reader(client, make_request("a", max_tokens=3, may_escalate=True))
        await reader.until(AnswerHeld)
        pid = client.pid
        kill(client)
        await becomes(lambda: client.is_ready and client.pid != pid)
        await (
            client.keep_on_tier("a")
            if action == "keep_on_tier"
            else client.switch_tier("a", "large")
        )
        ending = await reader.rest()
        assert isinstance(ending, Finished)
        assert reader.count(AnswerHeld) == 1
        assert ending.stats.num_output_tokens == 3
        assert reader.count(TokensEmitted) == (3 if action == "keep_on_tier" else 6)


# ---- the process in reserve --------------------------------------------------------------------

IMPORTER = "gc:collect"


def with_reserve() -> ProcessEngineClient:
    recipe = EngineRecipe(builder=BUILDER, arguments=STEP_MS, importer=IMPORTER)
    return ProcessEngineClient(recipe)


@pytest.mark.slow
async def test_the_process_in_reserve_goes_on_with_the_answers() -> None:
    async with started(with_reserve()) as client:
        for _ in range(2):
            assert client._reserve is not None
            reserve = client._reserve.pid
            reader = Reader(client, make_request("a", max_tokens=MOST))
            await reader.read(3)
            kill(client)
            assert isinstance(await reader.rest(), Finished)
            assert tokens(reader.events) == [30 + k for k in range(MOST)]
            assert client.pid == reserve
    assert not psutil.pid_exists(reserve)
    assert client._reserve is None


@pytest.mark.slow
async def test_a_reserve_that_has_died_is_not_needed() -> None:
    async with started(with_reserve()) as client:
        assert client._reserve is not None
        client._reserve.kill()
        client._reserve.wait()
        pid = client.pid
        kill(client)
        await becomes(lambda: client.is_ready and client.pid != pid)
        assert tokens(await collect(client, "b", max_tokens=2)) == [30, 31]


def test_a_reserve_ends_with_its_gateway() -> None:
    reserve = spawn_waiting({}, IMPORTER)
    assert reserve.stdin is not None
    reserve.stdin.close()  # as the gateway's end does
    assert reserve.wait(timeout=60) == 0
    end(reserve)
