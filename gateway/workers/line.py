"""The line between a worker and its parent: calls in both directions over a pair of sockets.

Both ends are processes of one program on one machine, of which the parent started the other and
gave it its end of the pair; so values travel as pickles, as between processes of `multiprocessing`.
"""

import asyncio
import contextlib
import logging
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

logger = logging.getLogger(__name__)

Handler = Callable[[Any], Awaitable[Any]]
"""Answers one kind of call. What it raises is logged, and the caller gets `CallFailedError`."""

_LENGTH: Final = struct.Struct("<I")
_LIMIT: Final = 1 << 20


class LineClosedError(ConnectionError):
    """The other process has ended, or the line was closed."""


class CallFailedError(RuntimeError):
    """The other process could not answer a call; its log says why."""


class Line:
    """One end. `run` must be a task from the start on; it returns at the other process's end."""

    def __init__(self, end: socket.socket, handlers: Mapping[str, Handler]) -> None:
        """`handlers`: by the name of the call. The socket is closed with the line."""
        self._end = end
        self._handlers = handlers
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []  # before `run` has opened the socket
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Read until the other process ends. Calls are answered in tasks of their own."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=self._end, limit=_LIMIT)
            for message in self._unsent:
                self._writer.write(message)
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._take(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            return
        finally:
            self.close()

    async def call(self, name: str, value: Any = None, *, timeout_s: float | None = None) -> Any:
        """Return the other process's answer.

        Raises LineClosedError, CallFailedError, and TimeoutError after `timeout_s`.
        """
        if self._is_closed:
            raise LineClosedError("the other process has ended")
        self._num_calls += 1
        number = self._num_calls
        answered = self._calls[number] = asyncio.get_running_loop().create_future()
        self._write(("call", number, name, value))
        try:
            async with asyncio.timeout(timeout_s):
                return await answered
        finally:
            self._calls.pop(number, None)

    def notify(self, name: str, value: Any = None) -> None:
        """Call without waiting for an answer, or for anything; nothing happens after the end."""
        if not self._is_closed:
            self._write(("tell", 0, name, value))

    def close(self) -> None:
        """End the line; calls that wait fail. May be called again."""
        self._is_closed = True
        for answered in self._calls.values():
            if not answered.done():
                answered.set_exception(LineClosedError("the other process has ended"))
        if self._writer is not None:
            self._writer.close()
        else:
            self._end.close()

    def _take(self, message: tuple[str, int, str, Any]) -> None:
        kind, number, name, value = message
        if kind == "answer":
            answered = self._calls.get(number)
            if answered is not None and not answered.done():
                if name:
                    answered.set_exception(CallFailedError(name))
                else:
                    answered.set_result(value)
            return
        task = asyncio.create_task(self._answer(kind, number, name, value))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, kind: str, number: int, name: str, value: Any) -> None:
        failure, answer = "", None
        try:
            answer = await self._handlers[name](value)
        except Exception as error:
            logger.exception("call between the gateway's processes failed name=%s", name)
            failure = f"{name}: {type(error).__name__}"
        if kind == "call" and not self._is_closed:
            self._write(("answer", number, failure, answer))

    def _write(self, message: tuple[str, int, str, Any]) -> None:
        data = pickle.dumps(message)
        framed = _LENGTH.pack(len(data)) + data
        if self._writer is None:
            self._unsent.append(framed)
        else:
            with contextlib.suppress(ConnectionError, RuntimeError):  # its end is about to be read
                self._writer.write(framed)
