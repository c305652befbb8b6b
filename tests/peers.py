"""Engines in tests that send each other blocks: one listens in a thread, the other has lines."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from outrider.engine.request import BlockSource, EngineRequest
from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.fleet_keys import FleetKeys
from outrider.gateway.engines.backends.peer_lines import PeerLines
from outrider.gateway.engines.backends.step_loop import StepEngine, serve_loaded

ANY_PORT = "tcp://127.0.0.1:0"


@contextmanager
def listening(engine: StepEngine, keys: FleetKeys | None = None) -> Iterator[str]:
    """An engine's loop in a thread; yields its address."""
    with closing(EngineListener(ANY_PORT, keys, ListenerBounds())) as listener:
        listener.open(engine.info(), {})
        thread = threading.Thread(target=serve_loaded, args=(engine, listener))
        thread.start()
        try:
            yield listener.endpoint
        finally:
            listener.drain(0.0)
            thread.join()


@contextmanager
def peer_lines(keys: FleetKeys | None = None) -> Iterator[PeerLines]:
    """Lines to other engines, which end with the block."""
    with closing(PeerLines(keys)) as lines:
        yield lines


def from_source(
    requests: list[EngineRequest], endpoint: str, *, wait_s: float = 60.0
) -> list[EngineRequest]:
    """The same requests, whose prompts' blocks another engine has."""
    return [
        replace(
            each,
            source=BlockSource(
                endpoint=endpoint, num_tokens=len(each.prompt_token_ids), wait_s=wait_s
            ),
        )
        for each in requests
    ]
