"""A pool answers as one engine does, whatever becomes of its replicas."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    InvalidRequestError,
    PromptTooLongError,
    TierUnavailableError,
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
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica, OtherModelsError
from outrider.gateway.engines.fleet.roster import NoReplicaLeftError
from outrider.verifier.params import CascadeParams
from tests.gateway.engines.backends.clients import becomes, collect, started, tokens
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import MortalEngine, all_up, mortal, pool_of, replica_of
from tests.gateway.scripted_engine import (
    REFUSE_QUEUE_FULL,
    REFUSE_TOO_LONG,
    SMALL_SHIFT,
    make_request,
)

MOST = 40
LARGE = [30 + k for k in range(MOST)]
SMALL = [30 + SMALL_SHIFT + k for k in range(MOST)]

Main = Coroutine[Any, Any, None]


def check_whole(reader: Reader, ending: Finished | Failed, most: int = MOST) -> None:
    assert isinstance(ending, Finished)
    assert ending.request_id == "a"
    assert {event.request_id for event in reader.events} == {"a"}
    assert tokens(reader.events) == LARGE[:most]
    assert reader.count(PrefillDone) == 1
    assert ending.stats.num_output_tokens == most
    assert ending.stats.num_prompt_tokens == 2
    (work,) = ending.work
    assert work.num_output_tokens == most
    assert work.num_prompt_tokens == 2


async def test_requests_are_spread_and_answered_by_all() -> None:
    async with pool_of("x", "y", "z") as (pool, _):
        readers = [
            Reader(pool, make_request(str(n), (100 * n,), max_tokens=20)) for n in range(1, 10)
        ]
        await asyncio.gather(*(reader.rest() for reader in readers))
        for n, reader in enumerate(readers, 1):
            assert tokens(reader.events) == [100 * n + k for k in range(20)]
        assert {state.num_requests for state in pool.states()} == {3}
        stats = await pool.stats()
        assert stats.tiers["large"].num_output_tokens == 180
        assert stats.tiers["large"].num_blocks == 300
        assert not pool._flights
        assert all(state.num_in_flight == 0 for state in pool.states())


@pytest.mark.parametrize("at", [0, 1, 7, MOST - 1])
async def test_another_replica_goes_on_behind_what_was_received(at: int) -> None:
    async with pool_of("x") as (pool, engines):
        engines["x"].ends_after = at
        reader = Reader(pool, make_request("a", max_tokens=MOST))
        reading = asyncio.create_task(reader.rest())
        await becomes(lambda: not pool.is_ready)
        pool.add(mortal("y")[0])
        check_whole(reader, await reading)
        assert pool.failovers == {"died": 1}


async def test_a_request_that_two_replicas_died_with_is_failed() -> None:
    async with pool_of("x", "y", "z") as (pool, engines):
        reader = Reader(pool, make_request("a", max_tokens=10**6))
        for num_tokens in (3, 30):
            await reader.read(num_tokens)
            engines[replica_of(pool, "a")].is_doomed = True
        ending = await reader.rest()
        assert isinstance(ending, Failed)
        assert ending.code == "engine_died_twice"
        assert ending.stats is not None
        assert ending.stats.num_output_tokens == len(tokens(reader.events))
        assert tokens(await collect(pool, "b", prompt=(7,), max_tokens=2)) == [7, 8]


async def test_a_request_waits_for_a_replica_of_its_numerics() -> None:
    """It is not given to other arithmetic, and goes on as soon as its own is back."""

    async with pool_of("x", numerics="one") as (pool, engines):
        reader = Reader(pool, make_request("a", max_tokens=MOST))
        await reader.read(3)
        pool.add(mortal("other", numerics="two")[0])
        await all_up(pool)
        engines["x"].is_doomed = True
        reading = asyncio.create_task(reader.rest())
        await becomes(lambda: pool._flights["a"].replica is None)
        assert tokens(await collect(pool, "b", max_tokens=2)) == [30, 31]
        assert not reading.done()
        pool.add(mortal("y", numerics="one")[0])
        check_whole(reader, await reading)


class ReadsPrompts(MortalEngine):
    """Ends behind its first step, of which comes out that prompts were read, or nothing."""

    def __init__(self, *, tells: bool) -> None:
        super().__init__(step_s=0.001, numerics="one")
        self.tells = tells

    def step(self, *args: Any) -> list[EngineEvent]:
        events = super().step(*args)
        self.is_doomed = bool(events)
        return [event for event in events if self.tells and isinstance(event, PrefillDone)]


@pytest.mark.parametrize("tells", [False, True])
async def test_who_was_told_an_arithmetic_gets_no_text_of_another(*, tells: bool) -> None:
    """The answer's fingerprint, and its receipt, name the one that read the prompt."""
    engine = ReadsPrompts(tells=tells)
    replica = EngineReplica("x", InProcessEngineClient(lambda _: engine))
    async with started(EnginePool([replica], resume_within_s=5.0)) as pool:
        await all_up(pool)
        reading = asyncio.create_task((reader := Reader(pool, make_request("a"))).rest())
        await becomes(lambda: pool.failovers["died"] == 1)
        pool.add(mortal("other", numerics="two")[0])
        await all_up(pool)
        if tells:
            assert tokens(await collect(pool, "b", max_tokens=2)) == [30, 31]
            assert not reading.done()
            pool.add(mortal("y", numerics="one")[0])
        ending = await reading
        assert isinstance(ending, Finished)
        served = {state.name: state.num_requests for state in pool.states()}
        assert served["y" if tells else "other"] == 1
        assert reader.count(PrefillDone) == 1


