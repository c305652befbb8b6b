"""TCP proxies that cut HTTP answers behind an event of one's choice."""

import asyncio
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

How = Literal["reset", "close", "stall"]

# So long the other side has to take in what it was sent before a cut. Nothing depends on whether it
# does: what has not arrived was not delivered.
_BREATH_S = 0.005


@dataclass
class Cut:
    """One answer is cut behind so many events; 0: before anything of it was passed on.

    reset: the connection breaks. close: it ends, as if the server had nothing more to say. stall:
    nothing more comes. `pauses`: what came before has time to arrive.
    """

    after_events: int
    how: How = "reset"
    pauses: bool = True
    is_done: bool = False
    """Whether the answer had so many events, and was cut."""


@dataclass
class Sent:
    """A request as it went to a server. `server` is that one's place among them."""

    server: int
    path: str
    document: dict[str, Any]


@dataclass
class Proxies:
    """One in front of each server. `cuts` are for the next answers in turn, whoever gives them."""

    urls: list[str] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    cuts: deque[Cut] = field(default_factory=deque)
    num_awaited: int = 0
    """No server gets a request before so many have come, to whichever."""
    refuses: bool = False
    """New connections, and requests on old ones, are cut at once."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)

    def cut(self, *cuts: Cut) -> None:
        """Do so from the next request on; forget what was sent before."""
        self.num_awaited = 0
        self.sent.clear()
        self.cuts.clear()
        self.cuts.extend(cuts)

    async def note(self, sent: Sent) -> None:
        """Keep what was sent."""
        async with self._came:
            self.sent.append(sent)
            self._came.notify_all()

    async def others(self) -> None:
        """Wait until as many requests have come as are awaited."""
        async with self._came:
            await self._came.wait_for(lambda: len(self.sent) >= self.num_awaited)


@contextmanager
def cutting_proxies(servers: Sequence[str]) -> Iterator[Proxies]:
    """Proxies for servers (http://host:port), in a thread of their own."""
    proxies = Proxies()
    loop = asyncio.new_event_loop()
    started, ending = threading.Event(), asyncio.Event()

    async def main() -> None:
        listeners = []
        for place, url in enumerate(servers):
            host, port = url.removeprefix("http://").split(":")
            connection = _Connections(proxies, place, (host, int(port)))
            listener = await asyncio.start_server(connection.serve, "127.0.0.1", 0)
            listeners.append(listener)
            proxies.urls.append(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        started.set()
        await ending.wait()
        for listener in listeners:
            listener.close()
        proxies.is_over.set()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, name="proxies")
    thread.start()
    assert started.wait(60)
    try:
        yield proxies
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(5)


class _Connections:
    """The connections to one server. Each carries one request after another."""

    def __init__(self, proxies: Proxies, place: int, target: tuple[str, int]) -> None:
        self._proxies = proxies
        self._place = place
        self._target = target

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its begin to its end."""
        if self._proxies.refuses:
            _reset(writer)
            return
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        answer = _Answer()
        ways = [
            asyncio.ensure_future(self._requests(reader, server_writer, answer)),
            asyncio.ensure_future(_answers(server_reader, writer, answer)),
            asyncio.ensure_future(self._proxies.is_over.wait()),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            server_writer.close()
            if answer.is_broken:
                _reset(writer)
            writer.close()
            for side in (writer, server_writer):
                with suppress(OSError):
                    await side.wait_closed()

    async def _requests(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, answer: "_Answer"
    ) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().lower().split("\r\n")
                sizes = [line.split(":")[1] for line in lines if line.startswith("content-length:")]
                body = await reader.readexactly(int(sizes[0]) if sizes else 0)
                if self._proxies.refuses:
                    answer.is_broken = True
                    return
                if head.startswith(b"POST"):
                    path = head.split()[1].decode()
                    await self._proxies.note(Sent(self._place, path, json.loads(body)))
                    cuts = self._proxies.cuts
                    answer.begin(cuts.popleft() if cuts else None)
                    await self._proxies.others()
                server.write(head + body)
                await server.drain()


class _Answer:
    """The part of an answer that has come so far, and the place of the cut."""

    def __init__(self) -> None:
        self._cut: Cut | None = None
        self._num_events = 0
        self._last = b""
        self.is_broken = False

    def begin(self, cut: Cut | None) -> None:
        self._cut, self._num_events, self._last = cut, 0, b""

    def take(self, data: bytes) -> tuple[bytes, Cut | None]:
        """Return what of it may be passed on, and the cut that comes behind."""
        cut = self._cut
        if cut is None:
            return data, None
        if not cut.after_events:
            return b"", cut
        for end in range(1, len(data) + 1):
            if (self._last + data[:end])[-2:] == b"\n\n":
                self._num_events += 1
                if self._num_events == cut.after_events:
                    return data[:end], cut
        self._last = data[-1:]
        return data, None


async def _answers(
    server: asyncio.StreamReader, client: asyncio.StreamWriter, answer: _Answer
) -> None:
    while data := await server.read(65_536):
        passed_on, cut = answer.take(data)
        client.write(passed_on)
        with suppress(ConnectionError):
            await client.drain()
        if cut is None:
            continue
        cut.is_done = True
        if cut.pauses:
            await asyncio.sleep(_BREATH_S)
        answer.is_broken = cut.how == "reset"
        if cut.how == "stall":
            await asyncio.Event().wait()  # until the client leaves
        return


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
