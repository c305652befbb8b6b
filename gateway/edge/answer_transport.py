"""The transport that uvicorn writes answers to."""

import asyncio
from collections.abc import Callable


class AnswerTransport:
    """A transport that leaves closing to the connection, which may have to read a body first."""

    __slots__ = ("_close", "_transport")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Return whether no more can be sent."""
        return self._transport.is_closing()

    def close(self) -> None:
        """End the connection after this answer."""
        self._close()
