"""Every failure's HTTP status and OpenAI error body: one table, one place."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from engine.errors import (
    CrashSuspectError,
    EngineDiedError,
    EngineError,
    InfeasibleObjectiveError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    TierUnavailableError,
)

logger = logging.getLogger(__name__)

INVALID_REQUEST: Final = "invalid_request_error"
RATE_LIMIT: Final = "rate_limit_error"
AUTHENTICATION: Final = "authentication_error"
PERMISSION: Final = "permission_error"
SERVER_ERROR: Final = "server_error"

_MAX_QUOTED_CHARS: Final = 64
_MAX_COMPLAINTS: Final = 64
_MAX_NAMES: Final = 32
_MAX_WAIT_S: Final = 86_400.0
_MAX_RESET_S: Final = 32 * _MAX_WAIT_S  # a month, and some
# The openai client's own bound on waiting; minutes of limits are over sooner, days mostly not.
_MAX_RETRY_S: Final = 120.0


class GatewayError(Exception):
    """Base of the gateway's own refusals. `param` is the path of the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BadRequestError(GatewayError):
    """The request is malformed or asks for what is not supported."""


class ModelNotFoundError(GatewayError):
    """No model has this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"The model {name!r} does not exist. Known are: {', '.join(known[:_MAX_NAMES])}"
            + (f" and {len(known) - _MAX_NAMES} more." if len(known) > _MAX_NAMES else "."),
            param="model",
            code="model_not_found",
        )


class BodyTooLargeError(GatewayError):
    """The request's body is over the limit."""

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.")


class BodyTooComplexError(GatewayError):
    """The request's JSON has more of something than a parser is given. `setting` is the bound's."""

    def __init__(self, counted: str, setting: str, *, count: int, limit: int) -> None:
        super().__init__(
            f"The request body has {count} {counted}; at most {limit} are allowed "
            f"(limits.{setting}). Send less in one request."
        )


class PromptQueueFullError(GatewayError):
    """As many long prompts of this tenant wait to be tokenised as may."""

    def __init__(self, *, num_waiting: int) -> None:
        super().__init__(
            f"{num_waiting} long prompts of this tenant wait to be tokenised, which is all that "
            "may. Try again when one of them has been answered.",
            code="too_many_long_prompts",
        )


class KeyBodiesFullError(GatewayError):
    """The bodies of this key's requests hold as many bytes as one key's may."""

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(
            f"The bodies of this key's requests hold {limit_bytes} bytes together, which is all "
            "that one key's may. Try again when one of the requests has ended.",
            code="too_many_bytes_in_flight",
        )


class BodiesFullError(GatewayError):
    """The bodies of all requests hold as many bytes as they may."""

    def __init__(self) -> None:
        super().__init__(
            "The gateway holds as many bytes of request bodies as it may: try again in a moment.",
            code="too_many_bytes_in_flight",
        )


class ContentEncodingError(GatewayError):
    """The body is compressed."""

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"Send the body without content-encoding: {encoding[:_MAX_QUOTED_CHARS]!r} is not "
            "supported.",
            code="unsupported_content_encoding",
        )


class MediaTypeError(GatewayError):
    """The body is not declared to be JSON."""

    def __init__(self, media_type: str) -> None:
        quoted = media_type[:_MAX_QUOTED_CHARS]
        super().__init__(f"Send the header content-type: application/json, not {quoted!r}.")


class NotReadyError(GatewayError):
    """The engine cannot take requests now."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, code="engine_not_ready")


class GenerationError(GatewayError):
    """The engine ended the request by an error of ours."""


class EngineLostError(GenerationError):
    """The engine died under the request; another attempt will find a new one."""


class EngineLostTwiceError(EngineLostError):
    """The engine died under the same request for the second time: it is not tried again."""

    should_retry = False


class RequestFailedError(GenerationError):
    """The engine could not follow this request's own grammar or parameters: it would fail again."""

    should_retry = False


FailureKind = Literal[
    "refused",  # the connection was not taken, or the host is not known
    "reset",  # it was taken and broken off
    "tls",
    "connect_timeout",
    "first_token_timeout",
    "between_tokens_timeout",
    "total_timeout",
    "status",  # an HTTP status that says the server failed
    "throttled",  # 429
    "not_trusted",  # 401 or 403: our key is not taken
    "content_type",
    "garbage",  # what it sent cannot be read
    "too_large",
    "ended_early",
    "reported",  # an error event in its stream
    "ejected",  # nobody asked it: its breaker is open
]
BLAMELESS_FAILURES: Final[frozenset[FailureKind]] = frozenset({"throttled", "ejected"})
"""They do not tell against a server's health: a busy server is not a broken one."""


