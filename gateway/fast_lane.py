"""The way of the requests that matter most: past the web framework, straight to their endpoint."""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import EngineError
from gateway.asgi import RequestIdMiddleware
from gateway.errors import GatewayError, handle_exception

Endpoint = Callable[[Request], Awaitable[Response]]


class FastLane:
    """An application with some POST endpoints called directly; all else goes to `app`.

    FastAPI's and Starlette's layers take a quarter of a millisecond of a request, and some
    microseconds of each event of a stream. The endpoints read their bodies themselves and are
    described in the OpenAPI document by their routes in `app`, which no request reaches.
    """

    def __init__(self, app: FastAPI, endpoints: Mapping[str, Endpoint]) -> None:
        self.app = app
        self._endpoints = endpoints
        self._lane: ASGIApp = RequestIdMiddleware(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the application's lifespan."""
        is_fast = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and scope["path"] in self._endpoints
        )
        await (self._lane if is_fast else self.app)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._endpoints[scope["path"]](request)
            await response(scope, receive, send)
        except (GatewayError, EngineError, HTTPException) as error:
            response = await handle_exception(request, error)
            await response(scope, receive, send)
