"""The seam between the path of a request and the traces that operators read.

The classes here record nothing; those of `otel` override them where traces are enabled.
"""

from collections.abc import Mapping
from typing import Final, Literal

AttributeValue = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]
SpanKind = Literal["SERVER", "INTERNAL", "CLIENT"]

NO_ATTRIBUTES: Final[Attributes] = {}
NO_HEADERS: Final[Mapping[str, str]] = {}


class Span:
    """One piece of work in a trace. Holds a prompt or an answer only where content is opted in.

    All times are seconds on the gateway's clock; None is now. No method blocks or raises.
    """

    __slots__ = ()

    @property
    def is_recording(self) -> bool:
        """Return whether its trace is recorded. If not, attributes need not be computed."""
        return False

    @property
    def trace_id(self) -> str:
        """Return 32 hexadecimal digits; empty where nothing is recorded."""
        return ""

    def child(
        self,
        name: str,
        *,
        kind: SpanKind = "INTERNAL",
        start_s: float | None = None,
        attributes: Attributes = NO_ATTRIBUTES,
    ) -> "Span":
        """Begin a child span. The caller ends it."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Add attributes to the work; does nothing once it has ended."""

    def event(self, name: str, *, at_s: float | None = None) -> None:
        """Record an event at one moment of it."""

    def fail(self, error_type: str) -> None:
        """Mark the work as failed, with a short stable word."""

    def end(self, at_s: float | None = None) -> None:
        """End the work. A second call does nothing."""

    def headers(self) -> Mapping[str, str]:
        """Return the headers that pass the trace on, for a request that is part of this work."""
        return NO_HEADERS


NULL_SPAN: Final = Span()


class Tracer:
    """Begins traces, or continues those of callers."""

    __slots__ = ()

    def begin(
        self,
        name: str,
        *,
        headers: Mapping[str, str] = NO_HEADERS,
        start_s: float | None = None,
    ) -> Span:
        """Begin the span of one API request. `headers` are the caller's, unchecked."""
        return NULL_SPAN

    async def close(self) -> None:
        """Send the ended spans, for some seconds at most."""


NULL_TRACER: Final = Tracer()
