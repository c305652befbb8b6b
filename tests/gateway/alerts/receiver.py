"""A webhook of these tests, which answers as it is told to."""

import base64
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from pydantic import SecretStr

from outrider.gateway.settings.alerts import AlertSettings

KEY = bytes(range(32))
SECRET = "whsec_" + base64.b64encode(KEY).decode()
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Receiver:
    """What it got. `answers`: for the requests to come; then 204."""

    url: str = ""
    answers: list[int | Answer] = field(default_factory=list)
    got: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def settings(self, **more: Any) -> AlertSettings:
        return AlertSettings(url=SecretStr(self.url), secret=SecretStr(SECRET), **more)

    async def take(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.paths.append(request.path)
        alert_id, moment = (request.headers[f"webhook-{name}"] for name in ("id", "timestamp"))
        mac = hmac.digest(KEY, f"{alert_id}.{moment}.".encode() + body, "sha256")
        expected = f"v1,{base64.b64encode(mac).decode()}"
        assert request.headers["webhook-signature"] == expected
        self.ids.append(alert_id)
        self.got.append(json.loads(body))
        answer = self.answers.pop(0) if self.answers else 204
        if isinstance(answer, int):
            return web.Response(status=answer, headers={"location": "/elsewhere"})
        return await answer(request)


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Listen on this machine."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    receiver.url = f"http://{host}:{port}/alerts"
    try:
        yield receiver
    finally:
        await runner.cleanup()