class UpstreamError(GatewayError):
    """An upstream server did not answer as it should. The message names its tier only.

    `replica` (host:port) is for logs. is_retryable: another attempt, there or elsewhere, may do
    better. blames_server: it tells against the server's health. retry_after_s: what the server
    asked for.
    """

    def __init__(
        self,
        message: str,
        *,
        failure: FailureKind,
        replica: str = "",
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=f"upstream_{failure}")
        self.failure: FailureKind = failure
        self.replica = replica
        self.status = status
        self.asked_wait_s = retry_after_s

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed at another time or place."""
        return self.failure != "not_trusted"

    @property
    def blames_server(self) -> bool:
        """Whether it counts against the server's health: a busy server is not a broken one."""
        return self.failure not in BLAMELESS_FAILURES


class UpstreamRefusalError(GatewayError):
    """The server says that the request is at fault (4xx); its own words are passed on.

    `tier`, where it is known, tells the client whose words they are.
    """

    def __init__(
        self, message: str, *, status: int, body: bytes, tier: str = "", replica: str = ""
    ) -> None:
        super().__init__(message, code="upstream_refused")
        self.status = status
        self.body = body
        self.tier = tier
        self.replica = replica


class UnavailableError(GatewayError):
    """Nobody who may answer this request can do so now."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="no_tier_available")
        self.retry_after_s = retry_after_s


class ThrottledError(GatewayError):
    """Everyone who may answer this request is asked too much."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="upstream_throttled")
        self.retry_after_s = retry_after_s


class DeadlineExceededError(GatewayError):
    """The request's own deadline has passed."""

    CODE: Final = "deadline_exceeded"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="outrider.deadline_ms", code=self.CODE)


class LoopError(GatewayError):
    """The request has come through this gateway before."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="loop_detected")


class AuthenticationError(GatewayError):
    """No key, or none that is valid."""

    headers: Mapping[str, str] = {"www-authenticate": "Bearer"}

    def __init__(self, message: str, *, code: str = "invalid_api_key") -> None:
        super().__init__(message, code=code)


class PermissionDeniedError(GatewayError):
    """The key is valid, but not for this."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "permission_denied"
    ) -> None:
        super().__init__(message, param=param, code=code)


class RateLimitError(GatewayError):
    """A limit of the key or its team has no room now; it will have some in `retry_after_s`.

    `headers`: the x-ratelimit headers of the moment. `limit`: its name. `tier`: set where the limit
    is one tier's own, so that another tier may have room.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        code: str = "rate_limit_exceeded",
        headers: Mapping[str, str] | None = None,
        limit: str | None = None,
        tier: str | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s
        self.headers: Mapping[str, str] = headers or {}
        self.limit = limit
        self.tier = tier

    @property
    def should_retry(self) -> bool:
        """Whether a client should wait for it: not for the end of a day."""
        return self.retry_after_s <= _MAX_RETRY_S


class BudgetError(GatewayError):
    """A budget is used up, or the request could never fit: do not retry.

    `reset_s`: seconds until the day or the month ends; None where waiting does not help. `headers`,
    `limit` and `tier` as in `RateLimitError`.
    """

    should_retry = False

    def __init__(
        self,
        message: str,
        *,
        reset_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        limit: str | None = None,
        tier: str | None = None,
    ) -> None:
        super().__init__(message, code="insufficient_quota")
        self.retry_after_s = self.reset_s = reset_s
        self.headers: Mapping[str, str] = headers or {}
        self.limit = limit
        self.tier = tier


class NotFoundError(GatewayError):
    """What the request names does not exist."""


class ConflictError(GatewayError):
    """Another request contradicts this one."""


class IdempotencyKeyReusedError(GatewayError):
    """The idempotency-key has come before, with another body."""

    def __init__(self) -> None:
        super().__init__(
            "This idempotency-key has been used with another body. Send a new key with a new "
            "request, or the first body again.",
            code="idempotency_key_reused",
        )


class DrainingError(GatewayError):
    """This gateway is about to end; another one, or its successor, answers in its place."""

    def __init__(self) -> None:
        super().__init__("The gateway is shutting down.", code="draining")


class StorageError(GatewayError):
    """The database or the limits' store cannot be asked now."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="storage_unavailable")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class _Answer:
    """How one kind of exception is answered. `retry_after_s` None: a retry would not help."""

    status: HTTPStatus
    type: str = INVALID_REQUEST
    code: str | None = None
    retry_after_s: float | None = None


