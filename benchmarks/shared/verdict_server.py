"""A service of checks that passes everything at once; bench_checks starts it."""

import argparse
import asyncio
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import httptools
import uvloop

HOST: Final = "127.0.0.1"
_BODY: Final = b'{"verdict":"pass"}'
_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)


def passing(question: Mapping[str, Any]) -> None:
    """Pass it: the same as a function."""
    del question


class Connection(asyncio.Protocol):
    """A kept-alive connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Answer a whole request."""
        if self._transport is not None:
            self._transport.write(_ANSWER)


async def serve(port: int) -> None:
    """Serve until the process is told to end."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    server = await loop.create_server(Connection, HOST, port)
    await over.wait()
    server.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Read the port and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args(argv).port))


if __name__ == "__main__":
    main()
