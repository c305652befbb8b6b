"""One request to an ASGI application in the same event loop, and what comes back."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope


@dataclass
class Exchange:
    """The response sent so far. `leave` ends it like a client that closes its connection."""

    messages: list[Message] = field(default_factory=list)
    has_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        """The body was read already: what is left to come is the client's leaving."""
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(dict(message))

    def leave(self) -> None:
        self.has_left.set()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", False)


def http_scope(
    path: str = "/v1/chat/completions",
    *,
    method: str = "POST",
    headers: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """As uvicorn makes it."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
        "state": {},
    }


def ask(app: ASGIApp, scope: Scope) -> Exchange:
    """Call the application, in an event loop of its own."""
    exchange = Exchange()
    asyncio.run(_call(app, scope, exchange))
    return exchange


async def _call(app: ASGIApp, scope: Scope, exchange: Exchange) -> None:
    await app(scope, exchange.receive, exchange.send)
