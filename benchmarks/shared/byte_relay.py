"""A relay that copies bytes both ways and reads none of them: the least that any gateway adds.

What it adds is the machine's price of one process more on the way: waking it up, and two sockets.
Started by bench_upstream; answers nothing itself.
"""

import argparse
import asyncio
import signal
from collections.abc import Sequence
from typing import Final, cast

import uvloop

HOST: Final = "127.0.0.1"


class Upstream(asyncio.Protocol):
    """The connection to the server: what it sends goes to the client."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.close()


class Client(asyncio.Protocol):
    """A client's connection: what it sends goes to a connection of its own to the server."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._client: asyncio.Transport | None = None
        self._upstream: asyncio.Transport | None = None
        self._waiting: list[bytes] = []
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._client = cast(asyncio.Transport, transport)
        self._connecting = asyncio.get_running_loop().create_task(self._connect(self._client))

    async def _connect(self, client: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        upstream, _ = await loop.create_connection(
            lambda: Upstream(client), HOST, self._target_port
        )
        self._upstream = upstream
        upstream.write(b"".join(self._waiting))

    def data_received(self, data: bytes) -> None:
        if self._upstream is None:
            self._waiting.append(data)
        else:
            self._upstream.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.close()


async def _serve(port: int, target_port: int) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    server = await loop.create_server(lambda: Client(target_port), HOST, port, backlog=1024)
    await ended.wait()
    server.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Relay until the process is told to end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, required=True, help="the server's port")
    arguments = parser.parse_args(argv)
    uvloop.run(_serve(arguments.port, arguments.to))


if __name__ == "__main__":
    main()