async def test_without_a_replica_in_time_a_request_ends() -> None:
    async with pool_of("x", resume_within_s=0.1) as (pool, engines):
        reader = Reader(pool, make_request("a", max_tokens=MOST))
        await reader.read(3)
        engines["x"].is_doomed = True
        ending = await reader.rest()
        assert isinstance(ending, Failed)
        assert ending.code == "engine_died"
        assert not pool.is_ready
        with pytest.raises(EngineDiedError, match="None of 1 engine replicas"):
            await collect(pool, "b")
        with pytest.raises(EngineDiedError):
            await pool.stats()


async def test_leaving_while_no_replica_is_there_ends_the_request() -> None:
    async with pool_of("x") as (pool, engines):
        left, aborted = (Reader(pool, make_request(n, max_tokens=10**6)) for n in "ab")
        for reader in (left, aborted):
            await reader.read(3)
        engines["x"].is_doomed = True
        reading = [asyncio.create_task(reader.rest()) for reader in (left, aborted)]
        await becomes(lambda: all(f.replica is None for f in pool._flights.values()))
        reading[0].cancel()
        await asyncio.gather(reading[0], return_exceptions=True)
        await pool.abort("b")
        ending = await reading[1]
        assert isinstance(ending, Finished)
        assert [type(e) for e in left.endings] == [Finished]
        assert not pool._flights


async def test_leaving_early_tells_the_last_word_once() -> None:
    async with pool_of("x") as (pool, engines):
        reader = Reader(pool, make_request("a", max_tokens=10**6))
        await reader.read(3)
        await reader.leave()
        await becomes(lambda: bool(reader.endings))
        (ending,) = reader.endings
        assert isinstance(ending, Finished)
        assert ending.finish_reason == "abort"
        assert ending.stats.num_output_tokens >= 3
        await becomes(lambda: not engines["x"].running)
        assert not pool._flights


async def test_what_replicas_refuse_is_refused() -> None:
    async with pool_of("x", "y") as (pool, _):
        for prompt, kind in (
            ((REFUSE_TOO_LONG,), PromptTooLongError),
            ((REFUSE_QUEUE_FULL,), EngineError),
        ):
            endings: list[Finished | Failed | None] = []
            with pytest.raises(kind):
                async for _ in pool.submit(make_request("a", prompt), endings.append):
                    pass
            assert endings == [None]
        one = Reader(pool, make_request("a", max_tokens=10**6))
        await one.read(1)
        with pytest.raises(InvalidRequestError, match="in use"):
            await collect(pool, "a")
        await one.leave()


# ---- replicas come and go ----------------------------------------------------------------------


async def test_a_removed_replica_ends_its_answers_first() -> None:
    async with pool_of("x", drain_timeout_s=60) as (pool, engines):
        reader = Reader(pool, make_request("a", max_tokens=MOST))
        await reader.read(3)
        pool.add(mortal("y")[0])
        await all_up(pool)
        removing = asyncio.create_task(pool.remove("x"))
        await becomes(lambda: pool.states()[0].is_draining)
        assert tokens(await collect(pool, "b", max_tokens=2)) == [30, 31]
        assert pool.states()[1].num_requests == 1
        check_whole(reader, await reader.rest())
        await removing
        assert [state.name for state in pool.states()] == ["y"]
        assert not pool.failovers
        assert engines["x"].num_output_tokens == MOST
        stats = await pool.stats()
        assert stats.tiers["large"].num_output_tokens == MOST + 2  # those of x still count
        await pool.remove("nothing")


