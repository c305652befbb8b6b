"""Every error that the gateway raises itself.

GatewayError
    the request is at fault
        BadRequestError, ModelNotFoundError, NotFoundError, LoopError
        BodyTooLargeError, BodyTooComplexError, ContentEncodingError, MediaTypeError
        ConflictError, IdempotencyKeyReusedError
        AuthenticationError, PermissionDeniedError
    there is no room now, or no longer
        PromptQueueFullError, KeyBodiesFullError, BodiesFullError
        RateLimitError, BudgetError
    the engine
        NotReadyError
        GenerationError
            EngineLostError
                EngineLostTwiceError
            RequestFailedError
    an upstream
        UpstreamError, UpstreamRefusalError
    every tier that may answer
        UnavailableError, ThrottledError, DeadlineExceededError
    this process
        DrainingError, StorageError
    an issuer of tokens
        IssuerUnavailableError

`outrider.gateway.contract.errors.http` holds the status and the code of each;
`outrider.engine.errors` the engine's own tree.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, Literal

_MAX_QUOTED_CHARS: Final = 64
_MAX_NAMES: Final = 32
# The openai client waits no longer. Limits by the minute are over sooner, those by the day are not.
_MAX_RETRY_S: Final = 120.0


class GatewayError(Exception):
    """Base of the gateway's own refusals. `param` is the path of the field at fault."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BadRequestError(GatewayError):
    """The request is malformed, or uses an unsupported feature."""


class ModelNotFoundError(GatewayError):
    """No model has this name."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"The model {name!r} does not exist; available: {', '.join(known[:_MAX_NAMES])}"
            + (f" and {len(known) - _MAX_NAMES} more." if len(known) > _MAX_NAMES else "."),
            param="model",
            code="model_not_found",
        )


class BodyTooLargeError(GatewayError):
    """The request's body is over the limit."""

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(
            f"The request body is larger than {limit_bytes} bytes. Send less in one request."
        )


class BodyTooComplexError(GatewayError):
    """The request's JSON exceeds a bound on its structure. `setting` names the bound."""

    def __init__(self, counted: str, setting: str, *, count: int, limit: int) -> None:
        super().__init__(
            f"The request body has {count} {counted}; at most {limit} are allowed "
            f"(limits.{setting}). Send less in one request."
        )


class PromptQueueFullError(GatewayError):
    """The tenant's queue of long prompts to be tokenised is full."""

    def __init__(self, *, num_waiting: int) -> None:
        super().__init__(
            f"This tenant already has {num_waiting} long prompts waiting to be tokenised, the most "
            "allowed. Try again when one of them has been answered.",
            code="too_many_long_prompts",
        )


class KeyBodiesFullError(GatewayError):
    """The bodies of the key's running requests are at their bound in bytes."""

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(
            f"The bodies of one key's running requests may hold {limit_bytes} bytes together "
            "(http.max_bytes_in_flight_per_key). Try again when one of them has ended.",
            code="too_many_bytes_in_flight",
        )


class BodiesFullError(GatewayError):
    """The bodies of all running requests are at their bound in bytes."""

    def __init__(self) -> None:
        super().__init__(
            "The bodies of all running requests hold as many bytes as the gateway allows "
            "(http.max_bytes_in_flight). Try again in a moment.",
            code="too_many_bytes_in_flight",
        )


class ContentEncodingError(GatewayError):
    """The body is compressed."""

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"content-encoding {encoding[:_MAX_QUOTED_CHARS]!r} is not supported. Send the body "
            "uncompressed, without this header.",
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
    """The engine ended the request by an internal error."""


class EngineLostError(GenerationError):
    """The engine died while it served the request; another attempt meets a new engine."""


class EngineLostTwiceError(EngineLostError):
    """The engine died with the same request for the second time; it is not tried again."""

    should_retry = False


class RequestFailedError(GenerationError):
    """The request's grammar or parameters failed in the engine, and would fail again."""

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
    "not_trusted",  # 401 or 403: it rejects our key
    "no_credential",  # no key or token can be had for it
    "content_type",
    "garbage",  # its response cannot be parsed
    "too_large",
    "ended_early",
    "reported",  # an error event in its stream
    "ejected",  # not asked: its breaker is open
]
"""The error code of a failure has `upstream_` in front, as in `upstream_no_credential`."""
BLAMELESS_FAILURES: Final[frozenset[FailureKind]] = frozenset(
    {"throttled", "ejected", "no_credential"}
)
"""Failures that do not count against a server's health: a busy server is not a broken one."""


class UpstreamError(GatewayError):
    """An upstream server failed. The message names its tier only.

    `replica` (host:port) is for logs. is_retryable: another attempt, at any replica, may do
    better. blames_server: it counts against the server's health. `retry_after_s`: what the server
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
        """Return whether the same request may succeed later, or at another replica."""
        return self.failure not in ("not_trusted", "no_credential")

    @property
    def blames_server(self) -> bool:
        """True if it counts against the server's health: a busy server is not a broken one."""
        return self.failure not in BLAMELESS_FAILURES


class UpstreamRefusalError(GatewayError):
    """The upstream server says that the request is at fault (4xx); its message is passed on.

    `tier`, where known, tells the client which tier wrote the message.
    """

    def __init__(
        self, message: str, *, status: int, body: bytes, tier: str = "", replica: str = ""
    ) -> None:
        super().__init__(message, code="upstream_refused")
        self.status = status
        self.body = body
        self.tier = tier
        self.replica = replica


class AdapterUnavailableError(GatewayError):
    """The adapter has a name, but its files cannot be read any more."""


class UnavailableError(GatewayError):
    """Every tier that may answer this request is down or unreachable."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="no_tier_available")
        self.retry_after_s = retry_after_s


class ThrottledError(GatewayError):
    """Every tier that may answer this request is rate-limited."""

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
    """The request carries no valid key."""

    headers: Mapping[str, str] = {"www-authenticate": "Bearer"}

    def __init__(self, message: str, *, code: str = "invalid_api_key") -> None:
        super().__init__(message, code=code)


class IssuerUnavailableError(GatewayError):
    """The token may be valid, but its issuer's keys are not there to say so."""

    _MAX_WAIT_S: Final = 2.0

    def __init__(self, message: str, fetch: asyncio.Task[None] | None = None) -> None:
        """`fetch`: reads the keys now."""
        super().__init__(message, code="issuer_unavailable")
        self.retry_after_s = 1.0
        self._fetch = fetch

    async def fetched(self) -> None:
        """Wait until the keys have been read, but no more than two seconds."""
        if self._fetch is not None:
            await asyncio.wait({self._fetch}, timeout=self._MAX_WAIT_S)


class PermissionDeniedError(GatewayError):
    """The key is valid, but lacks the permission."""

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
        """True if the wait is short enough for a retry, such as a minute, not a day."""
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
    """The request names something that does not exist."""


class ConflictError(GatewayError):
    """The request conflicts with the current state."""


class IdempotencyKeyReusedError(GatewayError):
    """The idempotency-key was used before, with another body."""

    def __init__(self) -> None:
        super().__init__(
            "This idempotency-key has been used with another body. Send a new key with a new "
            "request, or the first body again.",
            code="idempotency_key_reused",
        )


class DrainingError(GatewayError):
    """The gateway is shutting down; another instance, or its successor, answers."""

    def __init__(self) -> None:
        super().__init__("The gateway is shutting down. Try again in a moment.", code="draining")


class StorageError(GatewayError):
    """The database, or the store of the limits, is unavailable."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, code="storage_unavailable")
        self.retry_after_s = retry_after_s
