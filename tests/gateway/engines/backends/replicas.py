"""Engine replicas of the scripted engine, each in a thread, and clients that start one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.gateway.engines.backends.connected_gateway import ListenerBounds
from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.fleet_keys import (
    FleetKeys,
    read_fleet_keys,
    write_fleet_keys,
)
from outrider.gateway.engines.backends.remote_client import RemoteEngineClient
from outrider.gateway.engines.backends.step_loop import serve_loaded
from outrider.verifier.params import Tier
from tests.gateway import scripted_engine

ANY_PORT = "tcp://127.0.0.1:0"


def make_keys(folder: Path, name: str = "fleet.key") -> FleetKeys:
    write_fleet_keys(folder / name)
    return read_fleet_keys(folder / name)


class Replica:
    """Listens from the constructor on; `start` loads the scripted engine in a thread."""

    def __init__(
        self,
        arguments: str = "{}",
        *,
        endpoint: str = ANY_PORT,
        keys: FleetKeys | None = None,
        bounds: ListenerBounds = ListenerBounds(),  # noqa: B008 - it is frozen
        tokenizers: dict[Tier, str] | None = None,
    ) -> None:
        self.listener = EngineListener(endpoint, keys, bounds)
        self.endpoint = self.listener.endpoint
        self.engine = scripted_engine.build(arguments, lambda *_: None)
        self.tokenizers: dict[Tier, str] = {"large": "a" * 64} if tokenizers is None else tokenizers
        self.exit_status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> "Replica":
        self._thread.start()
        return self

    def _run(self) -> None:
        self.listener.open(self.engine.info(), self.tokenizers)
        try:
            self.exit_status = serve_loaded(self.engine, self.listener)
        finally:
            self.listener.close()

    def stop(self, timeout_s: float = 0.0) -> None:
        """Drain it, and wait for its end."""
        if self._thread.ident is None:
            self.listener.close()
            return
        if self._thread.is_alive():
            self.listener.drain(timeout_s)
        self._thread.join()


@contextmanager
def replica(arguments: str = "{}", **options: Any) -> Iterator[Replica]:
    found = Replica(arguments, **options)
    try:
        yield found.start()
    finally:
        found.stop()


class OwnReplicaClient(RemoteEngineClient):
    """A client that starts a replica with itself, and ends it with itself."""

    def __init__(self, arguments: str = "{}") -> None:
        self.replica = Replica(arguments)
        super().__init__(self.replica.endpoint)

    async def start(self) -> None:
        self.replica.start()
        await super().start()

    async def close(self) -> None:
        await super().close()
        self.replica.stop()
