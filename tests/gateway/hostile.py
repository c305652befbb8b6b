"""An upstream server in a thread that answers by exactly the bytes that a test says."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.gateway.upstream.raw_server import CHUNKED, LAST_CHUNK, Connection, chunk, whole

JSON = "content-type: application/json\r\n"
MODELS = whole(b'{"object":"list","data":[{"id":"mock-model"}]}', headers=JSON)
END = chunk(b"data: [DONE]\n\n") + LAST_CHUNK


def piece(content: str | None = None, *, finish: str | None = None, **fields: object) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    document = {"id": "far-1", "object": "chat.completion.chunk", "choices": [choice], **fields}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def streamed(*events: bytes) -> bytes:
    """A whole response that is a stream of these events."""
    return CHUNKED + b"".join(map(chunk, events)) + END


FINE = streamed(piece("Far "), piece("away."), piece(finish="stop"))


@dataclass
class Asked:
    """A request that came."""

    headers: dict[str, str]
    body: bytes


Play = Callable[[Connection, Asked], Awaitable[None]]


@dataclass
class Hostile:
    """A hostile server: its address, its requests, and its answer: bytes, or a coroutine."""

    answer: bytes | Play = FINE
    models: bytes = MODELS
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    num_lists: int = 0
    num_open: int = 0
    """Requests that it is playing an answer to now."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, connection: Connection) -> None:
        """One connection, request by request."""
        while True:
            first, headers, body = await connection.request()
            if first.startswith("GET"):
                self.num_lists += 1
                await connection.send(self.models)
                continue
            asked = Asked(headers, body)
            self.asked.append(asked)
            self.num_open += 1
            try:
                if isinstance(self.answer, bytes):
                    await connection.send(self.answer)
                else:
                    await self.answer(connection, asked)
            finally:
                self.num_open -= 1


@contextmanager
def hostile(answer: bytes | Play = FINE) -> Iterator[Hostile]:
    """Listens as long as the context lasts."""
    server = Hostile(answer)
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await server.serve(Connection(reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has left, or the test is over
        finally:
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = loop.create_task(serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    async def main() -> None:
        listening = await asyncio.start_server(begin, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        await ended.wait()
        listening.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(5)
        loop.close()
