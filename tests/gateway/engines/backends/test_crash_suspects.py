"""A request that was in flight at two deaths of the engine is not tried a third time."""

import asyncio
from dataclasses import replace

import pytest

from outrider.engine.errors import CrashSuspectError, EngineDiedError
from outrider.engine.events import EngineEvent, Failed, Finished, FinishReason, RequestStats
from outrider.engine.request import EngineRequest, GrammarSpec
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import EngineLostTwiceError
from outrider.gateway.engines.backends.crash_suspects import EXPIRES_S, CrashSuspects
from outrider.gateway.engines.backends.streams import EventStreams
from outrider.gateway.engines.backends.wire import Abort, Command, Submit
from tests.gateway.scripted_engine import make_request
from tests.gateway.waiting import HandClock


class Line:
    """Streams whose engine is played by hand."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.sent: list[Command] = []
        self.suspects = CrashSuspects(clock=self.clock)
        self.streams = EventStreams(self.sent.append, self.suspects)
        self.streams.is_open = True

    async def submit(self, request: EngineRequest) -> "asyncio.Task[list[EngineEvent]]":
        """The request in flight; raises where it is refused."""
        task = asyncio.create_task(collect(self.streams, request))
        await asyncio.sleep(0)
        if task.done():
            await task
        return task

    async def dies_with(self, *requests: EngineRequest) -> list[Failed]:
        """Submit, let the engine die, let another start; what each request was told."""
        running = [await self.submit(request) for request in requests]
        self.streams.died()
        self.streams.is_open = True
        last = [(await task)[-1] for task in running]
        return [event for event in last if isinstance(event, Failed)]


async def collect(streams: EventStreams, request: EngineRequest) -> list[EngineEvent]:
    return [event async for event in streams.follow(request)]


def retried(request: EngineRequest, number: int = 2) -> EngineRequest:
    """The same body once more, as clients send it: only the id and the noise are new."""
    sampling = replace(request.sampling, seed=number)
    return replace(request, request_id=f"{request.request_id}-{number}", sampling=sampling)


def codes(failed: list[Failed]) -> list[str]:
    return [event.code for event in failed]


async def test_a_request_in_flight_at_two_deaths_is_failed_and_not_taken_again() -> None:
    line, poison = Line(), make_request("p", prompt=(5, 6))
    assert codes(await line.dies_with(poison)) == ["engine_died"]
    (second,) = await line.dies_with(retried(poison))
    assert second.code == "engine_died_twice"
    assert "stopped twice" in second.message
    num_sent = len(line.sent)
    with pytest.raises(CrashSuspectError, match="refused for 600 s"):
        await line.submit(retried(poison, 3))
    assert len(line.sent) == num_sent, "it must not reach the engine"
    other = await line.submit(make_request("other", prompt=(5, 7)))
    line.streams.close("over")
    await other


async def test_it_is_taken_again_when_the_deaths_are_long_past() -> None:
    line, request = Line(), make_request("p")
    await line.dies_with(request)
    await line.dies_with(retried(request))
    line.clock.now_s += EXPIRES_S - 1.0
    with pytest.raises(CrashSuspectError, match="for 1 s"):
        await line.submit(retried(request, 3))
    line.clock.now_s += 1.0
    again = await line.submit(retried(request, 4))
    assert len(line.suspects) == 0
    line.streams.close("over")
    await again


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "another"},
        {"cache_salt": "another"},
        {"prompt_token_ids": (9, 9)},
        {"grammar": GrammarSpec(kind="json")},
    ],
)
async def test_another_tenant_prompt_or_grammar_is_another_request(
    change: dict[str, object],
) -> None:
    line, request = Line(), make_request("p")
    await line.dies_with(request)
    assert codes(await line.dies_with(replace(retried(request), **change))) == ["engine_died"]


async def test_choices_of_one_request_share_their_deaths() -> None:
    line, request = Line(), make_request("p")
    choices = [retried(request, number) for number in range(3)]
    assert codes(await line.dies_with(*choices)) == ["engine_died"] * 3
    assert codes(await line.dies_with(*choices)) == ["engine_died_twice"] * 3


def test_an_answer_that_ends_by_itself_takes_its_request_out() -> None:
    async def main(reason: FinishReason, expected: str) -> None:
        line, request = Line(), make_request("p")
        await line.dies_with(request)
        served = await line.submit(retried(request))
        finished = Finished(
            request_id="p-2",
            tier="large",
            finish_reason=reason,
            stats=RequestStats(num_prompt_tokens=2),
        )
        line.streams.publish([finished])
        assert await served == [finished]
        assert codes(await line.dies_with(retried(request, 3))) == [expected]

    asyncio.run(main("stop", "engine_died"))
    asyncio.run(main("abort", "engine_died_twice"))


async def test_a_request_without_a_client_counts_as_in_flight() -> None:
    line, request = Line(), make_request("p")
    for number in (1, 2):
        again = retried(request, number)
        stream = line.streams.follow(again)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert line.sent[-2:] == [Submit(again), Abort(again.request_id)]
        line.streams.died()
        line.streams.is_open = True
    with pytest.raises(CrashSuspectError):
        await line.submit(retried(request, 3))


async def test_a_shutdown_is_no_death() -> None:
    line, request = Line(), make_request("p")
    for number in (1, 2, 3):
        task = await line.submit(retried(request, number))
        line.streams.close("The engine was shut down.")
        line.streams.is_open = True
        assert isinstance((await task)[-1], Failed)
    assert len(line.suspects) == 0


def test_few_are_remembered_and_none_in_clear() -> None:
    clock = HandClock()
    suspects = CrashSuspects(max_remembered=3, clock=clock)
    requests = [make_request(f"r{number}", prompt=(number,)) for number in range(5)]
    for request in requests:
        suspects.note_death([request])
    assert len(suspects) == 3
    for request in requests[2:]:
        assert suspects.note_death([request]) == [True]
    assert suspects.note_death([requests[0]]) == [False]
    other = CrashSuspects(clock=clock)
    assert other._digest(requests[0]) != suspects._digest(requests[0])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CrashSuspectError(retry_after_s=42.0), "engine_died_twice"),
        (EngineLostTwiceError("It died twice.", code="engine_died_twice"), "engine_died_twice"),
    ],
)
def test_clients_are_told_not_to_retry_by_themselves(error: Exception, code: str) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.code) == (503, code)
    assert problem.headers["x-should-retry"] == "false"
    assert problem_of(EngineDiedError("once")).headers["x-should-retry"] == "true"
