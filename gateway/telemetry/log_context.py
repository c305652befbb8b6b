"""The ids of the request that a log line is about, added to every line on its way."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class LogContext:
    """Ids of one request. Tasks that its own task starts share it, and may fill it in."""

    request_id: str
    key: str | None = None
    """The key's public id."""
    tenant: str = ""
    """The key's; not logged, but places that requests wait in are shared out by it."""
    tier: str | None = None
    """The one that answers."""
    trace_id: str | None = None


_CURRENT: Final[ContextVar[LogContext | None]] = ContextVar("outrider_log_context", default=None)


def begin_log_context(request_id: str) -> LogContext:
    """Attach this request to the task, and to those that it starts."""
    context = LogContext(request_id)
    _CURRENT.set(context)
    return context


def log_context() -> LogContext | None:
    """Return the task's request; None between requests."""
    return _CURRENT.get()
