"""Refusals of connections that break the bounds: whole HTTP answers without an endpoint."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from outrider.gateway.contract.errors.http import INVALID_REQUEST, SERVER_ERROR, Problem
from outrider.gateway.http.edge.cors import Header
from outrider.gateway.http.edge.headers import SECURITY_HEADERS


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeRefusal:
    """The reason to refuse a request. `code` also names it in metrics and logs."""

    status: HTTPStatus
    code: str
    message: str

    def answer(self, more_headers: Iterable[Header] = ()) -> bytes:
        """Return the bytes of an HTTP/1.1 answer that ends the connection."""
        is_ours = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        problem = Problem(
            status=self.status,
            message=self.message,
            type=SERVER_ERROR if is_ours else INVALID_REQUEST,
            code=self.code,
        )
        body = problem.body()
        headers: list[Header] = [
            *more_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"cache-control", b"no-store"),
            (b"x-request-id", f"req-{secrets.token_hex(12)}".encode()),
            *SECURITY_HEADERS,
        ]
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers += [(b"retry-after", b"1"), (b"x-should-retry", b"true")]
        line = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n".encode()
        return b"".join([line, *(b"%s: %s\r\n" % header for header in headers), b"\r\n", body])


def _bad(code: str, message: str) -> EdgeRefusal:
    return EdgeRefusal(status=HTTPStatus.BAD_REQUEST, code=code, message=message)


MALFORMED: Final = _bad("malformed_request", "This is not a well-formed HTTP/1.1 request.")
BAD_HOST: Final = _bad(
    "invalid_host", "Send exactly one header host, with a name and maybe a port."
)
BAD_FRAMING: Final = _bad(
    "invalid_framing", "Send the body with content-length or with transfer-encoding: chunked."
)
BAD_PATH: Final = EdgeRefusal(
    status=HTTPStatus.NOT_FOUND,
    code="invalid_path",
    message="The path contains control characters; remove them.",
)
AMBIGUOUS: Final = _bad("repeated_header", "A header that may come once came several times.")
WASTEFUL: Final = _bad(
    "invalid_framing", "The body's chunks are almost all framing; send larger chunks."
)
TOO_MANY_AT_ONCE: Final = _bad(
    "too_many_pipelined", "Too many requests were sent at once: wait for answers."
)
WRONG_VERSION: Final = EdgeRefusal(
    status=HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
    code="http_version",
    message="This gateway speaks HTTP/1.1.",
)
LATE_HEADERS: Final = EdgeRefusal(
    status=HTTPStatus.REQUEST_TIMEOUT,
    code="header_timeout",
    message="The request's headers did not arrive in time.",
)
LATE_BODY: Final = EdgeRefusal(
    status=HTTPStatus.REQUEST_TIMEOUT,
    code="body_timeout",
    message="The request's body did not arrive in time.",
)
LARGE_HEADERS: Final = EdgeRefusal(
    status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    code="headers_too_large",
    message="The request's line and headers are too many or too large.",
)
LONG_URL: Final = EdgeRefusal(
    status=HTTPStatus.REQUEST_URI_TOO_LONG,
    code="url_too_long",
    message="The request's URL is too long.",
)
TOO_MANY_CONNECTIONS: Final = EdgeRefusal(
    status=HTTPStatus.SERVICE_UNAVAILABLE,
    code="too_many_connections",
    message="The gateway has as many connections as it may: try again in a moment.",
)
