"""The end of a request is reported exactly once, also after its client has left."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import pytest

from outrider.engine.errors import (
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    TierUnavailableError,
)
from outrider.engine.events import (
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    TierSwitched,
    TierWork,
    TokensEmitted,
)
from outrider.gateway.engines.backends.absent import AbsentEngine
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.backends.seen_work import SeenWork
from outrider.gateway.engines.backends.streams import EventStreams
from outrider.gateway.engines.backends.wire import Abort, Command, Submit
from outrider.verifier.params import CascadeParams, Tier
from tests.gateway import scripted_engine
from tests.gateway.engines.backends.clients import (
    STEP_MS,
    MakeClient,
    becomes,
    both,
    in_process,
    process,
    run,
    started,
)
from tests.gateway.scripted_client import Script, ScriptedClient, Step
from tests.gateway.scripted_engine import make_request

Ending = Finished | Failed | None
Stream = AsyncGenerator[EngineEvent, None]


def submit(client: EngineClient, endings: list[Ending], request_id: str, **options: Any) -> Stream:
    request = make_request(request_id, **options)
    return cast(Stream, client.submit(request, endings.append))


@both
async def test_the_last_event_is_told(make_client: MakeClient) -> None:
    endings: list[Ending] = []
    async with started(make_client("{}")) as client:
        events = [event async for event in submit(client, endings, "a", max_tokens=4)]
        assert endings == [events[-1]]
        assert endings[0] is not None
        assert endings[0].work == (
            TierWork(
                tier="large",
                num_prompt_tokens=2,
                num_computed_tokens=2,
                num_output_tokens=4,
                num_steps=4,
                num_queried_tokens=2,
            ),
        )
    assert len(endings) == 1


@both
async def test_an_aborted_request_is_told_its_work(make_client: MakeClient) -> None:
    endings: list[Ending] = []
    async with started(make_client(STEP_MS)) as client:
        stream = submit(client, endings, "a", max_tokens=10**6)
        num_seen = 0
        async for event in stream:
            if isinstance(event, TokensEmitted):
                num_seen += 1
            if num_seen == 3:
                break
        await stream.aclose()
        assert endings == []
        await becomes(lambda: bool(endings))
        (ending,) = endings
        assert isinstance(ending, Finished)
        assert ending.finish_reason == "abort"
        counted = (await client.stats()).tiers["large"].num_output_tokens
        assert ending.work[0].num_output_tokens == counted >= num_seen
        # the id is free again
        events = [event async for event in submit(client, endings, "a", max_tokens=1)]
        assert isinstance(events[-1], Finished)
    assert len(endings) == 2


@both
async def test_an_id_is_in_use_until_the_engine_has_said_its_last_word(
    make_client: MakeClient,
) -> None:
    endings: list[Ending] = []
    async with started(make_client(STEP_MS)) as client:
        stream = submit(client, endings, "a", max_tokens=10**6)
        await anext(stream)
        await stream.aclose()
        second: list[Ending] = []
        with pytest.raises(InvalidRequestError, match="in use"):
            await anext(submit(client, second, "a"))
        assert second == [None]
        await becomes(lambda: bool(endings))


@pytest.mark.slow_cases
@both
@pytest.mark.parametrize(
    "token_id", [scripted_engine.REFUSE_QUEUE_FULL, scripted_engine.REFUSE_INVALID]
)
async def test_a_refusal_is_told_as_none(make_client: MakeClient, token_id: int) -> None:
    endings: list[Ending] = []
    async with started(make_client("{}")) as client:
        with pytest.raises(EngineError):
            await anext(submit(client, endings, "a", prompt=(token_id,)))
        assert endings == [None]


@both
async def test_no_engine_is_told_as_none_and_no_iteration_not_at_all(
    make_client: MakeClient,
) -> None:
    endings: list[Ending] = []
    client = make_client("{}")
    with pytest.raises(EngineDiedError):
        await anext(submit(client, endings, "a"))
    assert endings == [None]
    async with started(client):
        submit(client, endings, "never iterated")
    assert endings == [None]


@both
async def test_closing_tells_those_that_listen_and_those_that_left(make_client: MakeClient) -> None:
    endings: list[Ending] = []
    async with started(make_client(STEP_MS)) as client:
        streams = [submit(client, endings, name, max_tokens=10**6) for name in "ab"]
        for stream in streams:
            for _ in range(3):
                await anext(stream)
        await streams[1].aclose()
        await client.close()
        rest = [event async for event in streams[0]]
        assert isinstance(rest[-1], Failed)
        told = {ending.request_id: ending for ending in endings if ending is not None}
        assert told["a"] == rest[-1]
        seen = 2 + sum(isinstance(event, TokensEmitted) for event in rest)
        assert told["a"].work[0].num_output_tokens == seen
        assert set(told) == {"a", "b"}
    assert len(endings) == 2


async def test_a_killed_engine_reports_the_work_seen_so_far() -> None:
    endings: list[Ending] = []
    async with started(process(STEP_MS, resume_within_s=0.0)) as client:
        events = []
        async for event in submit(client, endings, "a", max_tokens=10**6):
            events.append(event)
            if len(events) == 8:
                assert client.pid is not None
                os.kill(client.pid, signal.SIGKILL)
        (ending,) = endings
        assert isinstance(ending, Failed)
        num_tokens = sum(isinstance(event, TokensEmitted) for event in events)
        assert ending.work == (
            TierWork(
                tier="large",
                num_prompt_tokens=2,
                num_computed_tokens=2,
                num_output_tokens=num_tokens,
                num_steps=num_tokens,
                num_queried_tokens=2,
            ),
        )


async def test_a_crash_before_the_first_token_tells_that_nothing_was_seen() -> None:
    endings: list[Ending] = []
    async with started(in_process()) as client:
        prompt = (scripted_engine.CRASH_IN_STEP,)
        events = [event async for event in submit(client, endings, "a", prompt=prompt)]
        assert endings == events
        assert endings[0] is not None
        assert endings[0].work == ()


@both
def test_a_callback_that_raises_harms_no_request(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(ending: Ending) -> None:
        raise RuntimeError("the ledger is away")

    async def main() -> None:
        async with started(make_client("{}")) as client:
            stream = client.submit(make_request("a"), raises)
            assert isinstance([event async for event in stream][-1], Finished)
            endings: list[Ending] = []
            assert len([event async for event in submit(client, endings, "b")]) == 7
            assert len(endings) == 1
            assert client.is_ready

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "on_end failed request_id=a" in caplog.text


async def test_a_request_that_cannot_be_encoded_is_not_submitted() -> None:
    sent: list[Command] = []

    def send(command: Command) -> None:
        if isinstance(command, Submit) and command.request.request_id == "broken":
            raise OverflowError("Integer value out of range")
        sent.append(command)

    streams = EventStreams(send)
    streams.is_open = True
    endings: list[Ending] = []
    with pytest.raises(OverflowError):
        await anext(streams.follow(make_request("broken"), endings.append))
    assert (endings, sent, len(streams)) == ([None], [], 0)


async def test_late_events_of_a_closed_stream_are_counted_but_not_kept() -> None:
    sent: list[Command] = []

    streams = EventStreams(sent.append)
    streams.is_open = True
    endings: list[Ending] = []
    request = make_request("a")
    stream = streams.follow(request, endings.append)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    emitted = TokensEmitted(request_id="a", token_ids=(1, 2))
    streams.publish([emitted])
    await first
    await stream.aclose()
    assert sent == [Submit(request), Abort("a")]
    streams.publish([emitted])
    assert len(streams) == 1
    streams.died()
    streams.died()
    (ending,) = endings
    assert isinstance(ending, Failed)
    assert ending.work[0].num_output_tokens == 4


async def test_an_absent_engine_refuses_too() -> None:
    endings: list[Ending] = []
    with pytest.raises(TierUnavailableError):
        await anext(AbsentEngine().submit(make_request("a"), endings.append))
    assert endings == [None]


async def test_the_scripted_client_does_as_the_real_ones() -> None:
    script = Script(steps=[Step(token_ids=(5, 6)), Step(token_ids=(7,))])

    endings: list[Ending] = []
    client = ScriptedClient(vocab_size=10, script=lambda request: script)
    events = [event async for event in client.submit(make_request("a"), endings.append)]
    assert endings == [events[-1]]
    assert endings[0] is not None
    assert endings[0].work[0].num_output_tokens == 3
    stream = client.submit(make_request("b"), endings.append)
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    assert len(endings) == 1
    await asyncio.sleep(0)
    aborted = endings[1]
    assert isinstance(aborted, Finished)
    assert (aborted.finish_reason, aborted.work[0].num_output_tokens) == ("abort", 2)


def test_seen_work_follows_a_change_of_tier() -> None:
    seen = SeenWork(make_request("a", (1,) * 20, may_escalate=True))

    def prefill(tier: Tier, num_cached: int) -> PrefillDone:
        return PrefillDone(
            request_id="a",
            tier=tier,
            num_prompt_tokens=20,
            num_cached_tokens=num_cached,
            queue_s=0.0,
        )

    seen.add(prefill("small", 16))
    seen.add(TokensEmitted(request_id="a", token_ids=(1, 2, 3)))
    seen.add(TierSwitched(request_id="a", tier="large"))
    seen.add(prefill("large", 0))
    seen.add(
        TokensEmitted(request_id="a", token_ids=(1, 2), num_drafted_tokens=5, num_accepted_tokens=1)
    )
    stats = seen.stats()
    assert (stats.num_output_tokens, stats.num_drafted_tokens) == (2, 5)
    small, large = stats.work
    assert small == TierWork(
        tier="small",
        num_prompt_tokens=20,
        num_cached_tokens=16,
        num_computed_tokens=4,
        num_output_tokens=3,
        num_discarded_tokens=3,
        num_steps=1,
        num_queried_tokens=20,
        num_hit_tokens=16,
    )
    assert (large.num_computed_tokens, large.num_output_tokens) == (20, 2)
    assert large.num_discarded_tokens == 0


def test_a_cascades_last_prompt_token_is_decoded() -> None:
    request = replace(make_request("a", (1,) * 20), cascade=CascadeParams(alpha=0.5))
    seen = SeenWork(request)
    seen.add(
        PrefillDone(
            request_id="a", tier="large", num_prompt_tokens=20, num_cached_tokens=0, queue_s=0.0
        )
    )
    assert seen.stats().work[0].num_computed_tokens == 19
