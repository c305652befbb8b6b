"""The HTTP status, headers and OpenAI error body of every exception: one table."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from outrider.engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    EngineNotStartedError,
    InfeasibleObjectiveError,
    InvalidAdapterError,
    InvalidRequestError,
    PinTooLargeError,
    PromptTooLongError,
    QueueFullError,
    TierUnavailableError,
)
from outrider.gateway.contract.errors.tree import (
    AdapterUnavailableError,
    AuthenticationError,
    BadRequestError,
    BodiesFullError,
    BodyTooComplexError,
    BodyTooLargeError,
    BudgetError,
    ConflictError,
    ContentEncodingError,
    DeadlineExceededError,
    DrainingError,
    EngineLostError,
    EngineLostTwiceError,
    GatewayError,
    GenerationError,
    IdempotencyKeyReusedError,
    IssuerUnavailableError,
    KeyBodiesFullError,
    LoopError,
    MediaTypeError,
    ModelNotFoundError,
    NotFoundError,
    NotReadyError,
    PermissionDeniedError,
    PromptQueueFullError,
    RateLimitError,
    RequestFailedError,
    StorageError,
    ThrottledError,
    UnavailableError,
    UpstreamError,
    UpstreamRefusalError,
)

logger = logging.getLogger(__name__)

INVALID_REQUEST: Final = "invalid_request_error"
RATE_LIMIT: Final = "rate_limit_error"
AUTHENTICATION: Final = "authentication_error"
PERMISSION: Final = "permission_error"
SERVER_ERROR: Final = "server_error"

_MAX_PATH_CHARS: Final = 200
_MAX_WAIT_S: Final = 86_400.0
_MAX_RESET_S: Final = 32 * _MAX_WAIT_S  # longer than any month


@dataclass(frozen=True, slots=True)
class _Answer:
    """The HTTP answer to one kind of exception. `retry_after_s` None: a retry would not help."""

    status: HTTPStatus
    type: str = INVALID_REQUEST
    code: str | None = None
    retry_after_s: float | None = None


# Looked up along the exception's base classes, so a base's row covers what is not listed.
_ANSWERS: Final[Mapping[type[Exception], _Answer]] = {
    BadRequestError: _Answer(HTTPStatus.BAD_REQUEST),
    InvalidRequestError: _Answer(HTTPStatus.BAD_REQUEST),
    InvalidAdapterError: _Answer(HTTPStatus.BAD_REQUEST),
    PromptTooLongError: _Answer(HTTPStatus.BAD_REQUEST, code="context_length_exceeded"),
    PinTooLargeError: _Answer(HTTPStatus.BAD_REQUEST),
    ModelNotFoundError: _Answer(HTTPStatus.NOT_FOUND),
    TierUnavailableError: _Answer(HTTPStatus.NOT_FOUND, code="model_not_found"),
    BodyTooComplexError: _Answer(HTTPStatus.BAD_REQUEST, code="body_too_complex"),
    BodyTooLargeError: _Answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, code="body_too_large"),
    KeyBodiesFullError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, RATE_LIMIT, retry_after_s=1.0),
    BodiesFullError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    ContentEncodingError: _Answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    MediaTypeError: _Answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, code="unsupported_media_type"),
    PromptQueueFullError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, RATE_LIMIT, retry_after_s=1.0),
    QueueFullError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, RATE_LIMIT, retry_after_s=1.0),
    InfeasibleObjectiveError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, RATE_LIMIT),
    NotReadyError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    EngineDiedError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    EngineNotStartedError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR),
    EngineLostError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    CrashSuspectError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR),
    EngineLostTwiceError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR),
    RequestFailedError: _Answer(HTTPStatus.UNPROCESSABLE_ENTITY),
    GenerationError: _Answer(HTTPStatus.INTERNAL_SERVER_ERROR, SERVER_ERROR),
    UpstreamError: _Answer(HTTPStatus.BAD_GATEWAY, SERVER_ERROR),
    UpstreamRefusalError: _Answer(HTTPStatus.BAD_REQUEST),
    AdapterUnavailableError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR),
    UnavailableError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    ThrottledError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, RATE_LIMIT, retry_after_s=1.0),
    DeadlineExceededError: _Answer(HTTPStatus.GATEWAY_TIMEOUT, SERVER_ERROR),
    LoopError: _Answer(HTTPStatus.LOOP_DETECTED),
    AuthenticationError: _Answer(HTTPStatus.UNAUTHORIZED, AUTHENTICATION),
    IssuerUnavailableError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR),
    PermissionDeniedError: _Answer(HTTPStatus.FORBIDDEN, PERMISSION),
    RateLimitError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, RATE_LIMIT, retry_after_s=1.0),
    BudgetError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, "insufficient_quota"),
    NotFoundError: _Answer(HTTPStatus.NOT_FOUND),
    ConflictError: _Answer(HTTPStatus.CONFLICT),
    IdempotencyKeyReusedError: _Answer(HTTPStatus.UNPROCESSABLE_ENTITY),
    DrainingError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    StorageError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    EngineError: _Answer(HTTPStatus.INTERNAL_SERVER_ERROR, SERVER_ERROR),
    Exception: _Answer(HTTPStatus.INTERNAL_SERVER_ERROR, SERVER_ERROR, code="internal_error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An exception as the client sees it. `raw`: the body, where another server has written it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None

    def body(self) -> bytes:
        """Return the OpenAI error object as JSON."""
        if self.raw is not None:
            return self.raw
        detail = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": detail})

    def response(self, body: bytes | None = None) -> Response:
        """Return the HTTP response; `body` replaces the error object for another API's format."""
        told = self.body() if body is None else body
        return Response(told, self.status, dict(self.headers), media_type="application/json")


