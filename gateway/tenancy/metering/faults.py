"""Distinguishes failures caused by a request from those of the gateway or a server."""

from http import HTTPStatus
from typing import Final

from outrider.engine.errors import InfeasibleObjectiveError, QueueFullError
from outrider.gateway.contract.errors.http import problem_of
from outrider.gateway.contract.errors.tree import (
    BodiesFullError,
    DeadlineExceededError,
    GenerationError,
    KeyBodiesFullError,
    ThrottledError,
)

_FAILED_ALONE: Final = "request_failed"
"""The engine's error code for a request that failed because of its own content."""
_OVERLOADED: Final = (
    QueueFullError,
    InfeasibleObjectiveError,
    ThrottledError,
    BodiesFullError,
    KeyBodiesFullError,
)


def is_requests_fault(error: Exception) -> bool:
    """Return whether the request itself caused this error, so that it counts against limits.

    Every status below 500 is the request's fault except those of an overload, which would have hit
    any other request. So are a deadline that passes, which the request chose itself, and failures
    of its grammar, its rules or its sampling in the engine.
    """
    if isinstance(error, DeadlineExceededError):
        return True
    if isinstance(error, GenerationError) and error.code == _FAILED_ALONE:
        return True
    if isinstance(error, _OVERLOADED):
        return False
    return problem_of(error).status < HTTPStatus.INTERNAL_SERVER_ERROR
