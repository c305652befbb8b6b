"""Conversations of a replica that drains: another one takes their blocks, and computes nothing."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from outrider.engine.cache.block_pool import PRIVATE_SALT
from outrider.engine.events import EngineInfo
from outrider.engine.request import EngineRequest
from outrider.gateway.engines.backends.in_process import InProcessEngineClient
from outrider.gateway.engines.backends.wire import BlocksReset, join_hashes
from outrider.gateway.engines.fleet import handovers
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from tests.gateway.engines.backends.clients import run, started, tokens
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import all_up
from tests.gateway.engines.fleet.test_block_sources import RoleEngine
from tests.gateway.scripted_engine import make_request
from tests.gateway.waiting import until

FIRST = tuple(range(2000))


@dataclass
class Process:
    """An engine's process, which may have said that it will end."""

    generation: str = "g"
    is_draining: bool = False


class CachingEngine(RoleEngine):
    """Has a prefix cache, as its info says."""

    def info(self) -> EngineInfo:
        info = super().info()
        tier = replace(info.tiers["large"], block_size=16, numerics="n", kv_dtype="bfloat16")
        return replace(info, tiers={"large": tier})


class Trusting(CacheAware):
    """Believes replicas, also scripted ones, which say that they had nothing."""

    def note_prefill(self, request_id: str, num_cached_tokens: int) -> None:
        self.note_end(request_id)


class Fleet:
    """Two replicas, of which the first has what it has answered in its cache, and their pool."""

    def __init__(self, **second: str) -> None:
        self.index = BlockIndex(max_lanes=2)
        self.engines = {"a": CachingEngine("both"), "b": CachingEngine("both", **second)}
        self.processes = {name: Process() for name in self.engines}
        tiers = self.engines["a"].info().tiers
        self.placement = Trusting(self.index, tiers=tiers, seed=1)
        self.pool = EnginePool(map(self._replica, self.engines), self.placement)
        self._num_asked = 0

    def _replica(self, name: str) -> EngineReplica:
        engine = self.engines[name]
        return EngineReplica(
            name,
            InProcessEngineClient(lambda _: engine),
            index_lane=self.index.add_lane(),
            process=self.processes[name],
            endpoint=f"tcp://{name}:1",
        )

    async def ask(self, prompt: tuple[int, ...], *, salt: str = "") -> tuple[int, ...]:
        """Have the first replica answer; return the conversation's text, which it has then."""
        self._num_asked += 1
        request = replace(make_request(f"r{self._num_asked}", prompt), cache_salt=salt)
        self._keep(request)
        reader = Reader(self.pool, request)
        await reader.rest()
        text = prompt + tuple(tokens(reader.events))
        self._keep(replace(request, prompt_token_ids=text))
        assert [each.prompt_token_ids for each in self.engines["a"].seen][-1] == prompt
        return text

    def _keep(self, request: EngineRequest) -> None:
        news = BlocksReset(2 * self._num_asked, join_hashes(self.placement.hashes(request)))
        self.index.clear_lane(0)
        self.index.note(0, news)

    @property
    def pulled(self) -> list[EngineRequest]:
        """What had the second replica take blocks and compute nothing."""
        seen = self.engines["b"].seen
        return [each for each in seen if each.source is not None and each.source.is_only]


def with_fleet(main: Callable[[Fleet], Awaitable[None]], **second: str) -> None:
    async def serve() -> None:
        fleet = Fleet(**second)
        async with started(fleet.pool):
            await all_up(fleet.pool)
            await main(fleet)

    run(serve())


async def has_been_looked_for(fleet: Fleet) -> None:
    """Wait until nothing of a replica that drains is left to be handed over."""
    await until(lambda: not len(fleet.pool.handovers))


def test_the_last_turn_of_a_conversation_is_handed_over_when_its_engine_stops() -> None:
    async def main(fleet: Fleet) -> None:
        text = await fleet.ask(FIRST)
        text = await fleet.ask((*text, *range(100)))
        assert len(fleet.pool.handovers) == 1
        assert not fleet.pulled
        fleet.processes["a"].is_draining = True
        await until(lambda: fleet.pool.handovers.num_moved == 1)
        (pulled,) = fleet.pulled
        assert pulled.prompt_token_ids == text
        assert pulled.sampling.max_tokens == 0
        assert pulled.source is not None
        assert pulled.source.endpoint == "tcp://a:1"
        assert len(text) * 15 // 16 < pulled.source.num_tokens <= len(text)
        assert len(fleet.pool.handovers) == 1, "it is the other one's now"

    with_fleet(main)


def test_a_replica_that_is_taken_out_is_closed_when_it_has_handed_over() -> None:
    async def main(fleet: Fleet) -> None:
        await fleet.ask(FIRST)
        await fleet.pool.remove("a")
        assert len(fleet.pulled) == fleet.pool.handovers.num_moved == 1
        assert [each.name for each in fleet.pool.states()] == ["b"]

    with_fleet(main)


@pytest.mark.parametrize("salt", [f"{PRIVATE_SALT}t", "short"])
def test_private_and_short_conversations_are_not_remembered(salt: str) -> None:
    async def main(fleet: Fleet) -> None:
        await fleet.ask(FIRST[:20] if salt == "short" else FIRST, salt=salt)
        assert len(fleet.pool.handovers) == 0

    with_fleet(main)


def test_nothing_is_handed_to_a_replica_of_another_arithmetic() -> None:
    async def main(fleet: Fleet) -> None:
        await fleet.ask(FIRST)
        fleet.processes["a"].is_draining = True
        await has_been_looked_for(fleet)
        assert not fleet.pulled

    with_fleet(main, fingerprint="other")


def test_what_a_wrong_replica_has_computed_goes_to_nobody() -> None:
    async def main(fleet: Fleet) -> None:
        await fleet.ask(FIRST)
        replica = fleet.pool._roster.replicas["a"]
        replica.distrust()
        await fleet.pool.handovers.hand_over(replica)
        assert not fleet.pulled

    with_fleet(main)


def test_what_would_be_computed_as_soon_is_not_moved() -> None:
    async def main(fleet: Fleet) -> None:
        await fleet.ask(FIRST)
        fleet.index.clear_lane(0)
        fleet.index.note(0, BlocksReset(99, b""))  # it was evicted
        fleet.processes["a"].is_draining = True
        await has_been_looked_for(fleet)
        assert not fleet.pulled

    with_fleet(main)


def test_the_oldest_conversations_are_forgotten_beyond_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handovers, "MOST_TEXTS", 2)
    monkeypatch.setattr(handovers, "MOST_BYTES", 4 * 2 * 500)

    async def main(fleet: Fleet) -> None:
        for first in range(3):
            await fleet.ask((first, *range(100)))
        assert len(fleet.pool.handovers) == 2
        await fleet.ask(tuple(range(5, 400)))
        assert len(fleet.pool.handovers) == 1

    with_fleet(main)