async def test_answers_move_off_a_replica_whose_time_is_over() -> None:
    async with pool_of("x", drain_timeout_s=0) as (pool, engines):
        reader = Reader(pool, make_request("a", max_tokens=MOST))
        await reader.read(3)
        pool.add(mortal("y")[0])
        await all_up(pool)
        removing = asyncio.create_task(pool.remove("x"))
        check_whole(reader, await reader.rest())
        await removing
        assert pool.failovers == {"moved": 1}
        assert not engines["x"].running


async def test_a_replica_of_another_model_is_refused_by_name() -> None:
    async with pool_of("x", model_id="llama") as (pool, _):
        pool.add(mortal("y", model_id="qwen")[0])
        await all_up(pool)
        state = pool.states()[1]
        assert not state.is_up
        assert "replica y has qwen" in state.reason
        assert "replica x has llama" in state.reason
        with pytest.raises(ValueError, match="replica y already"):
            pool.add(mortal("y")[0])
        await collect(pool, "a")
        assert (pool.states()[0].num_requests, pool.states()[1].num_requests) == (1, 0)


async def test_a_pool_of_which_nothing_can_be_used_does_not_start() -> None:
    replica, _ = mortal("x")
    replica.refusal = OtherModelsError("of another kind")
    pool = EnginePool([replica])

    async def refused() -> None:
        raise OtherModelsError("of another kind")

    replica.client.start = refused  # type: ignore[method-assign]
    with pytest.raises(OtherModelsError):
        await pool.start()
    await pool.close()


async def test_closing_ends_what_is_in_flight() -> None:
    async with pool_of("x", "y") as (pool, _):
        reader = Reader(pool, make_request("a", max_tokens=10**6))
        await reader.read(3)
        await pool.close()
        ending = await reader.rest()
        assert isinstance(ending, Failed)
        assert ending.code == "engine_died"


# ---- tiers in different replicas ---------------------------------------------------------------


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_together", [True, False])
@pytest.mark.parametrize("action", ["keep_on_tier", "switch", "keep"])
@pytest.mark.parametrize("dies", ["no", "before", "after"])
async def test_a_watched_answer_meets_its_decision(
    action: str, is_together: bool, dies: str
) -> None:
    """Whether both tiers are in one engine or not, and whenever the small one's engine dies."""
    all_tiers = [("small", "large")] * 2 if is_together else [("small",), ("small",), ("large",)]

    made = {str(n): mortal(str(n), tiers=tiers, step_s=0.005) for n, tiers in enumerate(all_tiers)}
    pool = EnginePool([replica for replica, _ in made.values()], resume_within_s=5)
    async with started(pool):
        await all_up(pool)
        assert set((await pool.info()).tiers) == {"small", "large"}
        reader = Reader(pool, make_request("a", max_tokens=MOST, may_escalate=True))
        await reader.read(4)
        first = made[replica_of(pool, "a")][1]
        if dies == "before":
            first.is_doomed = True
        if action == "keep_on_tier":
            await pool.keep_on_tier("a")
        else:
            await pool.switch_tier("a", "large", keeps_answer=action == "keep")
        if dies == "after":
            first.is_doomed = True
        ending = await reader.rest()
        check_decided(reader, ending, action)


def check_decided(reader: Reader, ending: Finished | Failed, action: str) -> None:
    assert isinstance(ending, Finished)
    assert reader.count(AnswerHeld) == 0
    assert sum(isinstance(event, Finished) for event in reader.events) == 1
    switches = [event for event in reader.events if isinstance(event, TierSwitched)]
    assert len(switches) == (action != "keep_on_tier")
    standing = tokens(reader.events)
    if action == "switch":
        standing = tokens(reader.events[reader.events.index(switches[0]) :])
        assert standing == LARGE
    elif action == "keep_on_tier":
        assert standing == SMALL
    else:
        num_small = sum(token >= 30 + SMALL_SHIFT for token in standing)
        assert num_small >= 4
        assert standing == SMALL[:num_small] + LARGE[num_small:]
    assert ending.tier == ("small" if action == "keep_on_tier" else "large")
    assert ending.stats.num_output_tokens == MOST
    num_written = sum(work.num_output_tokens for work in ending.work)
    assert num_written - sum(work.num_discarded_tokens for work in ending.work) == MOST
    assert num_written == len(tokens(reader.events))


