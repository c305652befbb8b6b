"""Replicas by name: addresses that come and go, names that cannot be looked up."""

import asyncio
import contextlib
import json
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from outrider.engine.events import Finished
from outrider.gateway.engines.backends.supervised_client import ReconnectPolicy
from outrider.gateway.engines.fleet.addresses import FoundReplicas, WantedTiers, resolve
from outrider.gateway.engines.fleet.block_index import BlockIndex
from outrider.gateway.engines.fleet.cache_aware import CacheAware
from outrider.gateway.engines.fleet.discovery import DiscoveredPool
from outrider.gateway.settings.sections import EngineSettings
from outrider.gateway.settings.tree import Settings, SettingsError
from outrider.gateway.wiring.fleet import _make_replica, build_remote
from tests.gateway.engines.backends.clients import STEP_MS, becomes, collect, tokens
from tests.gateway.engines.backends.replicas import Replica
from tests.gateway.scripted_engine import make_request

NAME = "dns://engines.internal:7600"


class Names:
    """Stands for a name server."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = set(addresses)
        self.is_down = False

    async def resolve(self, entry: str, wanted: WantedTiers) -> FoundReplicas:
        assert entry == NAME
        assert not wanted  # a name starts nothing
        if self.is_down:
            raise OSError("no answer")
        return FoundReplicas(frozenset(self.addresses))


async def test_replicas_are_those_that_a_name_has_now() -> None:
    first, second = (Replica(STEP_MS).start() for _ in range(2))
    names = Names(first.endpoint)
    index = BlockIndex(max_lanes=4)
    placement = CacheAware(index)
    pool = DiscoveredPool(
        [NAME],
        partial(_make_replica, placement, None, None, ReconnectPolicy()),
        placement,
        resolve=names.resolve,
        interval_s=3600,
    )
    try:
        await pool.start()
        stream = pool.submit(make_request("a", prompt=(10,), max_tokens=300))
        events = [await anext(stream) for _ in range(3)]

        names.addresses.add(second.endpoint)
        await pool.look_up()
        await becomes(lambda: all(state.is_up for state in pool.states()))
        assert {state.name for state in pool.states()} == {first.endpoint, second.endpoint}

        names.is_down = True  # which changes nothing
        await pool.look_up()
        assert len(pool.states()) == 2

        names.is_down = False
        names.addresses = {second.endpoint}
        await pool.look_up()  # the first one drains: its answer ends there
        await becomes(lambda: [s.is_draining for s in pool.states()] == [True, False])
        assert tokens(await collect(pool, "b", prompt=(5,), max_tokens=3)) == [5, 6, 7]
        assert second.engine.num_output_tokens == 3
        events += [event async for event in stream]
        assert tokens(events) == list(range(10, 310))
        assert isinstance(events[-1], Finished)
        await becomes(lambda: len(pool.states()) == 1)

        names.addresses = {first.endpoint}  # it comes back, and the second goes
        await pool.look_up()
        await becomes(lambda: [s.name for s in pool.states() if s.is_up] == [first.endpoint])
        assert tokens(await collect(pool, "c", prompt=(1,), max_tokens=2)) == [1, 2]
    finally:
        await pool.close()
        first.stop()
        second.stop()


@pytest.mark.slow
async def test_a_killed_replica_s_answer_goes_on_at_another() -> None:
    replicas = [Replica(STEP_MS).start() for _ in range(2)]
    settings = Settings(engine=EngineSettings(replicas=tuple(each.endpoint for each in replicas)))
    pool = build_remote(settings)
    assert isinstance(pool, DiscoveredPool)
    try:
        await pool.start()
        await becomes(lambda: [state.is_up for state in pool.states()] == [True, True])
        stream = pool.submit(make_request("a", prompt=(10,), max_tokens=300))
        events = [await anext(stream) for _ in range(5)]
        (has_it,) = (each for each in replicas if each.engine.running)
        await asyncio.to_thread(has_it.stop)
        events += [event async for event in stream]
        assert tokens(events) == list(range(10, 310))
    finally:
        await pool.close()
        for each in replicas:
            each.stop()


def test_a_name_is_looked_up() -> None:
    assert "tcp://127.0.0.1:7600" in asyncio.run(resolve("dns://localhost:7600")).addresses
    with pytest.raises(OSError, match=r"."):
        asyncio.run(resolve("dns://no-such-name.invalid:7600"))


def test_a_name_needs_keys() -> None:
    settings = Settings(engine=EngineSettings(replicas=(NAME,)))
    with pytest.raises(SettingsError, match="--insecure"):
        build_remote(settings)


def page_of(count: int) -> bytes:
    """A page of so many addresses: each replica has connections, whether or not it is there."""
    return json.dumps({"replicas": [f"tcp://10.0.0.5:{port}" for port in range(count)]}).encode()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"replicas": ["tcp://10.0.0.5:7600", "tcp://[fd00::1]:7601"]}', 2),
        (b'{"replicas": []}', 0),
        (b'{"replicas": ["tcp://10.0.0.5:7600", "ipc:///tmp/x"]}', None),
        (b'{"replicas": [7600]}', None),
        (b'{"replicas": [], "startable": [["small", "large"], ["large"]]}', 0),
        (b'{"replicas": [], "startable": [["huge"]]}', None),
        (b'{"replicas": [], "startable": 7}', None),
        (b"<html>", None),
        (b"[" * 2_000_000, None),
        (page_of(1024), 1024),
        (page_of(1025), None),
        (page_of(40_000), None),
    ],
)
def test_a_page_lists_addresses(body: bytes, found: int | None) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # too long to be read
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        look_up = resolve(f"http://127.0.0.1:{server.server_port}/")
        try:
            if found is None:
                with pytest.raises(OSError, match=r"no list of addresses|at most 1024"):
                    asyncio.run(look_up)
            else:
                assert len(asyncio.run(look_up).addresses) == found
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("url", "is_safe"), [("http://127.0.0.1:7800/", True), ("http://10.0.0.5:7800/", False)]
)
def test_a_page_of_another_machine_needs_keys(url: str, is_safe: bool) -> None:
    settings = Settings(engine=EngineSettings(replicas=(url,)))
    if is_safe:
        assert isinstance(build_remote(settings), DiscoveredPool)
    else:
        with pytest.raises(SettingsError, match="--insecure"):
            build_remote(settings)
