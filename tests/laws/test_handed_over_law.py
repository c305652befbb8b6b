"""A conversation whose engine is taken out goes on at another with its blocks, in the same text.

Two real engines over sockets; the gateway's index, placement and pool.
"""

from contextlib import ExitStack
from pathlib import Path

import pytest

from outrider.engine.events import Finished
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.stored_index import StoredIndex
from outrider.gateway.wiring.fleet import _make_replica
from tests.engines import make_engine, make_request, random_prompt, tiny_pair
from tests.gateway.engines.backends.clients import run, started, tokens
from tests.gateway.engines.backends.replicas import make_keys
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import all_up
from tests.gateway.waiting import until
from tests.laws.same_answers import plainly
from tests.peers import listening, peer_lines
from tests.stores import slow_down

PROMPT = random_prompt(330)


def turn(name: str, prompt: tuple[int, ...]) -> EngineRequest:
    return make_request(name, prompt, max_tokens=24, temperature=0.9, seed=3, cache_salt="tenant")


async def ask(pool: EnginePool, request: EngineRequest) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were not computed."""
    reader = Reader(pool, request)
    ending = await reader.rest()
    assert isinstance(ending, Finished)
    return tokens(reader.events), ending.stats.num_cached_tokens


def num_known(index: BlockIndex) -> int:
    index.flush()
    return index.num_pairs


@pytest.mark.slow
def test_the_next_turn_finds_the_blocks_of_an_engine_that_has_gone(tmp_path: Path) -> None:
    async def main(stack: ExitStack) -> None:
        keys, index = make_keys(tmp_path), BlockIndex(max_lanes=2)
        placement = CacheAware(index, StoredIndex(max_lanes=2))
        engines = []
        for _ in range(2):
            lines = stack.enter_context(peer_lines(keys))
            engine = make_engine(tiny_pair(), peers=lines)
            slow_down(engine)
            engines.append(engine)
        placement.note_tiers(engines[0].info().tiers)
        addresses = [stack.enter_context(listening(each, keys)) for each in engines]
        pool = EnginePool(
            [_make_replica(placement, keys, None, ReconnectPolicy(), each) for each in addresses],
            placement,
        )
        async with started(pool):
            await all_up(pool)
            first = turn("first", PROMPT)
            answer, num_cached = await ask(pool, first)
            assert num_cached == 0
            assert answer == plainly(tiny_pair(), [first])["first"]
            await until(lambda: num_known(index) >= len(PROMPT) // 16)
            (gone,) = [each.name for each in pool.states() if each.num_requests]
            left = engines[1 - addresses.index(gone)]
            await pool.remove(gone)
            assert pool.handovers.num_moved == 1
            assert left.stats().num_steps == 0, "nothing was computed for that"
            second = turn("second", (*PROMPT, *answer, *random_prompt(40, seed=1)))
            after, num_cached = await ask(pool, second)
            assert num_cached >= len(PROMPT) // 16 * 16
            assert after == plainly(tiny_pair(), [second])["second"]

    with ExitStack() as stack:
        run(main(stack))