@pytest.mark.parametrize("action", ["keep_on_tier", "switch", "keep"])
async def test_an_answer_that_is_held_is_settled_or_goes_to_another_replica(action: str) -> None:
    small, _ = mortal("s", tiers=("small",))
    large, engine = mortal("l", tiers=("large",))
    async with started(EnginePool([small, large])) as pool:
        await all_up(pool)
        reader = Reader(pool, make_request("a", max_tokens=3, may_escalate=True))
        await reader.until(AnswerHeld)
        if action == "keep_on_tier":
            await pool.keep_on_tier("a")
        else:
            await pool.switch_tier("a", "large", keeps_answer=action == "keep")
        ending = await reader.rest()
        assert isinstance(ending, Finished)
        assert reader.count(TokensEmitted) == (6 if action == "switch" else 3)
        assert ending.tier == ("large" if action == "switch" else "small")
        assert (engine.num_steps > 0) == (action == "switch")


@pytest.mark.parametrize("is_there", [True, False])
async def test_where_the_other_tier_cannot_take_it_the_answer_stays(is_there: bool) -> None:
    """As it does inside one engine: no event, and it ends by itself."""

    async def refusing() -> Any:
        raise PromptTooLongError(num_tokens=1, max_tokens=2, max_context=2)
        yield

    small, _ = mortal("s", tiers=("small",))
    large, _ = mortal("l", tiers=("small",) if not is_there else ("large",))
    async with started(EnginePool([small, large])) as pool:
        await all_up(pool)
        if is_there:

            def refuse(*_: object) -> Any:
                return refusing()

            large.client.submit = refuse  # type: ignore[method-assign]
        reader = Reader(pool, make_request("a", max_tokens=MOST, may_escalate=True))
        await reader.read(4)
        await pool.switch_tier("a", "large")
        ending = await reader.rest()
        assert tokens(reader.events) == SMALL
        assert reader.count(TierSwitched) == reader.count(AnswerHeld) == 0
        assert ending.stats is not None
        assert ending.stats.num_output_tokens == MOST


async def test_a_cascade_needs_both_tiers_in_one_replica() -> None:
    pair, engine = mortal("p", tiers=("small", "large"))
    others = [mortal(tier, tiers=(tier,))[0] for tier in ("small", "large")]
    request = replace(make_request("a"), cascade=CascadeParams(alpha=0.2))
    async with started(EnginePool(others)) as pool:
        await all_up(pool)
        with pytest.raises(TierUnavailableError, match="in one engine, as a cascade needs"):
            async for _ in pool.submit(request):
                pass
        pool.add(pair)
        await all_up(pool)
        assert isinstance(await Reader(pool, request).rest(), Finished)
        assert engine.num_output_tokens == 5


async def test_a_retry_of_what_two_replicas_died_with_is_refused() -> None:
    """Choices of one prompt that one replica had count once; what is served is not suspected."""

    async with pool_of("x") as (pool, engines):
        choices = [Reader(pool, make_request(n, max_tokens=10**6)) for n in "abc"]
        for reader in choices:
            await reader.read(2)
        pool.add(mortal("y")[0])
        await all_up(pool)
        engines["x"].is_doomed = True
        for name, reader in zip("abc", choices, strict=True):
            while replica_of(pool, name) != "y":  # what came of the other may wait to be read
                await reader.read(len(tokens(reader.events)) + 1)
            # The one that is read first has been counted with the others.
            await reader.read(len(tokens(reader.events)) + 20)
        await pool.remove("x")
        (replica,) = pool._roster.replicas.values()
        pool.add(mortal("z")[0])
        await all_up(pool)
        await replica.client.close()  # as a death is
        for reader in choices:
            ending = await reader.rest()
            assert isinstance(ending, Failed)
            assert ending.code == "engine_died_twice"
        with pytest.raises(CrashSuspectError):
            await collect(pool, "again", max_tokens=2)
        assert len(await collect(pool, "other", prompt=(7,), max_tokens=2)) == 4


async def test_a_group_drains_and_is_admitted_again() -> None:
    """A new version beside the old one: its answers end there, and new requests go on."""

    async with pool_of("old", "older", numerics="one") as (pool, _):
        reader = Reader(pool, make_request("a", max_tokens=MOST))
        await reader.read(3)
        (old,) = {state.group for state in pool.states()}
        with pytest.raises(NoReplicaLeftError, match="start one first"):
            pool.drain(old)
        pool.add(mortal("new", numerics="two")[0])
        await all_up(pool)
        assert sorted(pool.drain(old)) == ["old", "older"]
        pool.add(mortal("late", numerics="one")[0])  # as one that is started again
        await all_up(pool)
        for number in range(6):
            await collect(pool, f"b{number}", max_tokens=2)
        check_whole(reader, await reader.rest())
        served = {state.name: state.num_requests for state in pool.states()}
        assert served["new"] == 6
        assert served["old"] + served["older"] == 1
        assert served["late"] == 0
        assert pool.readmit(old) == ["old", "older", "late"]
        assert {state.is_draining for state in pool.states()} == {False}
