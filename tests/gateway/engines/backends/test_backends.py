"""Both clients against the scripted engine: order, aborts, refusals, death and what is left."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest
import uvloop
import zmq

from outrider.engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    TierSwitched,
    TokensEmitted,
)
from outrider.gateway.engines.backends.client import EngineClient
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineProcess, EngineRecipe
from tests.gateway import scripted_engine
from tests.gateway.engines.backends.clients import (
    BUILDER,
    STEP_MS,
    MakeClient,
    becomes,
    both,
    collect,
    in_process,
    process,
    run,
    started,
    tokens,
)
from tests.gateway.scripted_engine import ScriptedEngine, make_request

Held = AsyncGenerator[EngineEvent, None]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: a socket's has 107 bytes at most, and pytest-xdist's folders take them."""
    with tempfile.TemporaryDirectory(prefix="pytest-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """After each test: no process, thread, descriptor or scratch folder more than before."""
    monkeypatch.syspath_prepend(Path(__file__).parents[4])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    uvloop.run(asyncio.sleep(0))  # its first loop opens a pipe that it keeps
    me = psutil.Process()
    children = me.children()  # other tests' databases
    num_fds, num_threads = me.num_fds(), threading.active_count()
    yield
    assert me.children() == children
    assert list(tmp_path.glob("outrider-*")) == []
    # ZeroMQ's own threads close their descriptors a moment after the context is gone.
    assert eventually(lambda: me.num_fds() <= num_fds), "descriptors leak"
    assert eventually(lambda: threading.active_count() <= num_threads), "threads leak"


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


async def used_blocks(client: EngineClient) -> int:
    return (await client.stats()).tiers["large"].num_used_blocks


@pytest.mark.slow_cases
@both
async def test_a_stream_is_prefill_tokens_finished(make_client: MakeClient) -> None:
    async with started(make_client("{}")) as client:
        events = await collect(client, "a", prompt=(10, 20), max_tokens=4)
        assert isinstance(events[0], PrefillDone)
        assert tokens(events) == [30, 31, 32, 33]
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reason == "length"
        assert len(events) == 6
        info = await client.info()
        assert info.tiers["large"].model_id == "scripted"


@both
async def test_many_streams_at_once_stay_apart_and_in_order(make_client: MakeClient) -> None:
    async with started(make_client("{}")) as client:
        streams = await asyncio.gather(
            *(collect(client, f"r{i}", prompt=(1000 * i,), max_tokens=50) for i in range(40))
        )
        for i, events in enumerate(streams):
            assert tokens(events) == list(range(1000 * i, 1000 * i + 50))
        stats = await client.stats()
        assert stats.tiers["large"].num_output_tokens == 40 * 50
        assert stats.tiers["large"].num_used_blocks == 0


@both
async def test_abort_ends_the_stream_and_frees_the_blocks(make_client: MakeClient) -> None:
    async with started(make_client(STEP_MS)) as client:
        last = None
        async for event in client.submit(make_request("a", max_tokens=10**6)):
            last = event
            if isinstance(event, TokensEmitted):
                await client.abort("a")
        assert isinstance(last, Finished)
        assert last.finish_reason == "abort"
        assert await used_blocks(client) == 0
        await client.abort("never heard of")


@both
async def test_leaving_the_iterator_aborts_in_the_engine(make_client: MakeClient) -> None:
    async with started(make_client(STEP_MS)) as client:
        stream = client.submit(make_request("a", max_tokens=10**6))
        await anext(stream)
        assert await used_blocks(client) == 1
        await stream.aclose()  # type: ignore[attr-defined]
        # Commands keep their order, so at most one step lies between this and the abort.
        await client.stats()
        assert await used_blocks(client) == 0


@pytest.mark.slow_cases
@both
async def test_a_cancelled_consumer_aborts_in_the_engine(make_client: MakeClient) -> None:
    async with started(make_client(STEP_MS)) as client:
        task = asyncio.create_task(collect(client, "a", max_tokens=10**6))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.stats()
        assert await used_blocks(client) == 0


@both
async def test_a_stream_that_is_not_begun_costs_nothing(make_client: MakeClient) -> None:
    async with started(make_client("{}")) as client:
        client.submit(make_request("never iterated"))
        assert await used_blocks(client) == 0


@pytest.mark.slow_cases
@both
async def test_a_slow_reader_neither_stalls_nor_loses(make_client: MakeClient) -> None:
    async with started(make_client("{}")) as client:
        slow = client.submit(make_request("slow", (0,), max_tokens=3000))
        first = await anext(slow)
        assert tokens(await collect(client, "fast", max_tokens=3)) == [30, 31, 32]
        rest = [event async for event in slow]
        assert tokens([first, *rest]) == list(range(3000))


@both
async def test_switch_tier_reaches_the_engine(make_client: MakeClient) -> None:
    async with started(make_client(STEP_MS)) as client:
        events = []
        async for event in client.submit(make_request("a", max_tokens=30)):
            events.append(event)
            if tokens(events) == [30, 31, 32]:
                await client.switch_tier("a", "small")
        assert TierSwitched(request_id="a", tier="small") in events
        assert isinstance(events[-1], Finished)
        assert events[-1].tier == "small"


async def until_held(client: EngineClient, request_id: str, *prompt: int) -> Held:
    """A small answer that has ended and waits."""
    request = make_request(request_id, prompt or (10, 20), max_tokens=3, may_escalate=True)
    stream = cast(Held, client.submit(request))
    events = [await anext(stream) for _ in range(5)]
    assert tokens(events) == [sum(request.prompt_token_ids) + 500 + k for k in range(3)]
    assert events[-1] == AnswerHeld(request_id=request_id, finish_reason="length")
    return stream


@both
async def test_a_held_answer_waits_for_its_settlement(make_client: MakeClient) -> None:
    async with started(make_client("{}")) as client:
        held = await until_held(client, "a")
        assert tokens(await collect(client, "b", max_tokens=2)) == [30, 31]
        await client.keep_on_tier("a")
        (end,) = [event async for event in held]
        assert isinstance(end, Finished)
        assert (end.tier, end.finish_reason) == ("small", "length")
        await client.keep_on_tier("never heard of")
        assert await used_blocks(client) == 0


@pytest.mark.slow_cases
@both
async def test_settled_before_its_end_an_answer_is_not_held(make_client: MakeClient) -> None:
    async def settled(client: EngineClient, name: str, max_tokens: int) -> list[EngineEvent]:
        events = []
        request = make_request(name, max_tokens=max_tokens, may_escalate=True)
        async for event in client.submit(request):
            events.append(event)
            if len(events) == 3:
                await client.keep_on_tier(name)
        return events

    async with started(make_client(STEP_MS)) as client:
        # On a busy machine a short answer ends before it can be settled: then a longer one.
        for max_tokens in (20, 200, 2000):
            events = await settled(client, f"a{max_tokens}", max_tokens)
            if not any(isinstance(event, AnswerHeld) for event in events):
                break
        assert [type(event) for event in events[-2:]] == [TokensEmitted, Finished]


@pytest.mark.slow_cases
@both
async def test_a_held_answer_can_be_handed_over(make_client: MakeClient) -> None:
    async with started(make_client("{}")) as client:
        held = await until_held(client, "a")
        await client.switch_tier("a", "large")
        events = [event async for event in held]
        assert events[0] == TierSwitched(request_id="a", tier="large")
        assert tokens(events) == [30, 31, 32]
        assert isinstance(events[-1], Finished)
        assert events[-1].tier == "large"


@pytest.mark.slow_cases
@both
async def test_an_answer_can_be_kept_at_a_handover(make_client: MakeClient) -> None:
    async with started(make_client(STEP_MS)) as client:
        events = []
        async for event in client.submit(make_request("a", max_tokens=60, may_escalate=True)):
            events.append(event)
            if len(events) == 3:
                await client.switch_tier("a", "large", keeps_answer=True)
        place = events.index(TierSwitched(request_id="a", tier="large", keeps_answer=True))
        num_kept = len(tokens(events[:place]))
        assert num_kept >= 2
        assert tokens(events) == [
            30 + k + (scripted_engine.SMALL_SHIFT if k < num_kept else 0) for k in range(60)
        ]


@both
async def test_a_refused_switch_settles_the_answer(make_client: MakeClient) -> None:
    """Nothing says that it was refused, so a held answer would wait for ever."""

    async with started(make_client("{}")) as client:
        held = await until_held(client, "a", scripted_engine.REFUSE_SWITCH)
        await client.switch_tier("a", "large")
        (end,) = [event async for event in held]
        assert isinstance(end, Finished)
        assert end.tier == "small"


@both
async def test_leaving_a_held_answer_aborts_it(make_client: MakeClient) -> None:
    async with started(make_client("{}")) as client:
        held = await until_held(client, "a")
        assert await used_blocks(client) == 1
        await held.aclose()
        await client.stats()
        assert await used_blocks(client) == 0


async def test_a_thread_with_nothing_but_held_answers_does_not_step() -> None:
    engine = ScriptedEngine()

    async with started(InProcessEngineClient(lambda report: engine)) as client:
        held = await until_held(client, "a")
        num_steps = engine.num_steps
        await asyncio.sleep(0.1)
        assert engine.num_steps == num_steps
        await client.abort("a")
        assert isinstance([event async for event in held][-1], Finished)


@pytest.mark.slow_cases
@both
@pytest.mark.parametrize(
    ("token_id", "error_class", "attribute", "value"),
    [
        (scripted_engine.REFUSE_TOO_LONG, PromptTooLongError, "num_tokens", 9000),
        (scripted_engine.REFUSE_QUEUE_FULL, QueueFullError, "retry_after_s", 3.0),
        (scripted_engine.REFUSE_INVALID, InvalidRequestError, "code", "invalid_request"),
    ],
)
async def test_a_refusal_is_raised_as_the_engine_raised_it(
    make_client: MakeClient,
    token_id: int,
    error_class: type[EngineError],
    attribute: str,
    value: object,
) -> None:
    async with started(make_client("{}")) as client:
        with pytest.raises(error_class) as caught:
            await anext(client.submit(make_request("a", (token_id,))))
        assert getattr(caught.value, attribute) == value
        # The id is free again.
        assert tokens(await collect(client, "a", max_tokens=1)) == [30]


@both
async def test_an_id_in_use_is_refused_and_the_first_stream_goes_on(
    make_client: MakeClient,
) -> None:
    async with started(make_client(STEP_MS)) as client:
        first = client.submit(make_request("a", max_tokens=20))
        begun = await anext(first)
        with pytest.raises(InvalidRequestError, match="'a' is in use"):
            await collect(client, "a")
        assert len(tokens([begun, *[event async for event in first]])) == 20


@both
async def test_ready_follows_start_and_close(make_client: MakeClient) -> None:
    client = make_client("{}")
    assert not client.is_ready
    with pytest.raises(EngineDiedError):
        await collect(client, "too early")
    with pytest.raises(EngineDiedError):
        await client.stats()
    await asyncio.gather(client.start(), client.start())
    assert client.is_ready
    await client.close()
    assert not client.is_ready
    await client.close()
    with pytest.raises(EngineDiedError):
        await collect(client, "too late")


@both
async def test_closing_ends_streams_in_flight(make_client: MakeClient) -> None:
    async with started(make_client(STEP_MS)) as client:
        task = asyncio.create_task(collect(client, "a", max_tokens=10**6))
        await asyncio.sleep(0.05)
        await client.close()
        last = (await task)[-1]
        assert isinstance(last, Failed)
        assert last.code == "engine_died"
        assert "shut down" in last.message


@both
async def test_a_model_that_cannot_be_loaded_is_reported(make_client: MakeClient) -> None:
    client = make_client('{"fail": "no config.json in /models/x"}')
    with pytest.raises((EngineError, FileNotFoundError), match=r"no config\.json in /models/x"):
        await client.start()
    assert not client.is_ready


@both
async def test_start_can_be_cancelled(make_client: MakeClient) -> None:
    client = make_client('{"load_s": 0.5}')
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.25):
            await client.start()
    assert not client.is_ready


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", [InProcessEngineClient, ProcessEngineClient])
async def test_loading_progress_is_forwarded(kind: type) -> None:
    seen: list[tuple[str, float]] = []

    def on_progress(stage: str, fraction: float) -> None:
        seen.append((stage, fraction))

    client: EngineClient
    if kind is InProcessEngineClient:
        client = InProcessEngineClient(
            lambda report: scripted_engine.build("{}", report), on_progress=on_progress
        )
    else:
        recipe = EngineRecipe(builder=BUILDER, arguments="{}")
        client = ProcessEngineClient(recipe, on_progress=on_progress)
    async with started(client):
        assert seen == [("reading weights", 0.5), ("reading weights", 1.0)]


async def test_an_idle_thread_does_not_step() -> None:
    engine = ScriptedEngine()

    async with started(InProcessEngineClient(lambda report: engine)) as client:
        await collect(client, "a")
        num_idle_steps = engine.num_idle_steps
        await asyncio.sleep(0.1)
        assert engine.num_idle_steps == num_idle_steps


async def test_a_step_that_raises_takes_the_thread_down_and_says_so() -> None:
    async with started(in_process(STEP_MS)) as client:
        bystander = asyncio.create_task(collect(client, "b", max_tokens=10**6))
        await asyncio.sleep(0.02)
        events = await collect(client, "a", prompt=(scripted_engine.CRASH_IN_STEP,))
        assert isinstance(events[-1], Failed)
        assert events[-1].code == "engine_died"
        assert isinstance((await bystander)[-1], Failed)
        assert not client.is_ready
        assert "Restart the gateway" in client.not_ready_reason


async def becomes_ready(client: EngineClient, *, is_ready: bool) -> None:
    async with asyncio.timeout(10):
        while client.is_ready is not is_ready:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


async def is_replaced(client: ProcessEngineClient, pid: int | None) -> None:
    await becomes(lambda: client.is_ready and client.pid != pid)
    assert tokens(await collect(client, "after", max_tokens=2)) == [30, 31]


@pytest.mark.slow
async def test_kill_9_in_mid_stream_fails_the_stream_where_nothing_is_resumed() -> None:
    async with started(process(STEP_MS, resume_within_s=0.0)) as client:
        pid = client.pid
        assert pid is not None
        events: list[EngineEvent] = []
        async for event in client.submit(make_request("a", max_tokens=10**6)):
            events.append(event)
            if len(events) == 5:
                os.kill(pid, signal.SIGKILL)
                killed_s = time.monotonic()
        assert time.monotonic() - killed_s < 1.0
        assert isinstance(events[-1], Failed)
        assert events[-1].code == "engine_died"
        assert not client.is_ready
        with pytest.raises(EngineDiedError):
            await client.stats()
        await is_replaced(client, pid)


@pytest.mark.slow
async def test_it_is_restarted_again_and_again() -> None:
    async with started(process()) as client:
        for _ in range(3):
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await is_replaced(client, pid)


@pytest.mark.slow
@pytest.mark.parametrize("token_id", [scripted_engine.CRASH_IN_STEP, scripted_engine.EXIT_IN_STEP])
async def test_a_step_that_raises_or_exits_restarts_the_process(token_id: int) -> None:
    async with started(process()) as client:
        pid = client.pid
        events = await collect(client, "a", prompt=(token_id,))
        assert isinstance(events[-1], Failed)
        assert events[-1].code == "engine_died_twice", "it was resumed once"
        await is_replaced(client, pid)


@pytest.mark.slow
@pytest.mark.parametrize("resume_within_s", [0.0, 60.0])
async def test_a_request_that_ends_engines_ends_two_at_most(resume_within_s: float) -> None:
    async with started(process(resume_within_s=resume_within_s)) as client:
        told = []
        while not told or told[-1] != "engine_died_twice":
            pid = client.pid
            last = (await collect(client, "a", prompt=(scripted_engine.CRASH_IN_STEP,)))[-1]
            assert isinstance(last, Failed)
            told.append(last.code)
            await is_replaced(client, pid)
        assert len(told) == 1 + (resume_within_s == 0.0)
        pid = client.pid
        for _ in range(3):
            with pytest.raises(CrashSuspectError):
                await collect(client, "a", prompt=(scripted_engine.CRASH_IN_STEP,))
        await is_replaced_not(client, pid)


async def is_replaced_not(client: ProcessEngineClient, pid: int | None) -> None:
    assert tokens(await collect(client, "after", max_tokens=2)) == [30, 31]
    assert client.pid == pid


@pytest.mark.slow
async def test_a_process_that_stops_answering_is_replaced() -> None:
    async with started(process(stall_timeout_s=0.4)) as client:
        pid = client.pid
        await asyncio.sleep(0.8)
        assert client.pid == pid, "an idle engine answers its pings"
        events = await collect(client, "a", prompt=(scripted_engine.WEDGE_IN_STEP,))
        assert isinstance(events[-1], Failed)
        await is_replaced(client, pid)


async def test_an_engine_that_is_stopped_is_not_ready_until_it_goes_on() -> None:
    async with started(process(unready_after_s=0.2)) as client:
        pid = client.pid
        assert pid is not None
        assert client.is_ready
        os.kill(pid, signal.SIGSTOP)
        try:
            await becomes_ready(client, is_ready=False)
        finally:
            os.kill(pid, signal.SIGCONT)
        await becomes_ready(client, is_ready=True)
        assert client.pid == pid
        assert isinstance((await collect(client, "a"))[-1], Finished)


@pytest.mark.slow
async def test_an_engine_in_a_long_step_is_ready_all_the_time() -> None:
    async with started(process(unready_after_s=0.4)) as client:
        stream = asyncio.create_task(
            collect(client, "a", prompt=(scripted_engine.COMPUTE_IN_STEP,))
        )
        while not stream.done():
            assert client.is_ready
            await asyncio.sleep(0.01)
        assert isinstance(stream.result()[-1], Finished)


async def _asked_for_ever(client: EngineClient) -> None:
    while True:
        await client.stats()


@pytest.mark.slow
async def test_a_call_that_waits_is_answered_when_the_engine_dies() -> None:
    async with started(process(stall_timeout_s=0.4)) as client:
        stream = asyncio.create_task(collect(client, "a", prompt=(scripted_engine.WEDGE_IN_STEP,)))
        with pytest.raises(EngineDiedError):
            await _asked_for_ever(client)  # the first calls may come before it is stuck
        assert isinstance((await stream)[-1], Failed)


@pytest.mark.slow
async def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()

    async with started(process(f'{{"fail_once": "{marker}"}}')) as client:
        pid = client.pid
        assert pid is not None
        marker.unlink()
        os.kill(pid, signal.SIGKILL)
        await is_replaced(client, pid)
        assert marker.exists()


async def test_a_process_that_dies_while_loading_is_reported() -> None:
    with pytest.raises(EngineDiedError, match="exit status 9"):
        await process('{"die": true}').start()


async def test_signals_for_the_whole_group_leave_the_engine_to_its_gateway() -> None:
    async with started(process()) as client:
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert client.pid == pid
        assert tokens(await collect(client, "a", max_tokens=1)) == [30]


async def test_a_report_that_cannot_be_handled_ends_the_start() -> None:
    def fail(stage: str, fraction: float) -> None:
        raise ValueError(stage)

    recipe = EngineRecipe(builder=BUILDER, arguments="{}")
    with pytest.raises(EngineDiedError, match="its report could not be handled"):
        await ProcessEngineClient(recipe, on_progress=fail).start()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (scripted_engine.CRASH_IN_STEP, "RuntimeError: scripted crash"),
        (scripted_engine.EXIT_IN_STEP, "exit status 17"),
        (None, "signal SIGKILL; out of memory?"),
    ],
)
async def test_the_log_says_why_an_engine_ended(
    prompt: int | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(process(resume_within_s=0)) as client:
        pid = client.pid
        assert pid is not None
        if prompt is None:
            os.kill(pid, signal.SIGKILL)
        else:
            await collect(client, "a", prompt=(prompt,))
        await becomes(lambda: f"engine process ended reason={reason} restart" in caplog.text)


async def test_closing_lets_the_engine_end_by_itself() -> None:
    recipe = EngineRecipe(builder=BUILDER, arguments="{}")

    with EngineProcess(recipe) as early:
        async with started(ProcessEngineClient(recipe, first=early)):
            pass
        assert early.process.returncode == 0


@pytest.mark.slow
async def test_the_socket_is_private(tmp_path: Path) -> None:
    def modes() -> list[int]:
        return [folder.stat().st_mode & 0o777 for folder in tmp_path.glob("outrider-*")]

    async with started(process()):
        assert modes() == [0o700]


@pytest.mark.slow
def test_closing_in_the_middle_of_a_restart_leaves_nothing() -> None:
    async def main(delay_s: float) -> None:
        async with started(process('{"load_s": 0.05}')) as client:
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(delay_s)

    for delay_s in (0.0, 0.005, 0.12, 0.3):
        run(main(delay_s))


async def test_without_socket_files_it_talks_encrypted_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    has = zmq.has
    if not has("curve"):
        return  # nothing to test: such a build of libzmq has no way to do it
    monkeypatch.setattr(zmq, "has", lambda name: name != "ipc" and has(name))

    async with started(process()) as client:
        assert tokens(await collect(client, "a", max_tokens=2)) == [30, 31]


@pytest.mark.slow
@pytest.mark.uvloop
async def test_it_runs_on_uvloop() -> None:
    async with started(process()) as client:
        pid = client.pid
        assert tokens(await collect(client, "a", max_tokens=2)) == [30, 31]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await is_replaced(client, pid)


ORPHAN = """
import asyncio, sys
from outrider.gateway.engines.backends.process_client import ProcessEngineClient
from outrider.gateway.engines.backends.spawning import EngineRecipe

async def main():
    recipe = EngineRecipe(builder="tests.gateway.scripted_engine:build", arguments="{}")
    client = ProcessEngineClient(recipe)
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_engine_ends_with_its_gateway_and_cleans_up(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as gateway:
        assert gateway.stdout is not None
        engine = psutil.Process(int(gateway.stdout.readline()))
        assert list(tmp_path.glob("outrider-*"))
        gateway.kill()
    assert eventually(lambda: not engine.is_running() or engine.status() == "zombie")
    assert eventually(lambda: not list(tmp_path.glob("outrider-*")))


@pytest.mark.slow
@pytest.mark.uvloop
async def test_a_process_that_was_started_before_is_taken_over() -> None:
    recipe = EngineRecipe(builder=BUILDER, arguments=STEP_MS)

    with EngineProcess(recipe) as early:
        async with started(ProcessEngineClient(recipe, first=early)) as client:
            assert client.pid == early.process.pid
            early.process.kill()
            await is_replaced(client, early.process.pid)
        assert not early.scratch_dir.exists()


def test_a_process_that_is_not_taken_over_is_ended() -> None:
    with EngineProcess(EngineRecipe(builder=BUILDER, arguments=STEP_MS)) as early:
        assert early.scratch_dir.is_dir()
    assert early.process.returncode is not None
    assert not early.scratch_dir.exists()
