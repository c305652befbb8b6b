"""Clients' connections on their way from the parent, which accepts them, to a worker.

The parent gives each connection to the worker that has fewest. Two other ways are worse, as answers
are streams on connections that last. With one listening socket in all workers, the kernel wakes any
of them, at little load the same one again and again. Sockets of their own (SO_REUSEPORT) spread
connections by chance and lose those that wait when a worker ends. They also hide that another
program has the port.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final, Protocol

logger = logging.getLogger(__name__)

_CONNECTION: Final = b"c"
_END: Final = b"e"
_MOST_AT_ONCE: Final = 64
_PAUSE_S: Final = 0.02  # where no worker can take a connection, or none can be opened


class Taker(Protocol):
    """A worker, as it gets connections."""

    @property
    def num_connections(self) -> int:
        """Return the connections that it has, those on their way included."""

    def give(self, connection: socket.socket) -> bool:
        """Give it a connection; False where it cannot take it now."""


def give(end: socket.socket, connection: socket.socket) -> bool:
    """Send a connection to the worker at the other end; False where there is no room, or no end."""
    try:
        socket.send_fds(end, [_CONNECTION], [connection.fileno()])
    except OSError:
        return False
    return True


def give_no_more(end: socket.socket) -> None:
    """Tell a worker, behind all its connections, that no more will come."""
    try:
        end.send(_END)
    except OSError as error:  # it has ended, or will be ended
        logger.debug("worker was not told of the port's end error=%s", error)


class Dispatcher:
    """Accepts connections while it runs, and gives each to a worker. For one event loop."""

    def __init__(self, listener: socket.socket, takers: Callable[[], Sequence[Taker]]) -> None:
        """`takers`: the workers that may get a connection now. Does not begin yet."""
        self._listener = listener
        self._takers = takers
        self._waiting: socket.socket | None = None
        self._resuming: asyncio.TimerHandle | None = None
        self._turn = 0

    def start(self) -> None:
        """Begin to accept."""
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Close the port. May be called again."""
        if self._listener.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        if self._resuming is not None:
            self._resuming.cancel()
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            if self._waiting is None:
                try:
                    self._waiting, _ = self._listener.accept()
                except BlockingIOError:
                    return
                except ConnectionError:  # the client has left already
                    continue
                except OSError as error:  # no more files
                    logger.warning("connection cannot be accepted error=%s", error)
                    self._pause()
                    return
            if not self._place(self._waiting):
                self._pause()
                return
            self._waiting.close()
            self._waiting = None

    def _place(self, connection: socket.socket) -> bool:
        """Give it to the worker that has fewest; in turn where several have as few."""
        takers = self._takers()
        self._turn += 1
        turned = [takers[(i + self._turn) % len(takers)] for i in range(len(takers))]
        return any(
            taker.give(connection)
            for taker in sorted(turned, key=lambda each: each.num_connections)
        )

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._resuming = loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self.start()
        self._accept()


class Receiver:
    """A worker's end: connects what comes to the server's protocol. For one event loop."""

    def __init__(self, end: socket.socket) -> None:
        """Store the socket, which is closed at the end."""
        self._end = end
        self._end.setblocking(False)
        self.num_received = 0
        """Connections that have come."""
        self._tasks: set[asyncio.Task[object]] = set()

    def start(
        self, make_protocol: Callable[[], asyncio.Protocol], on_end: Callable[[], None]
    ) -> None:
        """Take connections from now on; `on_end` is called when no more will come."""

        def take() -> None:
            for _ in range(_MOST_AT_ONCE):
                try:
                    kind, files, _, _ = socket.recv_fds(self._end, 1, 1)
                except BlockingIOError:
                    return
                except OSError:
                    kind, files = b"", []
                for file in files:
                    self._connect(socket.socket(fileno=file), make_protocol)
                if kind != _CONNECTION:
                    self.close()
                    on_end()
                    return

        asyncio.get_running_loop().add_reader(self._end.fileno(), take)

    def close(self) -> None:
        """Take no more. May be called again."""
        if self._end.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._end.fileno())
            self._end.close()

    def _connect(
        self, connection: socket.socket, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self.num_received += 1
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        task: asyncio.Task[object] = loop.create_task(
            loop.connect_accepted_socket(make_protocol, connection)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
