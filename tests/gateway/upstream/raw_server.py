"""A server on the loopback interface that sends exactly the bytes that a test says."""

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer with its length, behind which the connection stays open."""
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


class Connection:
    """One connection that a client has opened."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        """Read a request: its first line, headers and body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, value in (x.split(":", 1) for x in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return first, headers, body

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def client_left(self) -> None:
        """Wait until the client has closed its side."""
        with suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass

    def reset(self) -> None:
        """Close with a RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass
class RawServer:
    """A raw server: its address, and the number of its connections."""

    port: int = 0
    scheme: str = "http"
    num_connections: int = 0
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/v1"


Handler = Callable[[Connection, RawServer], Awaitable[None]]


@asynccontextmanager
async def raw_server(
    handler: Handler, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[RawServer]:
    """Serve every connection by `handler`; what is left at the end is cancelled."""
    server = RawServer(scheme="http" if tls is None else "https")
    running: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.num_connections += 1
        writers.append(writer)
        try:
            await handler(Connection(reader, writer), server)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has left, or the test is over
        finally:
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    listening = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for writer in writers:
            with suppress(OSError):
                await writer.wait_closed()


def answering(*answers: bytes) -> Handler:
    """Answer the requests of each connection by these bytes, the last one for ever."""

    async def handler(connection: Connection, server: RawServer) -> None:
        number = 0
        while True:
            server.requests.append(await connection.request())
            await connection.send(answers[min(number, len(answers) - 1)])
            number += 1

    return handler