ProblemBody = Callable[[Problem], bytes]
"""Writes an error in the words of another API."""


def problem_of(error: Exception) -> Problem:
    """Return the client's view of an error. An unplanned exception reveals nothing about itself."""
    if isinstance(error, HTTPException):
        return _routing_problem(error)
    if isinstance(error, UpstreamRefusalError):
        return Problem(
            status=error.status,
            message=str(error),
            type=INVALID_REQUEST,
            code=error.code,
            headers={"x-outrider-tier": error.tier} if error.tier else {},
            raw=error.body,
        )
    answer = next(_ANSWERS[kind] for kind in type(error).__mro__ if kind in _ANSWERS)
    planned = isinstance(error, GatewayError | EngineError)
    return Problem(
        status=answer.status,
        message=str(error) if planned else "The gateway failed to answer this request.",
        type=answer.type,
        param=getattr(error, "param", None),
        code=answer.code or getattr(error, "code", None),
        headers=_retry_headers(error, answer),
    )


def _retry_headers(error: Exception, answer: _Answer) -> dict[str, str]:
    """Return the headers that the openai client obeys, and the error's own.

    Waits are rounded up, so that a client that waits as told finds room.
    """
    headers = dict(getattr(error, "headers", {}))
    wait_s: float | None = getattr(error, "retry_after_s", answer.retry_after_s)
    should_retry: bool | None = getattr(error, "should_retry", None if wait_s is None else True)
    if wait_s is None and isinstance(error, InfeasibleObjectiveError):
        should_retry = False  # clients repeat a 429 unless they are told not to
    if wait_s is not None:
        wait_s = min(wait_s, _MAX_WAIT_S if should_retry else _MAX_RESET_S)
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(wait_s * 1000)))
    if should_retry is not None:
        headers["x-should-retry"] = "true" if should_retry else "false"
    return headers


def _routing_problem(error: HTTPException) -> Problem:
    """Answer an unknown path, or a method that the path does not have."""
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    return Problem(
        status=error.status_code,
        message=str(error.detail),
        type=INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR,
        code=codes.get(error.status_code),
        headers=error.headers or {},
    )


class ProblemBodies:
    """The error bodies of other APIs: those of their paths, and of all below a path's "/"."""

    def __init__(self, bodies: Mapping[str, ProblemBody]) -> None:
        self._bodies = bodies

    def response(self, path: str, problem: Problem) -> Response:
        """Return the HTTP response in the words of the API that the path belongs to."""
        top = path[: path.find("/", 1) + 1]
        body = self._bodies.get(path) or self._bodies.get(top)
        return problem.response(None if body is None else body(problem))


OPENAI_BODIES: Final = ProblemBodies({})
"""Where all errors have OpenAI's words."""


async def handle_exception(
    request: Request, error: Exception, *, bodies: ProblemBodies = OPENAI_BODIES
) -> Response:
    """Answer any exception; Starlette's exception handler."""
    problem = problem_of(error)
    if problem.status == HTTPStatus.METHOD_NOT_ALLOWED:
        problem = replace(problem, headers={"allow": ", ".join(_methods(request))})
    elif problem.code == "unknown_url":
        problem = replace(problem, message=_advice(request))
    report_problem(request.url.path, problem, error)
    return bodies.response(request.url.path, problem)


def _advice(request: Request) -> str:
    """Say where the API is, to a client whose base URL lacks its /v1."""
    path = request.url.path[:_MAX_PATH_CHARS]
    scope = dict(request.scope, path=f"/v1{request.url.path}")
    if any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
        return f"Unknown path {path}: the API is under /v1, so the base URL ends in /v1."
    return f"Unknown path {path}. /openapi.json lists all paths."


def _methods(request: Request) -> list[str]:
    """Return all methods of the path; Starlette names those of its first route only."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


def report_problem(path: str, problem: Problem, error: Exception) -> None:
    """Log a failure of the gateway itself (status 500 and above)."""
    if problem.status >= 500:
        # "Not ready yet" is an answer, not a failure: probes ask for it every second.
        logger.log(
            logging.DEBUG if problem.status == 503 else logging.ERROR,
            "request failed path=%s status=%d code=%s error=%s",
            path,
            problem.status,
            problem.code,
            type(error).__name__,
        )
