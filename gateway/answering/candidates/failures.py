"""Failures of models: whether others may still answer, and why the next ones are tried."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from outrider.engine.errors import (
    CrashSuspectError,
    EngineError,
    InfeasibleObjectiveError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from outrider.gateway.contract.answers.responder import HandOffKind, Place, RouteReason
from outrider.gateway.contract.errors.tree import (
    BadRequestError,
    BudgetError,
    EngineLostTwiceError,
    GatewayError,
    GenerationError,
    LoopError,
    NotReadyError,
    RateLimitError,
    ThrottledError,
    UnavailableError,
    UpstreamError,
    UpstreamRefusalError,
)
from outrider.gateway.contract.schema.kinds import FallbackKind

# The model's name or the path is wrong: an error in the settings, not in the request.
_NOT_FOUND: Final = frozenset({404, 405})


class CutShortError(GatewayError):
    """Raised by a responder whose server ended the answer early; another model may go on.

    `kind`: content_filter or context_length. `ending`: the parts that end the answer as the server
    did, for where no other model goes on.
    """

    def __init__(self, kind: FallbackKind, ending: bytes) -> None:
        super().__init__(f"The answer was ended early ({kind}).", code=kind)
        self.kind: FallbackKind = kind
        self.ending = ending


def is_passing(error: Exception) -> bool:
    """Return whether other models may still answer: the request itself is not at fault."""
    if isinstance(error, EngineLostTwiceError):
        return False  # the request may be what crashes engines
    if isinstance(error, EngineError):
        return not isinstance(error, InvalidRequestError | CrashSuspectError)
    if isinstance(error, UpstreamRefusalError):
        return error.status in _NOT_FOUND
    return isinstance(
        error,
        UpstreamError
        | UnavailableError
        | ThrottledError
        | NotReadyError
        | GenerationError
        | LoopError,
    )


def after_failure(origin: RouteReason, label: str, error: Exception) -> RouteReason:
    """Return why the next models are tried; `label` names those that failed."""
    kind: HandOffKind = "failure"
    match error:
        case PromptTooLongError():
            kind, why = "capability", "too long for the local models"
        case QueueFullError():
            kind, why = "load", "the queue of the local models is full"
        case InfeasibleObjectiveError():
            kind, why = "load", "the local models are too busy for its first token"
        case NotReadyError():
            why = "the local models are not ready"
        case BadRequestError():
            kind, why = "capability", "the upstream tier does not support this request"
        case RateLimitError() | BudgetError():
            kind, why = "load", "the key's limit for the upstream tier is used up"
        case _:
            why = f"the {label} failed: {name_of(error)}"
    return with_reason(origin, kind, why)


def with_reason(origin: RouteReason, kind: HandOffKind, why: str) -> RouteReason:
    """Return the reason of the next models, behind the reasons before."""
    reason = f"{origin.reason}; {why}" if origin.reason else why
    return replace(origin, hand_off=kind, reason=reason, is_degraded=False)


def name_of(error: Exception) -> str:
    """Return a short stable word for an error."""
    return str(getattr(error, "code", None) or type(error).__name__)


def summary(failures: Mapping[Place, Exception]) -> Exception:
    """Return one error for all failures: the original one if there was a single place."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    return together("tier", failures, failures.values())


def together(
    kind: str, errors: Mapping[Any, Exception], passing: Iterable[Exception]
) -> UnavailableError:
    """Return one error for several by their names; those that pass say when to try again."""
    waits = [getattr(error, "retry_after_s", None) or 1.0 for error in passing]
    said = " ".join(f"[{name}] {error}" for name, error in errors.items())
    return UnavailableError(
        f"No {kind} can answer at the moment; try again soon. {said}", retry_after_s=min(waits)
    )
