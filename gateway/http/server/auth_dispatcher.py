"""The entrance: a request gets its id and its principal, and goes straight to its endpoint."""

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.engine.errors import EngineError
from outrider.gateway.contract.errors.http import (
    OPENAI_BODIES,
    Problem,
    ProblemBodies,
    problem_of,
    report_problem,
)
from outrider.gateway.contract.errors.tree import (
    AuthenticationError,
    GatewayError,
    IssuerUnavailableError,
)
from outrider.gateway.http.edge.foreign_pages import ForeignPages
from outrider.gateway.http.server.paths import meant_path
from outrider.gateway.http.server.request_headers import HeadedRequest, RequestHeaders
from outrider.gateway.http.server.veil import without_tiers
from outrider.gateway.http.sign_in.sessions import Sessions
from outrider.gateway.telemetry.log_context import begin_log_context
from outrider.gateway.tenancy.keys.keys import ANONYMOUS, Principal

EndpointHandler = Callable[[Request], Awaitable[Response]]
ProblemPage = Callable[[Problem], Response]

_ID: Final = b"x-request-id"
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
RECEIPT_KEYS_PATH: Final = "/.well-known/outrider-keys"
FREE_PATHS: Final = frozenset({"/health", "/ready", "/ping", RECEIPT_KEYS_PATH})
"""Paths for load balancers and for whoever checks a receipt, who have no keys."""


class Authenticate(Protocol):
    """Finds the principal of a request."""

    def __call__(
        self, authorization: str | None, api_key: str | None, peer: str | None
    ) -> Principal:
        """Return the key's principal. Raises AuthenticationError or RateLimitError."""


class AuthDispatcher:
    """An application with some POST endpoints called directly; all else goes to `app`.

    Every response has an `x-request-id`: the client's own, if it is sane, else a new one. Every
    request but those for the free paths has a principal (`principal_of`), or is refused.

    FastAPI's and Starlette's layers take a quarter of a millisecond of a request, and some
    microseconds of each event of a stream. The direct endpoints read their bodies themselves and
    are described in the OpenAPI document by their routes in `app`, which no request reaches.
    """

    def __init__(
        self,
        app: FastAPI,
        endpoints: Mapping[str, EndpointHandler],
        *,
        authenticate: Authenticate,
        foreign_pages: ForeignPages,
        problem_bodies: ProblemBodies = OPENAI_BODIES,
        sign_in: Mapping[str, ProblemPage] | None = None,
        free_paths: frozenset[str] = FREE_PATHS,
    ) -> None:
        """`problem_bodies`: the error bodies of other APIs.

        `free_paths`: answered without a key; such requests have no principal.

        `sign_in`: by page path, the response to a browser that opens the page without a key.
        """
        self.app = app
        self._endpoints = endpoints
        self._authenticate = authenticate
        self._foreign_pages = foreign_pages
        self._problem_bodies = problem_bodies
        self._sign_in = sign_in or {}
        self._free_paths = free_paths
        self.sessions: Sessions | None = None
        """Set where people sign in on the pages."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the application's lifespan.

        Also the last resort: an exception that was not handled is answered with an error body and
        raised again, so that the server logs it.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = RequestHeaders(scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        context = begin_log_context(request_id)
        needs_no_key = scope["path"] in self._free_paths
        path, named_model = meant_path(scope["path"])
        scope["path"] = path
        has_started = False

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                ours = request_id.encode()
                given_back = [pair for pair in message.get("headers", ()) if pair[0] != _ID]
                given_back.append((_ID, ours))
                if path.startswith("/v1/messages"):
                    given_back.append((b"request-id", ours))
                message["headers"] = given_back
            return send(message)

        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["model"] = named_model
        try:
            if not needs_no_key:
                try:
                    principal = self._principal(scope, headers)
                except IssuerUnavailableError as error:
                    await error.fetched()
                    principal = self._principal(scope, headers)
                state["principal"] = principal
                context.key, context.tenant = principal.key_id, principal.tenant
            app = await self._endpoint(scope, receive, send_with_id, headers)
            await app(scope, receive, send_with_id)
        except (GatewayError, EngineError, HTTPException) as error:
            response = self._refusal(scope, headers, error)
            await response(scope, receive, send_with_id)
        except Exception as error:
            if not has_started:
                response = self._problem_bodies.response(path, problem_of(error))
                await response(scope, receive, send_with_id)
            raise

    def _principal(self, scope: Scope, headers: RequestHeaders) -> Principal:
        """Return who asks. Raises AuthenticationError, RateLimitError or PermissionDeniedError."""
        authorization = headers.get("authorization")
        api_key = headers.get("x-api-key") or headers.get("api-key")
        if self.sessions is not None and not (authorization or api_key):
            found = self.sessions.principal(scope["method"], headers)
            if found is not None:
                return found
        peer = scope.get("client")
        principal = self._authenticate(authorization, api_key, peer[0] if peer else None)
        if principal is ANONYMOUS:
            self._foreign_pages.check(scope["method"], headers)
        return principal

    async def _endpoint(
        self, scope: Scope, receive: Receive, send: Send, headers: RequestHeaders
    ) -> ASGIApp:
        """Return what answers the request: an endpoint's response, or `app`."""
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is None or scope["method"] != "POST":
            return self.app
        return await endpoint(HeadedRequest(scope, receive, send, headers))

    def _refusal(
        self, scope: Scope, headers: Headers, error: GatewayError | EngineError | HTTPException
    ) -> Response:
        """Report the error; answer a browser without a key with the page to sign in."""
        path, problem = scope["path"], problem_of(error)
        report_problem(path, problem, error)
        problem = _shown(problem, scope["state"])
        page = self._sign_in.get(path) if isinstance(error, AuthenticationError) else None
        if page is not None and _is_browser(scope, headers):
            return page(problem)
        return self._problem_bodies.response(path, problem)


def _shown(problem: Problem, state: Mapping[str, Any]) -> Problem:
    """Return the error without what the key, or the alias that its request names, conceals."""
    principal: Principal | None = state.get("principal")
    by_key = principal is not None and principal.scopes.shown() == "nothing"
    return without_tiers(problem) if state.get("hides_tiers", by_key) else problem


def _is_browser(scope: Scope, headers: Headers) -> bool:
    """True if a browser opens the page: programs do not ask for HTML."""
    return scope["method"] == "GET" and "text/html" in headers.get("accept", "")


def principal_of(request: Request) -> Principal:
    """Return the request's principal."""
    principal: Principal = request.scope["state"]["principal"]
    return principal


def request_id_of(request: Request) -> str:
    """Return the request's `x-request-id`."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def model_in_path(request: Request) -> str | None:
    """Return the model that the request's path names, as Azure's clients do."""
    model: str | None = request.scope["state"]["model"]
    return model
