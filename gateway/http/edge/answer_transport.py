"""The transport that uvicorn writes answers to."""

import asyncio
from collections.abc import Callable
from typing import Final

_MAX_HELD_BYTES: Final = 65_536
"""Beyond it all is written at once, so that the transport can say that its client is slow."""
_MAX_HELD_PARTS: Final = 8
"""So the first of many chunks that came together need not wait until the last one is read."""


class AnswerTransport:
    """One answer's way to the connection, in few system calls.

    The head waits for the bytes behind it until the turn of the event loop ends, so most whole
    answers are one write. So do chunks within a millisecond of the write before: they came together
    from a server, or the loop was late. Closing is left to the connection, which may have to read a
    body first.
    """

    __slots__ = ("_close", "_held", "_is_head", "_loop", "_num_held", "_transport", "_written_s")

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`loop`: uvloop's, whose time counts milliseconds."""
        self._transport = transport
        self._close = close
        self._loop = loop
        self._held: list[bytes] = []
        self._num_held = 0
        self._is_head = True
        self._written_s: float | None = None

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        if self._is_head:
            self._is_head = False
            self._hold(data)
        elif self._written_s is None:  # the first bytes behind the head
            self._written_s = self._loop.time()
            self._held.append(data)
            self.flush()
        elif self._held or self._written_s == self._loop.time():  # chunks that come together
            self._hold(data)
        else:
            self._written_s = self._loop.time()
            self._transport.write(data)

    def _hold(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held >= _MAX_HELD_BYTES or len(self._held) >= _MAX_HELD_PARTS:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        held, self._held, self._num_held = self._held, [], 0
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))

    def is_closing(self) -> bool:
        """Return whether no more can be sent."""
        return self._transport.is_closing()

    def close(self) -> None:
        """End the connection after this answer."""
        self.flush()
        self._close()
