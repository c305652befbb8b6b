"""Headers that restrict how browsers may use an answer."""

from collections.abc import Awaitable, Iterable
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.gateway.http.edge.cors import CorsAnswer, CorsPolicy, Header, RefusedOrigins

SECURITY_HEADERS: Final[tuple[Header, ...]] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of every answer. Pages that CORS admits use fetch, which the last one allows."""
_NO_STORE: Final[Header] = (b"cache-control", b"no-store")
_NO_CONTENT: Final[Header] = (
    b"content-security-policy",
    b"default-src 'none'; frame-ancestors 'none'",
)
_NO_CORS: Final = CorsAnswer()


class EdgeHeaders:
    """The outermost application: security headers and CORS on every answer, at small cost.

    An answer without headers of its own may not be stored, framed or load anything; one that sets
    them (a stream, the playground's page) keeps them. Preflights are answered here, before a key is
    required.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        cors: CorsPolicy | None = None,
    ) -> None:
        """Store the arguments. `cors` None: pages of other sites may not read answers."""
        self.app = app
        self._cors = cors
        self._refused_origins = RefusedOrigins()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        cors = _NO_CORS if self._cors is None else self._cors.judge(scope)

        def send_with_headers(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = _completed(message.get("headers", ()), cors.headers)
            return send(message)

        app = self._refused(scope, cors) or self.app
        await app(scope, receive, send_with_headers)

    def _refused(self, scope: Scope, cors: CorsAnswer) -> ASGIApp | None:
        """Return the answer to requests that reach no endpoint."""
        if self._cors is None:
            self._refused_origins.log_preflight(scope)
        if not cors.is_preflight:
            return None
        return cors.refusal.response() if cors.refusal else Response(status_code=204)


def _completed(headers: Iterable[Header], more: Iterable[Header]) -> list[Header]:
    """Return the answer's headers, and those of `more` that it lacks."""
    completed = list(headers)
    names = {name for name, _ in completed}
    if b"cache-control" not in names:
        completed.append(_NO_STORE)
    if b"content-security-policy" not in names:
        completed.append(_NO_CONTENT)
    completed.extend(SECURITY_HEADERS)
    completed.extend(more)
    return completed