# Looked up along the exception's base classes, so a base's row covers what is not listed.
_ANSWERS: Final[Mapping[type[Exception], _Answer]] = {
    BadRequestError: _Answer(HTTPStatus.BAD_REQUEST),
    InvalidRequestError: _Answer(HTTPStatus.BAD_REQUEST),
    PromptTooLongError: _Answer(HTTPStatus.BAD_REQUEST, code="context_length_exceeded"),
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
    EngineLostError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    CrashSuspectError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR),
    EngineLostTwiceError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR),
    RequestFailedError: _Answer(HTTPStatus.UNPROCESSABLE_ENTITY),
    GenerationError: _Answer(HTTPStatus.INTERNAL_SERVER_ERROR, SERVER_ERROR),
    UpstreamError: _Answer(HTTPStatus.BAD_GATEWAY, SERVER_ERROR),
    UpstreamRefusalError: _Answer(HTTPStatus.BAD_REQUEST),
    UnavailableError: _Answer(HTTPStatus.SERVICE_UNAVAILABLE, SERVER_ERROR, retry_after_s=1.0),
    ThrottledError: _Answer(HTTPStatus.TOO_MANY_REQUESTS, RATE_LIMIT, retry_after_s=1.0),
    DeadlineExceededError: _Answer(HTTPStatus.GATEWAY_TIMEOUT, SERVER_ERROR),
    LoopError: _Answer(HTTPStatus.LOOP_DETECTED),
    AuthenticationError: _Answer(HTTPStatus.UNAUTHORIZED, AUTHENTICATION),
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
        """The OpenAI error object as JSON."""
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
        """The whole HTTP answer; `body` where it is said in another API's words."""
        told = self.body() if body is None else body
        return Response(told, self.status, dict(self.headers), media_type="application/json")


def problem_of(error: Exception) -> Problem:
    """What the client is told. An exception that nobody planned says nothing about itself."""
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
    """The headers that the openai client obeys, and the error's own; empty without advice.

    Waits are rounded up: who comes as early as he was told must find room.
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
    """An unknown path, a method that the path does not have."""
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    return Problem(
        status=error.status_code,
        message=str(error.detail),
        type=INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR,
        code=codes.get(error.status_code),
        headers=error.headers or {},
    )


async def handle_exception(request: Request, error: Exception) -> Response:
    """Starlette's exception handler, for every exception."""
    problem = problem_of(error)
    if problem.status == HTTPStatus.METHOD_NOT_ALLOWED:
        problem = replace(problem, headers={"allow": ", ".join(_methods(request))})
    report_problem(request.url.path, problem, error)
    return problem.response()


def _methods(request: Request) -> list[str]:
    """All that the path has; Starlette names those of its first route only."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


def report_problem(path: str, problem: Problem, error: Exception) -> None:
    """Log a failure of ours."""
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


def bad_request(error: ValidationError, body: bytes) -> BadRequestError:
    """The most specific of pydantic's complaints, with the path of its field in `body`."""
    # An object of thousands of unknown fields has as many complaints; the first ones say enough.
    details = error.errors(include_url=False, include_input=False)[:_MAX_COMPLAINTS]
    if details[0]["type"] == "json_invalid":
        return BadRequestError(
            f"The body is not valid JSON: {details[0]['ctx']['error']}.", code="invalid_json"
        )
    document = json.loads(body)
    paths = [_real_path(detail, document) for detail in details]
    # A union complains once a branch; the branch that got deepest is the one that was meant.
    depth = max(len(path) for path in paths)
    index = next(i for i, path in enumerate(paths) if len(path) == depth)
    param = ".".join(_shortened(str(part)) for part in paths[index]) or None
    reason = _explain(details[index], _value_at(document, paths[index]))
    reason = reason.removeprefix("Value error, ")  # pydantic's, before a validator's own words
    end = "" if reason.endswith(("?", ".")) else "."
    return BadRequestError(f"{param or 'body'}: {reason}{end}", param=param)


def _shortened(name: str) -> str:
    """A field's name may be the whole of a large body."""
    return name if len(name) <= _MAX_QUOTED_CHARS else f"{name[:_MAX_QUOTED_CHARS]}..."


def _real_path(detail: ErrorDetails, document: Any) -> list[str | int]:
    """pydantic's location without the names of union branches: only what indexes the body."""
    path: list[str | int] = []
    here: Any = document
    parts = list(detail["loc"])
    missing = parts.pop() if detail["type"] == "missing" else None
    for part in parts:
        try:
            here = here[part]
        except (IndexError, KeyError, TypeError):
            continue
        path.append(part)
    if detail["type"].startswith("union_tag"):
        path.append(detail["ctx"]["discriminator"].strip("'"))
    return path if missing is None else [*path, missing]


def _value_at(document: Any, path: list[str | int]) -> object:
    """What stands there; None for a field that is missing."""
    for part in path[:-1]:
        document = document[part]
    try:
        return document[path[-1]] if path else document
    except (IndexError, KeyError, TypeError):
        return None


def _explain(detail: ErrorDetails, value: object) -> str:
    """A sentence without full stop; unknown fields and words in our own words."""
    match detail["type"]:
        case "extra_forbidden":
            return "this field is unknown or not supported"
        case "missing" | "union_tag_not_found":
            return "this field is required"
        case "union_tag_invalid":
            return f"{value!r} is not supported, only {detail['ctx']['expected_tags']}"
        case "literal_error" if isinstance(value, str) and len(value) <= _MAX_QUOTED_CHARS:
            return f"{value!r} is not supported, only {detail['ctx']['expected']}"
        case _:
            return detail["msg"]
