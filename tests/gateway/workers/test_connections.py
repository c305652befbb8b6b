"""Connections from the port to workers, here all in one process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from outrider.gateway.http.server.listening import listen
from outrider.gateway.workers.connections import Dispatcher, Receiver, Taker, give, give_no_more


class Greeting(asyncio.Protocol):
    """Says its worker's name, and keeps the connection."""

    def __init__(self, name: str) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._name.encode())


@dataclass
class FakeWorker:
    """Both ends of a worker, and how many connections it says that it has."""

    name: str
    num_connections: int = 0
    is_full: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.end, other = socket.socketpair()
        self.end.setblocking(False)
        self.receiver = Receiver(other)
        self.receiver.start(lambda: Greeting(self.name), self.has_ended.set)

    def give(self, connection: socket.socket) -> bool:
        if self.is_full:
            return False
        self.num_connections += 1
        return give(self.end, connection)

    def close(self) -> None:
        self.receiver.close()
        self.end.close()


@asynccontextmanager
async def port(workers: Sequence[Taker]) -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0)
    dispatcher = Dispatcher(listener, lambda: workers)
    number: int = listener.getsockname()[1]
    dispatcher.start()
    try:
        yield number
    finally:
        dispatcher.close()
        dispatcher.close()  # may be called again


async def greeted(number: int) -> tuple[str, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    return (await asyncio.wait_for(reader.read(1), 60)).decode(), writer


async def test_each_connection_goes_to_the_worker_with_fewest() -> None:
    workers = [FakeWorker("a", num_connections=3), FakeWorker("b")]
    async with port(workers) as number:
        met = [await greeted(number) for _ in range(7)]
        assert [name for name, _ in met[:3]] == ["b", "b", "b"]
        assert sorted(name for name, _ in met[3:]) == ["a", "a", "b", "b"]
        assert workers[0].receiver.num_received == 2
        for _, writer in met:
            writer.close()
    for worker in workers:
        worker.close()


async def test_a_worker_that_cannot_take_one_is_passed_over() -> None:
    dead, full, alive = FakeWorker("d"), FakeWorker("f", is_full=True), FakeWorker("a", 9)
    dead.receiver.close()
    async with port([dead, full, alive]) as number:
        name, writer = await greeted(number)
        assert name == "a"
        writer.close()
    for worker in (dead, full, alive):
        worker.close()


async def test_a_connection_waits_for_a_worker_with_room() -> None:
    worker = FakeWorker("w", is_full=True)
    async with port([worker]) as number:
        meeting = asyncio.create_task(greeted(number))
        while worker.num_connections == 0 and not meeting.done():
            worker.is_full = False
            await asyncio.sleep(0.01)
        name, writer = await meeting
        assert name == "w"
        writer.close()
    worker.close()


async def test_a_worker_gets_all_connections_before_the_end() -> None:
    worker = FakeWorker("w")
    async with port([worker]) as number:
        met = [await greeted(number) for _ in range(3)]
    give_no_more(worker.end)
    await asyncio.wait_for(worker.has_ended.wait(), 60)
    assert worker.receiver.num_received == 3
    for _, writer in met:
        writer.close()
    worker.close()
    give_no_more(worker.end)  # of one that has gone: nothing happens


async def test_the_parents_end_is_the_end() -> None:
    worker = FakeWorker("w")
    worker.end.close()
    await asyncio.wait_for(worker.has_ended.wait(), 60)
    worker.close()
