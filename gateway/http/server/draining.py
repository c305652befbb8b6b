"""Announces the end of a gateway: load balancers must stop sending requests first."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Gauge
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import DrainingError

_READINESS: Final = frozenset(
    {("/ready", "GET"), ("/ready", "HEAD"), ("/ping", "GET"), ("/ping", "POST")}
)


@dataclass(slots=True)
class Draining:
    """Tells if the gateway is about to end; set once, when the signal arrives."""

    has_begun: bool = False


def watch_draining(draining: Draining, registry: CollectorRegistry) -> None:
    """Export it as a gauge."""
    gauge = Gauge("outrider_draining", "1 from the signal to end on.", registry=registry)
    gauge.set_function(lambda: float(draining.has_begun))


class DrainGate:
    """Wraps the whole application, and does nothing until the draining has begun.

    From then on /ready and /ping fail, and every answer asks its client to reconnect, which will
    reach another gateway. All else is answered as before: the port stays open for clients that have
    not noticed yet.
    """

    def __init__(self, app: ASGIApp, draining: Draining) -> None:
        self._app = app
        self._draining = draining

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle one request, or the application's lifespan."""
        if not self._draining.has_begun or scope["type"] != "http":
            return self._app(scope, receive, send)

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if (scope["path"], scope["method"]) in _READINESS:
            return problem_of(DrainingError()).response()(scope, receive, send_and_close)
        return self._app(scope, receive, send_and_close)
