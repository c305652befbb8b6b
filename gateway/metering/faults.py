"""Tells failures that a request caused from those that the gateway or a server caused."""

from http import HTTPStatus
from typing import Final

from engine.errors import InfeasibleObjectiveError, QueueFullError
from gateway.errors.http import problem_of
from gateway.errors.tree import (
    BodiesFullError,
    DeadlineExceededError,
    GenerationError,
    KeyBodiesFullError,
    ThrottledError,
)

_FAILED_ALONE: Final = "request_failed"
"""The engine's word for a request that failed by what was its own."""
_OVERLOADED: Final = (
    QueueFullError,
    InfeasibleObjectiveError,
    ThrottledError,
    BodiesFullError,
    KeyBodiesFullError,
)


def is_requests_fault(error: Exception) -> bool:
    """Return whether the request itself led to this error, so that it counts against limits.

    Every status below 500 is the request's fault but those of an overload, which would have hit
    any other request. A deadline that passes was the request's own choice, and what its grammar,
    its rules or its sampling broke in the engine was its own doing.
    """
    if isinstance(error, DeadlineExceededError):
        return True
    if isinstance(error, GenerationError) and error.code == _FAILED_ALONE:
        return True
    if isinstance(error, _OVERLOADED):
        return False
    return problem_of(error).status < HTTPStatus.INTERNAL_SERVER_ERROR
