"""An answer that leaves a draining replica takes its blocks along, and its text is the same."""

from contextlib import ExitStack

import pytest

from outrider.engine.core import Engine
from outrider.engine.events import Finished, PrefillDone
from outrider.engine.queue import block_exchange
from outrider.gateway.engines.backends.peer_lines import PeerLines
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.settings.tree import load_settings
from outrider.gateway.wiring.fleet import build_remote
from tests.engines import make_engine, make_request, random_prompt, serve, tiny_pair
from tests.gateway.engines.backends.clients import becomes, run, started, tokens
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import replica_of
from tests.peers import listening, peer_lines


def pool_of(addresses: list[str]) -> EnginePool:
    """As a gateway makes it of its settings."""
    flags = {"engine.replicas": addresses, "models.large": "demo", "models.small": "none"}
    pool = build_remote(load_settings(flags=flags, environ={}, config_file=None))
    assert isinstance(pool, EnginePool)
    return pool


@pytest.mark.slow
def test_an_answer_that_moves_takes_its_blocks_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_exchange, "LEAST_WAIT_S", 30.0)  # the pair is too fast to wait for
    request = make_request("r", random_prompt(400), max_tokens=100, cache_salt="tenant")
    right = serve(make_engine(tiny_pair()), [request])["r"].token_ids

    async def main(stack: ExitStack) -> None:
        lines: PeerLines = stack.enter_context(peer_lines())
        engines: dict[str, Engine] = {}
        for _ in range(2):
            engine = make_engine(tiny_pair(), peers=lines)
            engines[stack.enter_context(listening(engine))] = engine
        pool = pool_of(list(engines))
        async with started(pool):
            await becomes(lambda: [state.is_up for state in pool.states()] == [True, True])
            reader = Reader(pool, request)
            await reader.read(6)
            first = replica_of(pool, "r")
            await pool.move_off(first)
            ending = await reader.rest()
            assert isinstance(ending, Finished)
            assert tokens(reader.events) == right
            assert reader.count(PrefillDone) == 1
        (other,) = (engine for name, engine in engines.items() if name != first)
        assert other.stats().peers.num_pulled_tokens >= 400
        assert engines[first].stats().peers.num_pulled_tokens == 0

    with ExitStack() as stack:
        run(main(stack))
