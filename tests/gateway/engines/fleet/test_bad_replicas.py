"""Replicas that are cut off and come back, that have another key, whose messages get lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from outrider.engine.cache.block_news import BlockFeed, BlockNews
from outrider.engine.cache.block_pool import BlockPool
from outrider.engine.events import Finished
from outrider.gateway.engines.backends.fleet_keys import FleetKeys, KeyPair
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.backends.wire import BlocksChanged, BlocksReset
from outrider.gateway.engines.fleet.block_index import BlockIndex, block_keys
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.pool import EnginePool
from outrider.gateway.engines.fleet.replica import EngineReplica
from outrider.gateway.wiring.fleet import _make_replica
from tests.gateway.engines.backends import replicas
from tests.gateway.engines.backends.clients import STEP_MS, becomes, collect, started, tokens
from tests.gateway.engines.backends.test_resuming import Reader
from tests.gateway.engines.fleet.replicas import all_up
from tests.gateway.scripted_engine import make_request

KEYS = FleetKeys(server=KeyPair.new(), client=KeyPair.new())


class Wire:
    """A TCP proxy to an endpoint that holds what it gets while `is_cut`, and then delivers it."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, self._port = endpoint.removeprefix("tcp://").rpartition(":")
        self._passes = asyncio.Event()
        self._passes.set()
        self.num_held = 0
        self.endpoint = ""

    def cut(self) -> None:
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Wire"]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _connect(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        far, to_far = await asyncio.open_connection(self._host, self._port)
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pump(near, to_far), self._pump(far, to_near))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while part := await source.read(2**16):
                self.num_held += not self._passes.is_set()
                await self._passes.wait()
                sink.write(part)
                await sink.drain()
        finally:
            sink.close()


@pytest.mark.slow
async def test_a_partition_that_heals_sends_nothing_twice() -> None:
    with replicas.replica(STEP_MS) as far, replicas.replica(STEP_MS) as near:
        async with Wire(far.endpoint).open() as wire:
            hasty = ReconnectPolicy(unready_after_s=0.5, stall_timeout_s=1.0, resume_within_s=0)
            calm = ReconnectPolicy(resume_within_s=0)
            pool = EnginePool(
                [EngineReplica("far", RemoteEngineClient(wire.endpoint, policy=hasty))],
                resume_within_s=100.0,
            )
            async with started(pool):
                reader = Reader(pool, make_request("a", prompt=(10,), max_tokens=1000))
                await reader.read(5)
                rest = asyncio.create_task(reader.rest())
                wire.cut()
                pool.add(EngineReplica("near", RemoteEngineClient(near.endpoint, policy=calm)))
                await becomes(lambda: bool(near.engine.running))  # it goes on there
                assert wire.num_held, "the engine wrote on behind the cut"
                wire.heal()
                assert isinstance(await rest, Finished)
                assert tokens(reader.events) == list(range(10, 1010))
                await becomes(lambda: not far.engine.running)
                await becomes(lambda: all(state.is_up for state in pool.states()))
                assert tokens(await collect(pool, "b", prompt=(7,), max_tokens=2)) == [7, 8]


async def test_a_replica_with_another_key_is_refused_by_name_and_the_others_serve() -> None:
    other = replace(KEYS, client=KeyPair.new())
    with replicas.replica(keys=KEYS) as ours, replicas.replica(keys=other) as theirs:
        pool = EnginePool(
            EngineReplica(name, RemoteEngineClient(each.endpoint, KEYS))
            for name, each in (("ours", ours), ("theirs", theirs))
        )
        async with started(pool):
            await all_up(pool)
            good, bad = pool.states()
            assert (good.is_up, bad.is_up) == (True, False)
            assert bad.name == "theirs"
            assert "both need the same key" in bad.reason
            assert tokens(await collect(pool, "a", prompt=(7,), max_tokens=2)) == [7, 8]
            assert theirs.engine.num_steps == 0


class LossyIndex(BlockIndex):
    """Never hears of one message."""

    loses_next = False
    resets = 0

    def note(self, lane: int, news: BlocksChanged | BlocksReset) -> bool:
        self.resets += isinstance(news, BlocksReset)
        if self.loses_next and isinstance(news, BlocksChanged):
            self.loses_next = False
            return True
        return super().note(lane, news)


@pytest.mark.slow
async def test_an_index_out_of_step_asks_anew_and_is_right_again() -> None:
    """A message is lost on the way; the number of the next one tells."""

    blocks = BlockPool(num_blocks=64, block_size=1)
    names = [bytes([number]) * 16 for number in range(1, 40)]

    def publish(name: bytes) -> None:
        block = blocks.allocate()
        blocks.publish(block, name)
        blocks.release([block])

    def depth(index: BlockIndex) -> int:
        index.flush()
        return int(index.depths(block_keys(names), is_dense=True)[0])

    engine = replicas.Replica(STEP_MS)
    engine.engine.blocks = BlockFeed([BlockNews(blocks)])
    index = LossyIndex(max_blocks=1000, max_lanes=2)
    placement = CacheAware(index)
    replica = _make_replica(placement, None, None, ReconnectPolicy(), engine.endpoint)
    pool = EnginePool([replica], placement)
    try:
        engine.start()
        async with started(pool):
            await becomes(lambda: index.resets == 1)
            publish(names[0])
            await collect(pool, "a")  # news are sent with steps
            await becomes(lambda: depth(index) == 1)
            index.loses_next = True
            publish(names[1])
            await collect(pool, "b")
            await becomes(lambda: not index.loses_next)
            assert depth(index) == 1, "it does not know better yet"
            publish(names[2])
            await collect(pool, "c")
            await becomes(lambda: index.resets == 2)
            await becomes(lambda: depth(index) == 3)
            assert index.num_gaps == 1
    finally:
        await asyncio.to_thread(engine.stop)
