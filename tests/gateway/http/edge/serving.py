"""An application behind the bounded protocol on the loopback interface, and raw sockets to it."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from outrider.gateway.http.edge.bounds import ConnectionBounds
from outrider.gateway.http.edge.edge_metrics import EdgeMetrics
from outrider.gateway.http.edge.protocol import edge_protocol
from tests.gateway.waiting import wait_for as wait_for


@dataclass(frozen=True)
class Served:
    """A running server. `registry` has its EdgeMetrics."""

    port: int
    server: uvicorn.Server
    registry: CollectorRegistry

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    @property
    def num_tasks(self) -> int:
        return len(self.server.server_state.tasks)

    def refusals(self, reason: str) -> float:
        """Return how often something was refused for this reason."""
        value = self.registry.get_sample_value("outrider_http_refusals_total", {"reason": reason})
        return value or 0.0

    def is_clean(self) -> bool:
        """Return whether no client is connected and nothing is at work."""
        return not self.num_connections and not self.num_tasks

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """A new connection."""
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(10)
        client.connect(("127.0.0.1", self.port))
        return client

    def ask(self, *parts: bytes) -> bytes:
        """Send on a new connection; all that comes back until the server closes it."""
        with self.connect() as client:
            for part in parts:
                client.sendall(part)
            return read_to_end(client)


def read_to_end(client: socket.socket) -> bytes:
    received = bytearray()
    while part := client.recv(65_536):
        received += part
    return bytes(received)


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = bytearray()
    while end not in received:
        part = client.recv(65_536)
        assert part, f"closed after {bytes(received)!r}"
        received += part
    return bytes(received)


@dataclass(frozen=True)
class Answered:
    """One HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> Any:
        """The code in the error's body."""
        return json.loads(self.body)["error"]["code"]


def answers(received: bytes) -> list[Answered]:
    """All answers that bytes hold; those have a content-length each."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")
        assert line.startswith("HTTP/1.1 "), line
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        length = int(headers.get("content-length", 0))
        found.append(Answered(int(line.split()[1]), headers, received[:length]))
        assert len(found[-1].body) == length
        received = received[length:]
    return found


def answer(received: bytes) -> Answered:
    """The only one."""
    (only,) = answers(received)
    return only


@contextmanager
def served(
    app: Any,
    bounds: ConnectionBounds,
    *,
    loop: str = "uvloop",
    drain_s: int = 3,
    clients_stay: bool = False,
    send_buffer: int | None = None,
) -> Iterator[Served]:
    """Run an application in a thread. Fails if a task is left at the end.

    Also if a connection is, unless `clients_stay`: some clients never close theirs.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listener.bind(("127.0.0.1", 0))
    registry = CollectorRegistry()
    config = uvicorn.Config(
        app,
        loop=loop,
        http=edge_protocol(bounds, EdgeMetrics(registry)),
        ws="none",
        lifespan="auto",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=4096,
        timeout_graceful_shutdown=drain_s,
    )
    server = uvicorn.Server(config)
    leaks: list[str] = []

    def on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        leaks.append(str(context))

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        await server.serve(sockets=[listener])

    def main() -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(run())

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.005)
    running = Served(listener.getsockname()[1], server, registry)
    try:
        yield running
        wait_for(lambda: not running.num_tasks if clients_stay else running.is_clean())
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
    assert not thread.is_alive()
    assert leaks == []
