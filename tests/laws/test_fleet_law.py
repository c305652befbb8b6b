"""Answers of a pool are those of one engine, though its replicas end in the middle of them.

The shipped pair in float32, in engines in threads of this process, which end when so many tokens
have left them; requests of every kind run together. Behind them scripted engines, of which many
more can end. A kill -9 of processes is in test_killed_replicas_law.py.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.draft.tree_drafter import TreeDrafter
from outrider.engine.core import Engine
from outrider.engine.events import (
    AnswerHeld,
    EngineEvent,
    Failed,
    Finished,
    PrefillDone,
    TierSwitched,
    TokensEmitted,
)
from outrider.engine.passes.runner import ModelRunner
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.verifier.params import CascadeParams, Tier
from tests.engines import Answer, make_request, random_prompt, serve, tiny_pair
from tests.engines import make_engine as engine_of_pair
from tests.gateway.engines.backends.clients import started
from tests.gateway.engines.backends.clients import tokens as tokens_of
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import all_up, mortal, pool_of
from tests.gateway.scripted_engine import make_request as scripted_request
from tests.laws.options import OPTIONS
from tests.laws.test_resumed_law import LOGPROB_ERROR, requests_of
from tests.laws.test_resumed_law import engine_of as shipped_engine

OnEvents = Callable[[list[EngineEvent]], None]


class MortalCore:
    """An engine whose step raises when so many tokens have left it."""

    def __init__(self, engine: Engine, ends_after: int | None = None) -> None:
        self._engine = engine
        self._num_left: int | None = ends_after

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(
        self, on_events: OnEvents | None = None, while_busy: Callable[[], None] | None = None
    ) -> list[EngineEvent]:
        if self._num_left is not None and self._num_left <= 0:
            raise RuntimeError("told to end")
        events = self._engine.step(None, while_busy)
        if self._num_left is not None:
            self._num_left -= sum(
                len(event.token_ids) for event in events if isinstance(event, TokensEmitted)
            )
        return events


def replica(name: str, make: Callable[[], Engine], ends_after: int | None = None) -> EngineReplica:
    return EngineReplica(name, InProcessEngineClient(lambda _: MortalCore(make(), ends_after)))


async def ask_all(
    pool: EnginePool, requests: list[EngineRequest]
) -> dict[str, tuple[Reader, Finished]]:
    readers = [Reader(pool, request) for request in requests]
    endings = await asyncio.gather(*(reader.rest() for reader in readers))
    done = {}
    for request, reader, ending in zip(requests, readers, endings, strict=True):
        assert isinstance(ending, Finished), ending
        done[request.request_id] = (reader, ending)
    return done


def check_equal(done: dict[str, tuple[Reader, Finished]], right: dict[str, Answer]) -> None:
    for name, (reader, ending) in done.items():
        whole = right[name]
        assert tokens_of(reader.events) == whole.token_ids, name
        assert ending.finish_reason == whole.finish_reason
        assert reader.count(PrefillDone) == 1
        assert ending.stats.num_prompt_tokens == whole.stats.num_prompt_tokens
        assert ending.stats.num_output_tokens == len(whole.token_ids)
        # Billed is what the reader has, once.
        assert sum(work.num_output_tokens for work in ending.work) == len(whole.token_ids)
        for work in ending.work:
            assert work.num_prompt_tokens in (0, whole.stats.num_prompt_tokens)
            assert work.num_cached_tokens <= work.num_prompt_tokens
        logprobs = [
            entry
            for event in reader.events
            if isinstance(event, TokensEmitted)
            for entry in event.logprobs
        ]
        for ours, theirs in zip(logprobs, whole.logprobs, strict=True):
            assert ours.token_id == theirs.token_id
            assert abs(ours.logprob - theirs.logprob) < LOGPROB_ERROR


# ---- a tiny random pair ------------------------------------------------------------------------


def tiny() -> Engine:
    return engine_of_pair(tiny_pair())


def tiny_requests(count: int) -> list[EngineRequest]:
    """Options one after the other, on both tiers, and a cascade."""
    options = list(OPTIONS.items())
    requests = [
        make_request(
            f"{number}/{name}",
            random_prompt(12 + number, seed=number),
            tier=("large", "small")[number % 2],
            max_tokens=16,
            **{"seed": number, "temperature": 0.7 * (number % 3), **each, "logit_bias": ()},
        )
        for number, (name, each) in enumerate(options[:count])
    ]
    cascade = make_request("cascade", random_prompt(9), temperature=0.8, seed=1, max_tokens=16)
    return [*requests, replace(cascade, cascade=CascadeParams(alpha=0.3))]


@pytest.mark.slow_cases
@pytest.mark.parametrize("ends_after", [1, 40])
async def test_a_replicas_end_changes_no_answer(ends_after: int) -> None:
    requests = tiny_requests(6)
    right = serve(tiny(), requests)

    pool = EnginePool([replica("x", tiny, ends_after), replica("y", tiny)], resume_within_s=60)
    async with started(pool):
        await all_up(pool)
        done = await ask_all(pool, requests)
        assert pool.failovers["died"] >= 1
        check_equal(done, right)


async def test_answers_that_move_at_random_are_the_same() -> None:
    """A move is no death: there may be many of them."""
    requests = tiny_requests(6)
    right = serve(tiny(), requests)
    rng = random.Random(4)

    async with started(EnginePool([replica(name, tiny) for name in "xyz"])) as pool:
        await all_up(pool)
        asking = asyncio.create_task(ask_all(pool, requests))
        while not asking.done():
            await pool.move_off(rng.choice("xyz"), rng.randint(1, 3))
            await asyncio.sleep(rng.uniform(0.005, 0.03))
        check_equal(await asking, right)
        assert pool.failovers["moved"] >= 3


# ---- tiers in engines of their own -------------------------------------------------------------


def alone(tier: Tier, drafter: TreeDrafter | None = None) -> Engine:
    """An engine of one tier."""
    pair = tiny_pair()
    model = pair.large if tier == "large" else pair.small
    runner = ModelRunner(model=model, num_blocks=256, block_size=16, prefix_caching=True)
    return Engine(runners={tier: runner}, drafter=drafter)


LARGE_ENGINES: dict[str, Callable[[], Engine]] = {
    "a small model drafts": tiny,
    "text alone drafts": lambda: alone("large", TreeDrafter(runner=None)),
    "nothing drafts": lambda: alone("large"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("ends_after", [None, 30])
@pytest.mark.parametrize("drafts", LARGE_ENGINES)
async def test_an_escalated_answer_is_the_large_tiers_own(
    ends_after: int | None, drafts: str
) -> None:
    """And where anything drafts for the large model, the small answer is its first draft."""
    requests = [
        make_request(
            str(n),
            random_prompt(10 + n, seed=n),
            tier="small",
            max_tokens=14,
            may_escalate=True,
            temperature=0.4 * (n % 3),
            seed=n,
        )
        for n in range(4)
    ]
    right = serve(tiny(), [replace(r, tier="large", may_escalate=False) for r in requests])

    async def escalated(pool: EnginePool, request: EngineRequest) -> None:
        reader = Reader(pool, request)
        await reader.until(AnswerHeld)
        small = tokens_of(reader.events)
        await pool.switch_tier(request.request_id, "large")
        ending = await reader.rest()
        assert isinstance(ending, Finished)
        whole = right[request.request_id]
        (switch,) = [each for each in reader.events if isinstance(each, TierSwitched)]
        standing = reader.events[reader.events.index(switch) :]
        assert tokens_of(standing) == whole.token_ids
        assert ending.tier == "large"
        assert ending.stats.num_output_tokens == len(whole.token_ids)
        work = {each.tier: each for each in ending.work}
        assert work["small"].num_discarded_tokens == len(small)
        assert work["small"].num_output_tokens == len(small)
        assert work["large"].num_output_tokens == len(whole.token_ids)
        num_alike = next(
            (
                n
                for n, pair in enumerate(zip(small, whole.token_ids, strict=False))
                if len(set(pair)) > 1
            ),
            len(whole.token_ids),
        )
        if drafts != "nothing drafts" and num_alike > 1 and ends_after is None:
            assert ending.stats.num_reused_tokens >= 1

    small = [
        replica("s", lambda: alone("small"), ends_after),
        replica("t", lambda: alone("small")),
    ]
    pool = EnginePool([*small[: 1 + (ends_after is not None)]], resume_within_s=60)
    async with started(pool):
        await all_up(pool)
        pool.add(replica("l", LARGE_ENGINES[drafts]))
        await all_up(pool)
        await asyncio.gather(*(escalated(pool, request) for request in requests))


# ---- the shipped pair --------------------------------------------------------------------------


@pytest.mark.slow
async def test_no_option_of_a_request_keeps_it_from_going_on() -> None:
    """Grammars, penalties, log-probabilities, cascades, predictions and choices, on two tiers."""
    requests = requests_of()
    right = serve(shipped_engine(), requests)

    pool = EnginePool(
        [replica("x", shipped_engine, 60), replica("y", shipped_engine)],
        resume_within_s=60,
    )
    async with started(pool):
        await all_up(pool)
        check_equal(await ask_all(pool, requests), right)
        assert pool.failovers["died"] >= 5


# ---- many ends ---------------------------------------------------------------------------------


async def check_ends(num_ends: int, *, seed: int) -> None:
    """Let scripted engines end at random tokens, one after the other, under steady load.

    A request that two of them ended with fails, with what it had; all others are whole.
    """
    rng = random.Random(seed)
    num_asked = num_failed = num_resumed = 0
    async with pool_of("0", "1", "2", step_s=0.0005, resume_within_s=60) as (pool, engines):
        count = 3

        async def ask() -> None:
            nonlocal num_asked, num_failed, num_resumed
            num_asked += 1
            number, most = num_asked, rng.randint(1, 60)
            reader = Reader(pool, scripted_request(f"r{number}", (number,), max_tokens=most))
            ending = await reader.rest()
            seen = tokens_of(reader.events)
            assert seen == [number + k for k in range(len(seen))]
            assert ending.stats is not None
            assert ending.stats.num_output_tokens == len(seen)
            assert sum(work.num_output_tokens for work in ending.work) == len(seen)
            assert all(work.num_prompt_tokens in (0, 1) for work in ending.work)
            assert reader.count(PrefillDone) <= 1
            if isinstance(ending, Failed):
                assert ending.code == "engine_died_twice"
                num_failed += 1
            else:
                assert len(seen) == most

        async def keep_asking() -> None:
            while count < num_ends + 3:
                await ask()

        async def end_some() -> None:
            nonlocal count
            while count < num_ends + 3:
                name = rng.choice([state.name for state in pool.states() if state.is_up])
                engine = engines[name]
                engine.ends_after = engine.num_output_tokens + rng.randint(0, 400)
                while any(s.name == name and s.is_up for s in pool.states()):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                made, engines[str(count)] = mortal(str(count), step_s=0.0005)
                pool.add(made)
                count += 1
                await pool.remove(name)

        await asyncio.gather(end_some(), *(keep_asking() for _ in range(8)))
        num_resumed = pool.failovers["died"]
        assert not pool._flights
    assert num_resumed >= num_ends / 2
    assert num_failed < num_asked / 4
    print(f"ends={num_ends} requests={num_asked} resumed={num_resumed} failed={num_failed}")  # noqa: T201


def test_a_few_ends_lose_no_token() -> None:
    asyncio.run(check_ends(8, seed=1))


@pytest.mark.long
def test_a_thousand_ends_lose_no_token() -> None:
    asyncio.run(check_ends(1000, seed=2))
