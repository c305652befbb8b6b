"""A pool over connections to engine replicas: one is stopped in the middle of answers."""

import asyncio
from contextlib import ExitStack

import pytest

from outrider.engine.events import Failed, Finished, PrefillDone
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from tests.gateway.engines.backends.clients import becomes, collect, run, started, tokens
from tests.gateway.engines.backends.replicas import Replica as ListeningReplica
from tests.gateway.engines.backends.replicas import replica
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import all_up
from tests.gateway.scripted_engine import CRASH_IN_STEP, make_request

MOST = 60


@pytest.mark.slow_cases
@pytest.mark.parametrize("has_time", [True, False])
def test_answers_of_a_stopped_replica_end_there_or_go_on_at_the_other(has_time: bool) -> None:
    async def main(stack: ExitStack) -> None:
        listening = [stack.enter_context(replica('{"step_s": 0.004}')) for _ in range(2)]
        policy = ReconnectPolicy(resume_within_s=0)
        pool = EnginePool(
            EngineReplica(each.endpoint, RemoteEngineClient(each.endpoint, policy=policy))
            for each in listening
        )
        async with started(pool):
            await all_up(pool)
            readers = [
                Reader(pool, make_request(str(n), (100 * n,), max_tokens=MOST)) for n in range(1, 7)
            ]
            await asyncio.gather(*(reader.read(5) for reader in readers))
            rest = asyncio.gather(*(reader.rest() for reader in readers))
            await asyncio.to_thread(listening[0].stop, 60.0 if has_time else 0.0)
            for number, ending in enumerate(await rest, 1):
                reader = readers[number - 1]
                assert isinstance(ending, Finished)
                assert tokens(reader.events) == [100 * number + k for k in range(MOST)]
                assert reader.count(PrefillDone) == 1
                assert ending.stats.num_output_tokens == MOST
                assert sum(work.num_output_tokens for work in ending.work) == MOST
            assert (pool.failovers["died"] > 0) != has_time
            await becomes(lambda: [state.is_up for state in pool.states()] == [False, True])

    with ExitStack() as stack:
        run(main(stack))


@pytest.mark.slow
def test_a_connection_that_is_cut_is_no_death_of_its_replica() -> None:
    async def main(stack: ExitStack) -> None:
        listening = stack.enter_context(replica('{"step_s": 0.002}'))
        client = RemoteEngineClient(listening.endpoint, policy=ReconnectPolicy(resume_within_s=0))
        pool = EnginePool([EngineReplica("x", client, process=client)], resume_within_s=60)
        async with started(pool):
            await all_up(pool)
            reader = Reader(pool, make_request("a", (100,), max_tokens=400))
            for number in range(1, 5):
                await reader.read(20 * number)
                link = client._link
                assert link is not None
                link.kill("the line was cut")
                await becomes(lambda link=link: client._link is not link and client.is_ready)  # type: ignore[misc]
            ending = await reader.rest()
            assert isinstance(ending, Finished)
            assert tokens(reader.events) == [100 + k for k in range(400)]
            assert pool.failovers["died"] == 4
            again = Reader(pool, make_request("b", (100,), max_tokens=3))
            assert isinstance(await again.rest(), Finished), "nothing is held against it"

    with ExitStack() as stack:
        run(main(stack))


@pytest.mark.slow
async def test_a_replica_that_comes_back_as_another_process_has_died() -> None:
    policy, step_s = ReconnectPolicy(resume_within_s=0), '{"step_s": 0.002}'
    engine = ListeningReplica(step_s).start()
    client = RemoteEngineClient(engine.endpoint, policy=policy)
    pool = EnginePool([EngineReplica("x", client, process=client)], resume_within_s=60)
    async with started(pool):
        await all_up(pool)
        reader = Reader(pool, make_request("a", (100,), max_tokens=10**5))
        for number in range(1, 3):
            await reader.read(20 * number)
            async with started(RemoteEngineClient(engine.endpoint, policy=policy)) as other:
                await collect(other, "crash", prompt=(CRASH_IN_STEP,))
            await asyncio.to_thread(engine.stop)
            engine = ListeningReplica(step_s, endpoint=engine.endpoint).start()
            await becomes(lambda: client.is_ready)
        ending = await reader.rest()
        assert isinstance(ending, Failed)
        assert ending.code == "engine_died_twice"
    await asyncio.to_thread(engine.stop)
